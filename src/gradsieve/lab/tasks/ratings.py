"""MovieLens: who rated what, each user's last film held back, and films that the user never rated beside it.

Shape suffixes: P ratings, U users, N films never rated that a user's last one is ranked among.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks.sources import content, first, folder_of

Ids = NDArray[np.int64]

NEGATIVES = 100
_FILES = {
    "MovieLens-20M": ("ml-20m/ratings.csv", "ratings.csv"),
    "MovieLens-1M": ("ml-1m/ratings.dat", "ratings.dat"),
    "MovieLens-100k": ("ml-100k/u.data", "ml-100k.u.data", "u.data"),
}
_NEEDS = "ratings.csv, ratings.dat or u.data of MovieLens, plain or packed"
_FEWEST = 20  # ratings of a user who counts
_DRAW_SEED = 1  # the films beside the last one are part of the data, whatever the run's seed is


@dataclass(frozen=True)
class Ratings:
    """Pairs of a user and a film to learn, and for each user a film held back, before ``N`` that were never rated."""

    source: str
    pairs_P2: Tensor
    candidates_UN: Tensor
    users: int
    films: int

    @property
    def description(self) -> str:
        return (
            f"{self.source} ({len(self.pairs_P2) + self.users:,} ratings, {self.users:,} users, {self.films:,} films)"
        )


def load(data_dir: Path | None, negatives: int = NEGATIVES) -> Ratings:
    """The largest MovieLens set in ``data_dir``."""
    folder = folder_of(data_dir)
    if folder is None:
        raise LabError(f"MovieLens needs its data: give --data-dir or set GRADSIEVE_DATA to a folder with {_NEEDS}")
    for source, names in _FILES.items():
        path = first(folder, names)
        if path is not None:
            return _held_back(path, source, negatives)
    raise LabError(f"no MovieLens in {folder}: it needs {_NEEDS}")


def _held_back(path: Path, source: str, negatives: int) -> Ratings:
    user_P, film_P, when_P = _table(path)
    counts_U = np.bincount(user_P)
    keep_P = counts_U[user_P] >= _FEWEST
    _, user_P = np.unique(user_P[keep_P], return_inverse=True)
    _, film_P = np.unique(film_P[keep_P], return_inverse=True)
    if not len(user_P):
        raise LabError(f"{path} has no user with at least {_FEWEST} ratings")
    order_P = np.lexsort((when_P[keep_P], user_P))
    user_P, film_P = user_P[order_P], film_P[order_P]
    users, films = int(user_P.max()) + 1, int(film_P.max()) + 1
    last_U = np.flatnonzero(np.append(np.diff(user_P) > 0, True))
    unrated_UN = _never_rated(user_P * films + film_P, users, films, negatives, path)
    candidates_UN = np.concatenate([film_P[last_U, None], unrated_UN], axis=1)
    pairs_P2 = np.stack([np.delete(user_P, last_U), np.delete(film_P, last_U)], axis=1)
    return Ratings(source, torch.from_numpy(pairs_P2), torch.from_numpy(candidates_UN), users, films)


def _table(path: Path) -> tuple[Ids, Ids, Ids]:
    """Users, films and times; the three forms differ in what stands between the fields, and in a first line."""
    raw = content(path).replace(b"::", b"\t").replace(b",", b"\t")
    try:
        table = np.loadtxt(io.BytesIO(raw), delimiter="\t", skiprows=0 if raw[:1].isdigit() else 1, ndmin=2)
        user_P, film_P, _, when_P = table.T
    except ValueError as error:
        raise LabError(f"{path} is not a MovieLens file: each line takes user, film, rating and time") from error
    if not (np.isfinite(table).all() and (table[:, :2] >= 0).all() and (table[:, :2] < 1 << 31).all()):
        raise LabError(f"{path} is not a MovieLens file: users and films are whole numbers from 0 on")
    return user_P.astype(np.int64), film_P.astype(np.int64), when_P.astype(np.int64)


def _never_rated(rated_P: Ids, users: int, films: int, count: int, path: Path) -> Ids:
    """For each user ``count`` different films, drawn from those that the user has not rated."""
    rated_P = np.unique(rated_P)
    fewest = films - int(np.bincount(rated_P // films).max())
    if fewest < count:
        raise LabError(f"{path}: a user has {fewest} films left that are not rated; the evaluation draws {count}")
    draws = np.random.default_rng(_DRAW_SEED)
    first_of_user_U1 = np.arange(users)[:, None] * films
    drawn_UN = draws.integers(films, size=(users, count))
    while True:
        drawn_UN.sort(axis=1)
        keys_UN = first_of_user_U1 + drawn_UN
        at_UN = np.searchsorted(rated_P, keys_UN).clip(max=len(rated_P) - 1)
        wrong_UN = rated_P[at_UN] == keys_UN
        wrong_UN[:, 1:] |= drawn_UN[:, 1:] == drawn_UN[:, :-1]
        if not wrong_UN.any():
            return drawn_UN
        drawn_UN[wrong_UN] = draws.integers(films, size=int(wrong_UN.sum()))
