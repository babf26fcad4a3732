"""CIFAR-10 from a directory, decoded once and kept: the JPEG archive, or the original binary version.

An archive is read as a stream and nothing is ever extracted to disk. A member that would escape an extraction
(``..``, an absolute name, a link, a device) means that the archive is not what it claims: it is refused whole.
"""

import hashlib
import io
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from gradsieve.lab.errors import LabError

Arrays = dict[str, NDArray[np.uint8]]

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_JPEG_ARCHIVE = "cifar10-jpeg.tar.xz"
_BINARY_DIRECTORY = "cifar-10-batches-bin"
_BINARY_FILES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_RECORD = 1 + 3 * 32 * 32
_MAX_MEMBER_BYTES = 1 << 20
_KEYS = ("train_images", "train_labels", "test_images", "test_labels")


def load(data_dir: Path | None, cache_dir: Path | None) -> Arrays:
    """Images [count, 3, 32, 32] and labels [count] as uint8, by the names train_images, train_labels, test_..."""
    if data_dir is None:
        raise LabError(f"CIFAR-10 needs its data: give --data-dir or set GRADSIEVE_DATA to a folder with {_accepted()}")
    archive, binary = data_dir / _JPEG_ARCHIVE, data_dir / _BINARY_DIRECTORY
    if archive.is_file():
        return _cached(archive, cache_dir)
    for directory in (binary, data_dir):
        if (directory / "test_batch.bin").is_file():
            return _from_binary(directory)
    raise LabError(f"no CIFAR-10 in {data_dir}: it needs {_accepted()}")


def found(data_dir: Path) -> bool:
    """Whether the data are there."""
    places = _JPEG_ARCHIVE, f"{_BINARY_DIRECTORY}/test_batch.bin", "test_batch.bin"
    return any((data_dir / place).is_file() for place in places)


def description(data_dir: Path | None) -> str:
    """What the data are, in a few words; JPEG copies are other images than the originals."""
    copies = data_dir is not None and (data_dir / _JPEG_ARCHIVE).is_file()
    return f"CIFAR-10 (50,000 + 10,000 32x32 images{', JPEG copies' if copies else ''})"


def _accepted() -> str:
    return f"{_JPEG_ARCHIVE} or {_BINARY_DIRECTORY}/"


def _from_binary(directory: Path) -> Arrays:
    arrays: Arrays = {}
    for split, files in _BINARY_FILES.items():
        records = []
        for file in files:
            try:
                raw = np.fromfile(directory / file, dtype=np.uint8)
            except OSError as error:
                raise LabError(f"cannot read {directory / file}: {error.strerror}") from error
            if raw.size == 0 or raw.size % _RECORD or raw[::_RECORD].max() >= len(CLASSES):
                raise LabError(f"{directory / file} is not a CIFAR-10 binary file")
            records.append(raw.reshape(-1, _RECORD))
        joined = np.concatenate(records)
        arrays[f"{split}_labels"] = joined[:, 0].copy()
        arrays[f"{split}_images"] = joined[:, 1:].reshape(-1, 3, 32, 32).copy()
    return arrays


def from_archive(archive: Path) -> Arrays:
    """All images of a ``train/<class>/NNNN.jpg``, ``test/<class>/NNNN.jpg`` archive, in archive order."""
    images: dict[str, list[NDArray[np.uint8]]] = {"train": [], "test": []}
    labels: dict[str, list[int]] = {"train": [], "test": []}
    try:
        for split, label, image in _pictures(archive):
            images[split].append(image)
            labels[split].append(label)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LabError(f"cannot read {archive}: {error}") from error
    if not images["train"] or not images["test"]:
        raise LabError(f"{archive} holds no train/ or no test/ images")
    arrays: Arrays = {}
    for split in images:
        arrays[f"{split}_images"] = np.stack(images[split])
        arrays[f"{split}_labels"] = np.array(labels[split], dtype=np.uint8)
    return arrays


def _pictures(archive: Path) -> Iterator[tuple[str, int, NDArray[np.uint8]]]:
    with tarfile.open(archive, mode="r|*") as members:
        for member in members:
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                raise LabError(f"{archive} refused: unsafe member {member.name!r}")
            if member.isdir():
                continue
            if len(path.parts) != 3 or path.parts[0] not in ("train", "test") or path.parts[1] not in CLASSES:
                raise LabError(f"{archive} refused: unexpected member {member.name!r}")
            if member.size > _MAX_MEMBER_BYTES:
                raise LabError(f"{archive} refused: {member.name!r} is too large for a 32x32 image")
            content = members.extractfile(member)
            assert content is not None  # a regular file, as checked above
            yield path.parts[0], CLASSES.index(path.parts[1]), _decode(content.read(), archive, member.name)


def _decode(content: bytes, archive: Path, name: str) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            if image.size != (32, 32):
                raise LabError(f"{archive} refused: {name!r} is not 32x32")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (UnidentifiedImageError, OSError) as error:
        raise LabError(f"{archive} refused: {name!r} is not an image") from error


def _cached(archive: Path, cache_dir: Path | None) -> Arrays:
    """Decoding takes half a minute on a slow core, so that its result is kept for the next run."""
    directory = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsieve"
    about = archive.stat()
    key = hashlib.sha256(f"{archive.name} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:16]
    cache = directory / f"cifar10-{key}.npz"
    if kept := _kept(cache):
        return kept
    arrays = from_archive(archive)
    try:
        _write_atomically(cache, arrays)
    except OSError as error:
        if cache_dir is not None:
            raise LabError(f"cannot write to the cache directory {cache_dir}: {error.strerror}") from error
    return arrays


def _kept(cache: Path) -> Arrays | None:
    """What an earlier run decoded; None where it is not there, or damaged."""
    try:
        with np.load(cache, allow_pickle=False) as kept:
            return {name: kept[name] for name in _KEYS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write_atomically(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
