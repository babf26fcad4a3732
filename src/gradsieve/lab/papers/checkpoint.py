"""Long runs save as they go: a whole file or the old one, numbers and text only, never a pickle."""

import io
import json
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradsieve.lab.errors import LabError
from gradsieve.lab.records import write_file

_ABOUT = "about"
SECONDS = 5.0
"""Between two saves: what a killed run loses at most."""


class Checkpoint:
    """Tensors by name in an npz file, with what they belong to, so that another run's state is never continued."""

    def __init__(self, path: Path, about: Mapping[str, object], *, resume: bool) -> None:
        self.path = path
        self._about = json.dumps(about, sort_keys=True)
        self._resume = resume
        self._saved = time.monotonic()

    def load(self) -> dict[str, Tensor] | None:
        """The state to go on from; None to start afresh."""
        if not self._resume or not self.path.exists():
            return None
        try:
            with self.path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                state = {name: kept[name] for name in kept.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise LabError(f"cannot read the saved state {self.path}; run without --resume") from error
        if str(state.pop(_ABOUT, "")) != self._about:
            raise LabError(f"{self.path} was saved by a run with other options or data; run without --resume")
        return {name: torch.from_numpy(array) for name, array in state.items()}

    def due(self) -> bool:
        return time.monotonic() - self._saved > SECONDS

    def save(self, state: Mapping[str, Tensor]) -> None:
        buffer = io.BytesIO()
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        np.savez(buffer, allow_pickle=False, **arrays, **{_ABOUT: np.array(self._about)})
        write_file(self.path, buffer.getvalue())
        self._saved = time.monotonic()
