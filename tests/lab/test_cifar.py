"""CIFAR-10 from both of its forms, and archives that are not what they claim."""

import io
import math
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gradsieve as gs
from gradsieve.lab.errors import LabError
from gradsieve.lab.runner import Options, train
from gradsieve.lab.tasks import cifar, get
from gradsieve.lab.tasks.cifar_data import CLASSES, from_archive, load


def jpeg(value: int, side: int = 32) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), value, dtype=np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def make_archive(directory: Path, extra=lambda archive: None) -> Path:
    path = directory / "cifar10-jpeg.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        add(archive, "train", type=tarfile.DIRTYPE)
        for number in range(4):
            add(archive, f"train/{CLASSES[number]}/{number:04}.jpg", jpeg(40 * number))
        add(archive, "test/truck/0000.jpg", jpeg(200))
        extra(archive)
    return path


def test_reads_the_jpeg_archive_and_keeps_it(tmp_path):
    archive = make_archive(tmp_path)
    images = load(tmp_path, tmp_path / "cache")
    assert images["train_images"].shape == (4, 3, 32, 32)
    assert images["train_labels"].tolist() == [0, 1, 2, 3]
    assert images["test_labels"].tolist() == [9]
    before = archive.stat()
    archive.write_bytes(b"\0" * before.st_size)  # what is in the cache is not decoded again
    os.utime(archive, ns=(before.st_atime_ns, before.st_mtime_ns))
    np.testing.assert_array_equal(load(tmp_path, tmp_path / "cache")["train_images"], images["train_images"])


def test_a_damaged_cache_is_made_anew(tmp_path):
    make_archive(tmp_path)
    load(tmp_path, tmp_path / "cache")
    (cache,) = (tmp_path / "cache").iterdir()
    cache.write_bytes(b"damaged")
    assert len(load(tmp_path, tmp_path / "cache")["train_labels"]) == 4
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [cache.name]


@pytest.mark.parametrize(
    "extra",
    [
        lambda archive: add(archive, "../../escaped.jpg", jpeg(0)),
        lambda archive: add(archive, "train/../../cat/0.jpg", jpeg(0)),
        lambda archive: add(archive, "/train/cat/0.jpg", jpeg(0)),
        lambda archive: add(archive, "train/cat/0.jpg", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        lambda archive: add(archive, "train/cat/0.jpg", type=tarfile.LNKTYPE, linkname="train/truck/0000.jpg"),
        lambda archive: add(archive, "train/cat/0.jpg", type=tarfile.CHRTYPE),
        lambda archive: add(archive, "train/unicorn/0.jpg", jpeg(0)),
        lambda archive: add(archive, "train/cat/0.jpg", b"no picture"),
        lambda archive: add(archive, "train/cat/0.jpg", jpeg(0, side=64)),
        lambda archive: add(archive, "train/cat/0.jpg", bytes(2 << 20)),
    ],
)
def test_an_archive_with_an_unsafe_or_wrong_member_is_refused_whole(tmp_path, extra):
    archive = make_archive(tmp_path, extra)
    with pytest.raises(LabError, match="refused"):
        from_archive(archive)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


def test_a_file_that_is_no_archive(tmp_path):
    path = tmp_path / "cifar10-jpeg.tar.xz"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(LabError, match="cannot read"):
        from_archive(path)


def binary(directory: Path, label: int = 3) -> None:
    record = bytes([label]) + bytes(range(256)) * 12
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        (directory / name).write_bytes(record * 2)


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_reads_the_original_binary_version(tmp_path, folder):
    (tmp_path / folder).mkdir(exist_ok=True)
    binary(tmp_path / folder)
    images = load(tmp_path, None)
    assert images["train_images"].shape == (10, 3, 32, 32)
    assert images["test_labels"].tolist() == [3, 3]
    assert images["test_images"][0, 0, 0, :4].tolist() == [0, 1, 2, 3]


def test_a_binary_file_with_an_impossible_label_is_refused(tmp_path):
    binary(tmp_path, label=77)
    with pytest.raises(LabError, match="not a CIFAR-10 binary file"):
        load(tmp_path, None)


def test_missing_data_says_what_is_needed(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    with pytest.raises(LabError, match="give --data-dir or set GRADSIEVE_DATA"):
        get("cifar")
    with pytest.raises(LabError, match=r"no CIFAR-10 in .*: it needs cifar10-jpeg.tar.xz"):
        get("cifar", data_dir=tmp_path)


def test_the_task_trains_and_augments(tmp_path, monkeypatch):
    binary(tmp_path)
    monkeypatch.setenv("GRADSIEVE_DATA", str(tmp_path))
    task = get("cifar")
    batch = next(task.batches(0, workers=2, batch_size=3, seed=0))
    assert batch.inputs_WB.shape == (2, 3, 3, 32, 32)
    losses_W, grads_Wn = task.batch_gradients(task.model(0), batch)
    assert torch.isfinite(grads_Wn).all()
    assert losses_W.shape == (2,)
    assert 0.0 <= task.evaluate(task.model(0)).accuracy <= 1.0


@pytest.mark.parametrize("name", ["cifar-resnet18", "cifar-senet18", "cifar-googlenet"])
def test_the_networks_of_papers_train(tmp_path, name):
    binary(tmp_path)
    task = get(name, data_dir=tmp_path)
    assert (task.recipe.lr, task.recipe.batch_size) == (1.6, 256)
    options = Options(workers=2, epochs=1, batch_size=4)
    (training,) = train(task, gs.HardThreshold(0.01), options)
    assert math.isfinite(training.loss)
    assert 0 < training.sieve.stats().last.density < 1
    running = [buffer for label, buffer in training.model.named_buffers() if "running_mean" in label]
    assert all(mean.abs().sum() > 0 for mean in running)


def test_augmentation_moves_by_at_most_four_pixels_and_mirrors_some():
    images = torch.zeros(64, 3, 32, 32)
    images[:, :, 16, 16] = 1.0
    moved = cifar._shift_and_mirror(images, torch.Generator().manual_seed(0))
    _, _, rows, columns = moved.nonzero(as_tuple=True)
    assert moved.sum() == images.sum()
    assert rows.min() >= 12
    assert rows.max() <= 20
    assert columns.min() >= 11  # mirrored, the middle is at 15
    assert columns.max() <= 20
    assert len(rows.unique()) > 4
