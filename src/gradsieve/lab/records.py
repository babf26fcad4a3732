"""The rows of results.jsonl, and how they are written and read.

A run is one rule on one task: a ``run`` row, then ``step`` and ``epoch`` rows, then an ``end`` row. Each line
is flushed as it is written, so that what an interrupted run leaves behind is valid up to its last line.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import IO, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gradsieve.lab.errors import LabError

RESULTS = "results.jsonl"


class _Row(BaseModel):
    # JSON has no NaN, and a diverged run has one as its loss: it is written as the string "NaN" and read back.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class RunRow(_Row):
    """What was run: enough to run it again."""

    kind: Literal["run"] = "run"
    run: str
    title: str
    task: str
    description: str
    rule: str
    note: str = ""
    workers: int
    epochs: int
    seed: int
    batch_size: int
    lr: float
    scope: str
    feedback: str
    exchange: str
    values: str
    strict: bool = True
    launch: str
    device: str = "cpu"
    compiled: bool = False
    parameters: int


class StepRow(_Row):
    """The state after ``step`` steps; loss, density, bytes and error are of that step alone."""

    kind: Literal["step"] = "step"
    run: str
    step: int
    epoch: float
    lr: float
    loss: float
    density: float
    bytes: float
    error: float = Field(description="mean over workers of the squared norm of the memory")


class EpochRow(_Row):
    """The state after ``epoch`` epochs; everything is of the run so far, bytes are one worker's."""

    kind: Literal["epoch"] = "epoch"
    run: str
    epoch: int
    step: int
    accuracy: float
    test_loss: float
    density: float
    bytes: float
    dense_bytes: float
    deferred: float
    error: float
    seconds: float


class EndRow(_Row):
    """A run that reached its last step; one without this row was interrupted."""

    kind: Literal["end"] = "end"
    run: str
    seconds: float
    phases: dict[str, float]


Row = Annotated[RunRow | StepRow | EpochRow | EndRow, Field(discriminator="kind")]
_ROW: TypeAdapter[RunRow | StepRow | EpochRow | EndRow] = TypeAdapter(Row)


class Run(BaseModel):
    """All rows of one run, sorted by kind."""

    about: RunRow
    steps: list[StepRow] = []
    epochs: list[EpochRow] = []
    end: EndRow | None = None

    @property
    def last(self) -> EpochRow | None:
        return self.epochs[-1] if self.epochs else None


class Writer:
    """Appends rows to results.jsonl, each on disk's side of the process as soon as it is written."""

    def __init__(self, directory: Path) -> None:
        self._file: IO[str] = (directory / RESULTS).open("w", encoding="utf-8")

    def write(self, row: RunRow | StepRow | EpochRow | EndRow) -> None:
        self._file.write(row.model_dump_json() + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def read_rows(path: Path) -> list[RunRow | StepRow | EpochRow | EndRow]:
    """All rows of a file, without a last line that is not yet, or was never, written to its end."""
    try:
        lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_ROW.validate_json(line))
        except ValidationError as error:
            if number == len(lines) and not _is_json(line):
                break  # a process that is still writing, or was killed while it wrote
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"])
            raise LabError(f"{path}, line {number}: {where} {problem['msg']}".replace("\n", " ")) from error
    return rows


def read(directory: Path) -> list[Run]:
    """The runs in ``directory``/results.jsonl, in the order they were started."""
    path = directory / RESULTS
    runs: dict[str, Run] = {}
    for number, row in enumerate(read_rows(path), start=1):
        if isinstance(row, RunRow):
            runs[row.run] = Run(about=row)
        elif row.run not in runs:
            raise LabError(f"{path}, line {number}: a {row.kind} row before its run row")
        elif isinstance(row, StepRow):
            runs[row.run].steps.append(row)
        elif isinstance(row, EpochRow):
            runs[row.run].epochs.append(row)
        else:
            runs[row.run].end = row
    if not runs:
        raise LabError(f"{path} holds no run")
    return list(runs.values())


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file or leaves the old one: never half of it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)  # mkstemp's is private; a result is for showing round
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
