"""Data files of a task, wherever they lie in the user's folder: plain or packed."""

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

from gradsieve.lab.errors import LabError

_UNPACK = {".xz": lzma.decompress, ".bz2": bz2.decompress, ".gz": gzip.decompress}


def folder_of(data_dir: Path | None) -> Path | None:
    """The user's data folder: as given, or the environment variable GRADSIEVE_DATA."""
    if data_dir is None and os.environ.get("GRADSIEVE_DATA"):
        return Path(os.environ["GRADSIEVE_DATA"])
    return data_dir


def first(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that is there, plain or packed."""
    paths = (folder / f"{name}{packed}" for name in names for packed in ("", *_UNPACK))
    return next((path for path in paths if path.is_file()), None)


def content(path: Path) -> bytes:
    """All bytes of a file, unpacked."""
    try:
        raw = path.read_bytes()
        return _UNPACK[path.suffix](raw) if path.suffix in _UNPACK else raw
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise LabError(f"cannot read {path}: {error}") from error
