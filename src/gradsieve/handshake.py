"""Before the first exchange: all ranks compare what they are about to do. A difference is an error on all of them."""

import json
from dataclasses import asdict, is_dataclass

import torch

from gradsieve import version
from gradsieve.layout import Layout
from gradsieve.step import Options
from gradsieve.types import Link
from gradsieve.wire import VERSION

CARD = 2048
"""Bytes of a rank's card: JSON text, never pickle."""


class DisagreementError(ValueError):
    """Ranks were started with different settings."""


def agree(link: Link, options: Options, layout: Layout, device: torch.device | str = "cpu") -> None:
    """Exchange cards and raise the same error on every rank if they differ, naming the field and the ranks."""
    mine = card(options, layout)
    text = json.dumps(mine).encode()
    row = torch.zeros(1, CARD, dtype=torch.uint8, device="cpu")
    row[0, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = link.gather(row.to(device)).wait().cpu()
    cards = [_read(bytes(r.tolist()), rank) for rank, r in enumerate(rows)]
    for field in mine:
        values = [c.get(field) for c in cards]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            raise DisagreementError(
                f"ranks disagree on {field}: rank 0 has {values[0]}, rank {other} has {values[other]}"
            )


def card(options: Options, layout: Layout) -> dict[str, str]:
    """What must agree, as short texts."""
    rule = options.rule
    settings: dict[str, object] = asdict(rule) if is_dataclass(rule) and not isinstance(rule, type) else {}
    fields = {
        "version": f"{version.__version__} (wire {VERSION})",
        "model": f"{len(layout.names)} parameters, {layout.size} elements, fingerprint {layout.fingerprint:08x}",
        "rule": type(rule).__name__,
        **{f"rule's {name}": repr(value) for name, value in settings.items()},
        "scope": options.scope,
        "feedback": repr(options.feedback),
        "exchange": options.exchange,
        "values": str(options.values),
        "strict": str(options.strict),
    }
    return {name: value[:150] for name, value in fields.items()}


def _read(row: bytes, rank: int) -> dict[str, str]:
    try:
        card = json.loads(row.rstrip(b"\0"))
        return {str(name): str(value)[:150] for name, value in card.items()}
    except (ValueError, AttributeError) as error:
        raise DisagreementError(f"rank {rank} sent no card that can be read: is it another version?") from error
