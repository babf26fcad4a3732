"""Arguments of the theory, checked: an error names the argument and what it takes."""

import math
from collections.abc import Mapping

_WHOLE = {"d", "K", "steps", "workers"}
_POSITIVE = {"k", "eps", "lr", "smoothness", "convexity", "delta"}


def check(arguments: Mapping[str, float]) -> None:
    """Refuse what no theorem takes; each name means the same, and has the same range, in every function."""
    for name, value in arguments.items():
        whole, positive = name in _WHOLE, name in _POSITIVE
        good = math.isfinite(value) and (value > 0 if positive else value >= whole) and (not whole or value % 1 == 0)
        if not good:
            takes = "whole and at least 1" if whole else "finite and above 0" if positive else "finite and at least 0"
            raise ValueError(f"{name} must be {takes}, not {value!r}")
    if arguments.get("delta", 1) > 1:
        raise ValueError(f"delta must be at most 1, not {arguments['delta']!r}")
    if {"k", "d"} <= arguments.keys() and arguments["k"] > arguments["d"]:
        raise ValueError(f"k must be at most d = {arguments['d']!r}, not {arguments['k']!r}")


def check_lr(lr: float, limit: float, theorem: str) -> None:
    if lr > limit * (1 + 1e-12):  # the slack is for a limit that the caller worked out in another order
        raise ValueError(f"lr must be at most {limit!r} for {theorem}, not {lr!r}")


def positive_noise(noise: float, name: str, hint: str = "") -> float:
    if noise == 0:
        raise ValueError(f"{name} must be above 0: this rate divides by it{hint}")
    return noise
