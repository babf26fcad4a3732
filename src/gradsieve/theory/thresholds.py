"""Contraction bounds of sparsifiers, and thresholds from budgets and precisions (Sahu et al. 2021; Shi et al. 2019)."""

import math
from collections.abc import Iterable

from gradsieve.theory.arguments import check


def topk_contraction(k: float, d: int) -> float:
    """The delta of top-k and random-k for any vector: k / d (section 4.5).

    >>> topk_contraction(1, 4)
    0.25
    """
    check(locals())
    return k / d


def topk_contraction_bell(k: float, d: int) -> float:
    """The delta of top-k for a bell-shaped vector: 1 - (1 - k/d)^2 = (2kd - k^2) / d^2 (Shi et al., Theorem 1).

    >>> topk_contraction_bell(1, 4)
    0.4375
    """
    check(locals())
    return k * (2 * d - k) / d**2


def threshold_kappa2(threshold: float, d: int) -> float:
    """The absolute bound of the hard threshold: kappa^2 = d lambda^2 (section 5, Definition 3).

    >>> threshold_kappa2(0.5, 8)
    2.0
    """
    check(locals())
    return d * threshold**2


def threshold_from_k(k: float) -> float:
    """The threshold to try in place of top-k: 1 / (2 sqrt(k)), k in elements (section D: (29), zeta = 0, sigma = 1/4).

    >>> round(threshold_from_k(0.001 * 11_173_962), 5)  # ResNet-18 at 0.1%
    0.00473
    """
    check(locals())
    return 1 / (2 * math.sqrt(k))


def threshold_from_k_general(k: float, d: int, M: float, zeta2: float, sigma2: float) -> float:
    """The largest threshold whose compression term in (27) is within that of top-k in (28): equation (29).

    (2 / sqrt(k)) sqrt((2d/k + M) zeta^2 + sigma^2)

    >>> threshold_from_k_general(4, 8, M=1.0, zeta2=1.0, sigma2=4.0)
    3.0
    """
    check(locals())
    return 2 / math.sqrt(k) * math.sqrt((2 * d / k + M) * zeta2 + sigma2)


def threshold_for_precision(eps: float, d: int, lr: float) -> float:
    """The threshold to try for f - f* <= eps, f convex: sqrt(eps / d) / gamma (section C.3; observed, not proved).

    It solves d gamma^2 lambda^2 = eps; the paper's solved form, sqrt(eps) / (d sqrt(gamma)), has its root misplaced.

    >>> round(threshold_for_precision(1.25e-4, 500, lr=3.3564047302672275e-08))  # madelon; printed: 14881
    14897
    """
    check(locals())
    return math.sqrt(eps / d) / lr


def best_threshold(sequence: Iterable[Iterable[float]], K: int) -> float:
    """The threshold of least total error over a fixed run a_0, a_1, ...: its K-th largest magnitude (Lemma 3).

    The lemma assumes that no two magnitudes are equal; with a tie at the threshold more than K elements pass.

    >>> best_threshold([[3.0, -1.0], [0.5, -2.0]], K=2)
    2.0
    """
    check({"K": K})
    sizes = sorted((abs(x) for step in sequence for x in step), reverse=True)
    if any(math.isnan(size) for size in sizes):
        raise ValueError("sequence must hold numbers, not NaN")
    if len(sizes) < K:
        raise ValueError(f"K must be at most the {len(sizes)} elements of sequence, not {K!r}")
    return sizes[K - 1]
