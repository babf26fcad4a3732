"""Sparse <-> bytes: one row of bytes a worker, with a header that is checked on arrival. No pickle, ever.

    header 64 | counts 4 B | offsets 2 K | values v K          the list form
    header 64 | counts 4 B | bitmap n / 8 | values v K         the bitmap form, smaller from a density of 1/16

All little-endian, every part padded to 8 bytes. The parts are views of one buffer: ops write their result
straight into it, and what arrives is decoded in place.
"""

import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradsieve.ops import of
from gradsieve.types import BLOCK, Sparse

MAGIC = 0x5653_5247  # "GRSV"
VERSION = 1
LIST, BITMAP = 1, 2
VALUES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
HEADER = 16  # int32 fields
FIELDS = ("magic", "version", "form", "values", "layout", "low", "high", "slots", "step", "wanted", "nonfinite")
STEP, WANTED, NONFINITE = (FIELDS.index(name) for name in ("step", "wanted", "nonfinite"))

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("gradsieve's wire form is little-endian; this machine is not")


class WireError(RuntimeError):
    """What arrived is not what was agreed: nothing of it was used."""


@dataclass(frozen=True)
class Format:
    """What all ranks agree on before a payload travels: its form, its sizes, its layout."""

    size: int
    slots: int
    values: torch.dtype
    layout: int = 0
    form: int = LIST

    @property
    def blocks(self) -> int:
        return -(-self.size // BLOCK)

    @cached_property
    def parts(self) -> tuple[int, int, int, int]:
        """Where counts, index, values and the end lie, in bytes."""
        index_bytes = 2 * self.slots if self.form == LIST else -(-self.size // 8)
        counts = 4 * HEADER
        index = counts + _pad(4 * self.blocks)
        values = index + _pad(index_bytes)
        return counts, index, values, values + _pad(self.slots * self.values.itemsize)

    @property
    def bytes(self) -> int:
        return self.parts[-1]

    @cached_property
    def header(self) -> Tensor:
        """The fields that are the same for every worker and step."""
        low = self.size & 0x7FFFFFFF
        fixed = [MAGIC, VERSION, self.form, VALUES[self.values], self.layout, low, self.size >> 31, self.slots]
        return torch.tensor(fixed + [0] * (HEADER - len(fixed)), dtype=torch.int32, device="cpu")


def form_of(size: int, slots: int) -> int:
    """The smaller of the two forms: 16 bits an element, or one bit a coordinate."""
    return LIST if 2 * slots <= -(-size // 8) else BITMAP


class Frame:
    """The buffer of one payload a worker, and the ``Sparse`` that lies in it."""

    def __init__(self, form: Format, buffer_LN: Tensor):
        if buffer_LN.dtype != torch.uint8 or buffer_LN.dim() != 2 or buffer_LN.shape[1] != form.bytes:
            raise WireError(f"a payload of {tuple(buffer_LN.shape)} where {form.bytes} bytes were agreed")
        self.form = form
        self.buffer_LN = buffer_LN
        counts, index, values, _ = form.parts
        self.header_LH = buffer_LN[:, :counts].view(torch.int32)
        self._agreed_H = form.header[: STEP + 1].to(buffer_LN.device, non_blocking=True, copy=True)
        self._stamps = _light(self.header_LH[:, STEP : STEP + 1]), _light(self._agreed_H[STEP:])
        self._checked = _light(self.header_LH[:, : STEP + 1]), _light(self._agreed_H)
        self.counts_LB = buffer_LN[:, counts : counts + 4 * form.blocks].view(torch.int32)
        self.index = buffer_LN[:, index:values]
        self.values_LK = buffer_LN[:, values : values + form.slots * form.values.itemsize].view(form.values)
        if form.form == LIST:
            self.offsets_LK = self.index[:, : 2 * form.slots].view(torch.int16)
        else:  # the bitmap is made and read by pack() and unpack(); the ops see offsets beside the buffer
            self.offsets_LK = torch.zeros(len(buffer_LN), form.slots, dtype=torch.int16, device=buffer_LN.device)

    @classmethod
    def empty(cls, form: Format, workers: int, device: torch.device) -> "Frame":
        frame = cls(form, torch.zeros(workers, form.bytes, dtype=torch.uint8, device=device))
        frame.header_LH.copy_(form.header.to(device, non_blocking=True))
        return frame

    @cached_property
    def sparse(self) -> Sparse:
        wanted_L, nonfinite_L = self.header_LH[:, WANTED], self.header_LH[:, NONFINITE]
        return Sparse(self.form.size, self.counts_LB, self.offsets_LK, self.values_LK, wanted_L, nonfinite_L)

    def pack(self, step: int) -> Tensor:
        """The bytes to send, once the ops have filled ``sparse``."""
        self._stamps[0][:] = step & 0x7FFFFFFF
        if self.form.form == BITMAP:
            of(self.buffer_LN).to_bitmap(self.sparse, self.index)
        return self.buffer_LN

    def unpack(self, step: int) -> tuple[Sparse, Tensor]:
        """What arrived, and which rows of it are not what was agreed (a bool a worker; nothing waits for a device)."""
        self._stamps[1][:] = step & 0x7FFFFFFF  # a slice is filled without waiting for a device
        header, agreed = self._checked
        untrue_L = of(self.buffer_LN).from_bitmap(self.index, self.sparse) if self.form.form == BITMAP else None
        wrong_L = of(self.buffer_LN).misplaced(self.sparse)
        seen = _light(wrong_L)
        seen |= (header != agreed).any(1)  # in place
        return self.sparse, wrong_L if untrue_L is None else wrong_L | untrue_L

    def complaint(self, step: int, row: int, rank: int | None = None) -> WireError:
        """Why a row was refused; it is rank ``rank``'s, where that is not the row's number."""
        rank = row if rank is None else rank
        self._stamps[1][:] = step & 0x7FFFFFFF
        header = self.header_LH[row].tolist()
        for name, got, agreed in zip(FIELDS[: STEP + 1], header, self._agreed_H.tolist(), strict=False):
            if got != agreed:
                return WireError(f"payload of rank {rank}: {name} is {got}, {agreed} was agreed")
        return WireError(f"payload of rank {rank}: its counts or positions are out of range, or one is there twice")


def _light(tensor: Tensor) -> Any:
    """The same memory as a NumPy array where it lies on the host: its operations on a few numbers cost much less."""
    return tensor.numpy() if tensor.is_cpu else tensor


def _pad(size: int) -> int:
    return -(-size // 8) * 8
