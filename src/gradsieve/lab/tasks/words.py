"""WikiText-2 as numbers: the vocabulary is that of the training text, in lower case, and each line ends in a word."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks.sources import content, first, folder_of

UNKNOWN, END = "<unk>", "<eos>"
_FOLDERS = ("", "wikitext-2/", "wikitext-2-v1/")
_TRAIN, _TEST = (tuple(f"{folder}wiki.{part}.tokens" for folder in _FOLDERS) for part in ("train", "test"))
_NEEDS = (
    "wiki.train.tokens and wiki.test.tokens (or wikitext-2/ with both), "
    "or wikitext-2.valid.txt and wikitext-2.test.txt in their place, plain or packed"
)


@dataclass(frozen=True)
class Words:
    """Two texts as numbers below ``vocabulary``; ``stand_in`` says that the training text is not the original one."""

    train: Tensor
    test: Tensor
    vocabulary: int
    stand_in: bool

    @property
    def description(self) -> str:
        trained = "validation text in place of the training text" if self.stand_in else "training text"
        sizes = f"{len(self.train):,} + {len(self.test):,} words, {self.vocabulary:,} different"
        return f"WikiText-2 ({trained}, tested on the test text; {sizes})"


def load(data_dir: Path | None, *, most: int | None = None, longest: int | None = None) -> Words:
    """The texts in ``data_dir``; at most so many different words, and texts of at most so many words."""
    train, test, stand_in = _paths(folder_of(data_dir))
    words, tested = _words(train)[:longest], _words(test)[:longest]
    if not words or not tested:
        raise LabError(f"{train if not words else test} has no words")
    known = [word for word, _ in Counter([*words, UNKNOWN]).most_common(most)]  # equally frequent: as they come
    if UNKNOWN not in known:
        known[-1] = UNKNOWN
    number = {word: i for i, word in enumerate(known)}
    return Words(_numbers(words, number), _numbers(tested, number), len(number), stand_in)


def _paths(folder: Path | None) -> tuple[Path, Path, bool]:
    if folder is None:
        raise LabError(f"WikiText-2 needs its data: give --data-dir or set GRADSIEVE_DATA to a folder with {_NEEDS}")
    for train, test, stand_in in (
        (_TRAIN, _TEST, False),
        (("wikitext-2.train.txt",), ("wikitext-2.test.txt",), False),
        (("wikitext-2.valid.txt",), ("wikitext-2.test.txt",), True),
    ):
        found = first(folder, train), first(folder, test)
        if found[0] is not None and found[1] is not None:
            return found[0], found[1], stand_in
    raise LabError(f"no WikiText-2 in {folder}: it needs {_NEEDS}")


def _words(path: Path) -> list[str]:
    try:
        text = content(path).decode("utf-8").lower()
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is not a text in UTF-8") from error
    return [word for line in text.split("\n") if line.strip() for word in (*line.split(), END)]


def _numbers(words: list[str], number: dict[str, int]) -> Tensor:
    return torch.tensor([number.get(word, number[UNKNOWN]) for word in words])
