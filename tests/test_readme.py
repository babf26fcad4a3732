"""What README.md shows works: its code runs, its commands exist, its links and the picture of the modules are true."""

import os
import re
import shlex
import socket
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradsieve import cli

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the file that comes before it."""

    language: str
    text: str
    line: int

    @property
    def code(self) -> str:
        """What a diff leaves behind, or the text itself."""
        return self.side("+") if self.language == "diff" else self.text

    def side(self, sign: str) -> str:
        """A diff's file before (``-``) or after (``+``) the change."""
        lines = [line for line in self.text.splitlines() if not line or line[0] in f" {sign}"]
        return "\n".join(line[1:] for line in lines)


def blocks(*languages: str) -> list[Block]:
    text = README.read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    all_of_them = [Block(m[1], m[2], text[: m.start(2)].count("\n")) for m in found]
    assert {block.language for block in all_of_them} <= {"diff", "python", "sh", "text"}, "a language that no test runs"
    return [block for block in all_of_them if block.language in languages]


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.text.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def run(code: str, line: int, session: dict[str, Any]) -> None:
    """Runs a block; a traceback shows the README's own line numbers."""
    exec(compile("\n" * line + code, str(README), "exec"), session)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The script around the README's lines: a model, some batches, and what torchrun sets for one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    batches = [(torch.randn(8, 20), torch.randint(5, (8,))) for _ in range(3)]
    yield {"__name__": "__main__", "model": torch.nn.Linear(20, 5), "batches": batches}
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_code_runs_from_top_to_bottom(session: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks("diff", "python"):
        run(block.code, block.line, session)
    assert session["sieve"].step == len(session["batches"])
    assert capsys.readouterr().out.count("density") == 2


def test_the_script_of_the_diff_runs_without_gradsieve_too(session: dict[str, Any]) -> None:
    (diff,) = blocks("diff")
    before = diff.side("-")
    assert "gs" not in before
    run(before, diff.line, session)


def test_the_diff_is_short() -> None:
    (diff,) = blocks("diff")
    assert sum(line.startswith("+") for line in diff.text.splitlines()) <= 10


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_work(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """make: the target is there; pip: the extra is there; gradsieve: it runs, on one epoch."""
    match words:
        case ["make", target]:
            # This pytest may itself run under make: its flags are not for this one.
            quiet = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
            subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=quiet, check=True, capture_output=True)
        case ["pip", "install", place]:
            extra = re.fullmatch(r"\.(?:\[(\w+)\])?", place)
            assert extra
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extra[1] is None or extra[1] in extras
        case ["gradsieve", *arguments]:
            monkeypatch.chdir(tmp_path)
            if arguments[0] == "report":
                assert cli.main(["compare", "--rule", "dense", "--epochs", "1", "--out", arguments[1]]) == 0
            assert cli.main(small(arguments)) == 0
        case _:
            pytest.fail("no test knows this command")


def small(arguments: list[str]) -> list[str]:
    """The same command with one epoch, where it has epochs."""
    return ["1" if before == "--epochs" else word for before, word in zip(["", *arguments], arguments, strict=False)]


def test_make_demo_is_the_command_that_is_shown() -> None:
    shown = next(words for words in commands() if words[:2] == ["gradsieve", "compare"])
    made = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    line = next(line for line in made.splitlines() if "gradsieve compare" in line)
    assert shlex.split(line)[1:] == shown[1:]


def test_links_lead_somewhere() -> None:
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_picture_of_the_modules_is_true() -> None:
    """docs/architecture.md names every module at the top of the package, and none that is not there."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^      (\w+(?:\.py|/)) ", text, re.MULTILINE))
    package = ROOT / "src" / "gradsieve"
    there = {f.name for f in package.glob("*.py")} | {f"{f.parent.name}/" for f in package.glob("*/*.py")}
    assert named == there
    mentioned = set(re.findall(r"\b\w+\.(?:py|c|h)\b", text))
    assert mentioned <= {f.name for f in package.rglob("*.*")}
