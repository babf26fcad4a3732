"""The source archive and the wheel hold what a user needs, and build without a network and without a compiler."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gradsieve"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, the wheel made from the source archive, out of a copy: nothing is left in the checkout."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    result = subprocess.run(command, env={**os.environ, "CC": "false"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return dist


def sources(*suffixes: str) -> set[str]:
    files = [f for f in PACKAGE.rglob("*") if f.suffix in suffixes or f.name == "py.typed"]
    return {f.relative_to(PACKAGE.parent).as_posix() for f in files}


def test_source_archive_holds_all_sources(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {f"src/{name}" for name in sources(".py", ".c", ".h", ".j2")} <= names
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_wheel_holds_the_package_and_no_tests(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert sources(".py", ".j2") <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gradsieve"}
