"""What a comparison came to: one line a rule, the same for the terminal, summary.json and the report."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradsieve.lab.records import Run, write_file


@dataclass(frozen=True)
class Line:
    """One rule's result; the figures are those of its last finished epoch, bytes are one worker's."""

    name: str
    rule: str
    note: str
    epochs: int
    finished: bool
    accuracy: float | None
    best_accuracy: float | None
    density: float | None
    bytes: float | None
    times_less: float | None
    error: float | None
    seconds: float | None


def summarise(runs: Sequence[Run]) -> list[Line]:
    return [_line(run) for run in runs]


def _line(run: Run) -> Line:
    last = run.last
    return Line(
        name=run.about.run,
        rule=run.about.rule,
        note=run.about.note,
        epochs=last.epoch if last else 0,
        finished=run.end is not None,
        accuracy=last.accuracy if last else None,
        best_accuracy=max(row.accuracy for row in run.epochs) if last else None,
        density=last.density if last else None,
        bytes=last.bytes if last else None,
        times_less=last.dense_bytes / last.bytes if last and last.bytes else None,
        error=last.error if last else None,
        seconds=run.end.seconds if run.end else last.seconds if last else None,
    )


def write_summary(directory: Path, runs: Sequence[Run]) -> None:
    about = runs[0].about.model_dump(exclude={"kind", "run", "rule", "note"}, mode="json")
    content = {**about, "runs": [asdict(line) for line in summarise(runs)]}
    text = json.dumps(finite(content), indent=2, allow_nan=False) + "\n"
    write_file(directory / "summary.json", text.encode())


def finite(value: object) -> object:
    """JSON has no infinity and no NaN: a diverged run's figures become null."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def percent(fraction: float | None, digits: int = 1) -> str:
    return "-" if fraction is None else f"{100 * fraction:.{digits}f}%"


def size(count: float | None) -> str:
    """Bytes for a reader: three digits and a decimal unit.

    >>> size(3_121_000)
    '3.12 MB'
    """
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.1f}x"


def number(value: float | None) -> str:
    """A figure of any magnitude in three digits: 0, 0.123, 45.6, 1,240, 1.2e+06."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
