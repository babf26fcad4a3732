"""What the papers promise, as plain numbers: contraction factors, threshold rules, convergence bounds, step sizes.

From Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization", unless Shi et al. 2019,
"Understanding top-k sparsification in distributed deep learning", is named. Their letters, as arguments:

    L ``smoothness``   mu ``convexity``   n ``workers``   T ``steps``   gamma ``lr``   lambda ``threshold``
    gap = f(x0) - f*   R0 = |x0 - x*|^2   D = mean_i |grad f_i(x*)|^2
    noise:        E|xi_i|^2 <= M |grad f_i|^2 + sigma2                       (Assumption 3)
    dissimilarity: mean_i |grad f_i - grad f|^2 <= C |grad f|^2 + zeta2      (Assumption 4)
    compressor:   E|x - C(x)|^2 <= kappa2 (absolute), or <= (1 - delta) |x|^2 (a delta-contraction)

A ``*_bound`` is an inequality with all its constants. A ``*_rate`` is an O() result: the printed terms with their
constants left out (Theorem 4 and Remark 6 also leave out logarithms), so it compares compressors and promises nothing.
A rate takes no ``lr``: its step size is the best one that ``*_max_lr`` allows.
"""

import math
from collections.abc import Iterable, Mapping

_WHOLE = {"d", "K", "steps", "workers"}
_POSITIVE = {"k", "eps", "lr", "smoothness", "convexity", "delta"}


def _check(arguments: Mapping[str, float]) -> None:
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


def _check_lr(lr: float, limit: float, theorem: str) -> None:
    if lr > limit * (1 + 1e-12):  # the slack is for a limit that the caller worked out in another order
        raise ValueError(f"lr must be at most {limit!r} for {theorem}, not {lr!r}")


def _positive_noise(noise: float, name: str, hint: str = "") -> float:
    if noise == 0:
        raise ValueError(f"{name} must be above 0: this rate divides by it{hint}")
    return noise


def topk_contraction(k: float, d: int) -> float:
    """The delta of top-k and random-k for any vector: k / d (section 4.5).

    >>> topk_contraction(1, 4)
    0.25
    """
    _check(locals())
    return k / d


def topk_contraction_bell(k: float, d: int) -> float:
    """The delta of top-k for a bell-shaped vector: 1 - (1 - k/d)^2 = (2kd - k^2) / d^2 (Shi et al., Theorem 1).

    >>> topk_contraction_bell(1, 4)
    0.4375
    """
    _check(locals())
    return k * (2 * d - k) / d**2


def threshold_kappa2(threshold: float, d: int) -> float:
    """The absolute bound of the hard threshold: kappa^2 = d lambda^2 (section 5, Definition 3).

    >>> threshold_kappa2(0.5, 8)
    2.0
    """
    _check(locals())
    return d * threshold**2


def threshold_from_k(k: float) -> float:
    """The threshold to try in place of top-k: 1 / (2 sqrt(k)), k in elements (section D: (29), zeta = 0, sigma = 1/4).

    >>> round(threshold_from_k(0.001 * 11_173_962), 5)  # ResNet-18 at 0.1%
    0.00473
    """
    _check(locals())
    return 1 / (2 * math.sqrt(k))


def threshold_from_k_general(k: float, d: int, M: float, zeta2: float, sigma2: float) -> float:
    """The largest threshold whose compression term in (27) is within that of top-k in (28): equation (29).

    (2 / sqrt(k)) sqrt((2d/k + M) zeta^2 + sigma^2)

    >>> threshold_from_k_general(4, 8, M=1.0, zeta2=1.0, sigma2=4.0)
    3.0
    """
    _check(locals())
    return 2 / math.sqrt(k) * math.sqrt((2 * d / k + M) * zeta2 + sigma2)


def threshold_for_precision(eps: float, d: int, lr: float) -> float:
    """The threshold to try for f - f* <= eps, f convex: sqrt(eps / d) / gamma (section C.3; observed, not proved).

    It solves d gamma^2 lambda^2 = eps; the paper's solved form, sqrt(eps) / (d sqrt(gamma)), has its root misplaced.

    >>> round(threshold_for_precision(1.25e-4, 500, lr=3.3564047302672275e-08))  # madelon; printed: 14881
    14897
    """
    _check(locals())
    return math.sqrt(eps / d) / lr


def best_threshold(sequence: Iterable[Iterable[float]], K: int) -> float:
    """The threshold of least total error over a fixed run a_0, a_1, ...: its K-th largest magnitude (Lemma 3).

    The lemma assumes that no two magnitudes are equal; with a tie at the threshold more than K elements pass.

    >>> best_threshold([[3.0, -1.0], [0.5, -2.0]], K=2)
    2.0
    """
    _check({"K": K})
    sizes = sorted((abs(x) for step in sequence for x in step), reverse=True)
    if any(math.isnan(size) for size in sizes):
        raise ValueError("sequence must hold numbers, not NaN")
    if len(sizes) < K:
        raise ValueError(f"K must be at most the {len(sizes)} elements of sequence, not {K!r}")
    return sizes[K - 1]


def theorem6_max_lr(*, smoothness: float, M: float, C: float, workers: int) -> float:
    """The step-size limit of Theorem 6, n / (2L(M(C+1) + n)); with C = 0, n = 1 that of Theorem 1, 1 / (2L(M+1)).

    >>> theorem6_max_lr(smoothness=2.0, M=1.0, C=0.0, workers=1)
    0.125
    """
    _check(locals())
    return workers / (2 * smoothness * (M * (C + 1) + workers))


def theorem7_max_lr(*, smoothness: float, M: float, C: float, workers: int, delta: float) -> float:
    """The step-size limit of Theorem 7: min{n / (2L(M(C+1) + n)), 1 / (2L(2/delta + M) sqrt(C+1))}.

    >>> theorem7_max_lr(smoothness=1.0, M=0.0, C=3.0, workers=1, delta=0.5)
    0.0625
    """
    _check(locals())
    descent = theorem6_max_lr(smoothness=smoothness, M=M, C=C, workers=workers)
    return min(descent, 1 / (2 * smoothness * (2 / delta + M) * math.sqrt(C + 1)))


def theorem8_max_lr(*, smoothness: float, M: float, C: float, workers: int) -> float:
    """The step-size limit of Theorem 8 (nothing compressed): n / (L(M(C+1) + n)), twice that of Theorem 6.

    >>> theorem8_max_lr(smoothness=2.0, M=1.0, C=0.0, workers=1)
    0.25
    """
    return 2 * theorem6_max_lr(smoothness=smoothness, M=M, C=C, workers=workers)


def theorem4_max_lr(*, smoothness: float, M: float, workers: int) -> float:
    """The step-size limit of Theorems 4 and 5 (convex, absolute): 1 / (4L(1 + 2M/n)).

    >>> theorem4_max_lr(smoothness=1.0, M=1.0, workers=2)
    0.125
    """
    _check(locals())
    return 1 / (4 * smoothness * (1 + 2 * M / workers))


def theorem9_lr(step: float, *, smoothness: float, convexity: float, M: float, workers: int) -> float:
    """The decreasing step size of Theorem 9 iii): 4 / (mu(phi + t)), phi = (16L/mu)(1 + 2M/n), t from 0.

    >>> theorem9_lr(0, smoothness=1.0, convexity=0.5, M=0.0, workers=1)  # starts at the limit of Theorem 4
    0.25
    """
    _check(locals())
    return 4 / (16 * smoothness * (1 + 2 * M / workers) + convexity * step)


def theorem1_bound(
    *, gap: float, smoothness: float, M: float, sigma2: float, steps: int, lr: float, total_error: float
) -> float:
    """Theorem 1, one worker, any compressor: 4 gap / (gamma T) + 2 gamma L sigma^2 + (2 L^2 / T) total_error.

    Bounds the mean of E|grad f(x_t)|^2; ``total_error`` is the sum of E|e_t|^2, in update units (Remark 4).

    >>> theorem1_bound(gap=1.0, smoothness=1.0, M=0.0, sigma2=1.0, steps=4, lr=0.5, total_error=2.0)
    4.0
    """
    _check(locals())
    _check_lr(lr, theorem6_max_lr(smoothness=smoothness, M=M, C=0, workers=1), "Theorem 1")
    return 4 * gap / (lr * steps) + 2 * lr * smoothness * sigma2 + 2 * smoothness**2 * total_error / steps


def theorem6_bound(
    *,
    gap: float,
    smoothness: float,
    M: float,
    C: float,
    sigma2: float,
    zeta2: float,
    workers: int,
    steps: int,
    lr: float,
    kappa2: float,
) -> float:
    """Theorem 6, absolute: 4 gap / (gamma T) + 2 gamma L(M zeta^2 + sigma^2) / n + 2 gamma^2 L^2 kappa^2.

    >>> constants = dict(gap=1.0, smoothness=1.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1)
    >>> theorem6_bound(**constants, steps=4, lr=0.5, kappa2=2.0)
    4.0
    """
    _check(locals())
    _check_lr(lr, theorem6_max_lr(smoothness=smoothness, M=M, C=C, workers=workers), "Theorem 6")
    noise = 2 * lr * smoothness * (M * zeta2 + sigma2) / workers
    return 4 * gap / (lr * steps) + noise + 2 * (lr * smoothness) ** 2 * kappa2


def theorem7_bound(
    *,
    gap: float,
    smoothness: float,
    M: float,
    C: float,
    sigma2: float,
    zeta2: float,
    workers: int,
    steps: int,
    lr: float,
    delta: float,
) -> float:
    """Theorem 7, delta-contraction; the last term is 8 gamma^2 L^2 / delta ((2/delta + M) zeta^2 + sigma^2).

    8 gap / (gamma T) + 4 gamma L(M zeta^2 + sigma^2) / n + that term; where zeta > 0 it grows with 1/delta^2.

    >>> constants = dict(gap=1.0, smoothness=1.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1)
    >>> theorem7_bound(**constants, steps=4, lr=0.25, delta=1.0)
    9.5
    """
    _check(locals())
    limit = theorem7_max_lr(smoothness=smoothness, M=M, C=C, workers=workers, delta=delta)
    _check_lr(lr, limit, "Theorem 7")
    noise = 4 * lr * smoothness * (M * zeta2 + sigma2) / workers
    error = 8 * (lr * smoothness) ** 2 / delta * ((2 / delta + M) * zeta2 + sigma2)
    return 8 * gap / (lr * steps) + noise + error


def theorem8_bound(
    *,
    gap: float,
    smoothness: float,
    M: float,
    C: float,
    sigma2: float,
    zeta2: float,
    workers: int,
    steps: int,
    lr: float,
) -> float:
    """Theorem 8, nothing compressed: 2 gap / (gamma T) + gamma L(M zeta^2 + sigma^2) / n.

    >>> constants = dict(gap=1.0, smoothness=1.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1)
    >>> theorem8_bound(**constants, steps=4, lr=0.5)
    1.5
    """
    _check(locals())
    _check_lr(lr, theorem8_max_lr(smoothness=smoothness, M=M, C=C, workers=workers), "Theorem 8")
    return 2 * gap / (lr * steps) + lr * smoothness * (M * zeta2 + sigma2) / workers


def corollary1_absolute_rate(
    *,
    gap: float,
    smoothness: float,
    M: float,
    C: float,
    sigma2: float,
    zeta2: float,
    workers: int,
    steps: int,
    kappa2: float,
) -> float:
    """Corollary 1, absolute, V = M zeta^2 + sigma^2: sqrt(LV gap / (nT)) + L(M(C+1)/n + 1 + n kappa^2/V) gap / T.

    Lemma 7 with Theorem 6. It needs V > 0.

    >>> constants = dict(gap=1.0, smoothness=4.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1)
    >>> corollary1_absolute_rate(**constants, steps=16, kappa2=2.0)
    1.25
    """
    _check(locals())
    noise = _positive_noise(M * zeta2 + sigma2, "M * zeta2 + sigma2")
    fast = smoothness * (M * (C + 1) / workers + 1 + workers * kappa2 / noise) * gap / steps
    return math.sqrt(smoothness * noise * gap / (workers * steps)) + fast


def corollary1_contraction_rate(
    *,
    gap: float,
    smoothness: float,
    M: float,
    C: float,
    sigma2: float,
    zeta2: float,
    workers: int,
    steps: int,
    delta: float,
) -> float:
    """Corollary 1, delta-contraction, V = M zeta^2 + sigma^2 > 0: sqrt(LV gap / (nT)) + L(A + B) gap / T.

    A = max{M(C+1)/n + 1, (1/delta + M) sqrt(C+1)}, B = n((1 + M delta) zeta^2 + delta sigma^2) / (delta^2 V): Lemma 7
    with Theorem 7. The printed A has a closing brace too many, after its first entry.

    >>> constants = dict(gap=1.0, smoothness=4.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1)
    >>> corollary1_contraction_rate(**constants, steps=16, delta=0.5)
    1.5
    """
    _check(locals())
    noise = _positive_noise(M * zeta2 + sigma2, "M * zeta2 + sigma2")
    a = max(M * (C + 1) / workers + 1, (1 / delta + M) * math.sqrt(C + 1))
    b = workers * ((1 + M * delta) * zeta2 + delta * sigma2) / (delta**2 * noise)
    return math.sqrt(smoothness * noise * gap / (workers * steps)) + smoothness * (a + b) * gap / steps


def corollary1_identity_rate(
    *, gap: float, smoothness: float, M: float, C: float, sigma2: float, zeta2: float, workers: int, steps: int
) -> float:
    """Corollary 1, nothing compressed: sqrt(L(M zeta^2 + sigma^2) gap / (nT)) + L(M(C+1)/n + 1) gap / T.

    >>> corollary1_identity_rate(gap=1.0, smoothness=4.0, M=0.0, C=0.0, sigma2=1.0, zeta2=0.0, workers=1, steps=16)
    0.75
    """
    _check(locals())
    slow = math.sqrt(smoothness * (M * zeta2 + sigma2) * gap / (workers * steps))
    return slow + smoothness * (M * (C + 1) / workers + 1) * gap / steps


def theorem4_rate(
    *,
    R0: float,
    D: float,
    smoothness: float,
    convexity: float,
    M: float,
    sigma2: float,
    workers: int,
    steps: int,
    kappa2: float,
) -> float:
    """Theorem 4, strongly convex, absolute: L(1 + M/n) R0 exp[-x] + (sigma^2 + MD) / (mu n T) + L kappa^2 / (mu T)^2.

    x = mu T / (8L(1 + 2M/n)). Bounds E f(mean x) - f*, as all the rates below do.

    >>> constants = dict(R0=0.0, D=0.0, smoothness=1.0, convexity=0.5, M=0.0, sigma2=1.0, workers=1)
    >>> theorem4_rate(**constants, steps=4, kappa2=2.0)
    1.0
    """
    _check(locals())
    start = R0 * math.exp(-convexity * steps / (8 * smoothness * (1 + 2 * M / workers)))
    noise = (sigma2 + M * D) / (convexity * workers * steps)
    return smoothness * (1 + M / workers) * start + noise + smoothness * kappa2 / (convexity * steps) ** 2


def remark6_rate(
    *,
    R0: float,
    D: float,
    smoothness: float,
    convexity: float,
    M: float,
    sigma2: float,
    workers: int,
    steps: int,
    delta: float,
) -> float:
    """Remark 6, Theorem 4 for a delta-contraction: L(1/delta + M) R0 exp[-x] + (sigma^2 + D(1/delta + M/n)) / (mu T).

    x = mu T / (28L(2/delta + M)), which Lemma 9 gives for a step size of at most 1 / (14L(2/delta + M)).

    >>> constants = dict(R0=0.0, D=1.0, smoothness=1.0, convexity=0.5, M=0.0, sigma2=1.0, workers=1)
    >>> remark6_rate(**constants, steps=4, delta=0.5)
    1.5
    """
    _check(locals())
    start = R0 * math.exp(-convexity * steps / (28 * smoothness * (2 / delta + M)))
    noise = (sigma2 + D * (1 / delta + M / workers)) / (convexity * steps)
    return smoothness * (1 / delta + M) * start + noise


def theorem5_rate(
    *, R0: float, D: float, smoothness: float, M: float, sigma2: float, workers: int, steps: int, kappa2: float
) -> float:
    """Theorem 5, convex, absolute, V = sigma^2 + MD > 0: sqrt(V R0 / (nT)) + (nL kappa^2/V + L(1 + M/n)) R0 / T.

    >>> theorem5_rate(R0=1.0, D=0.0, smoothness=1.0, M=0.0, sigma2=4.0, workers=1, steps=4, kappa2=4.0)
    1.5
    """
    _check(locals())
    noise = _positive_noise(sigma2 + M * D, "sigma2 + M * D", " (remark7_rate is the case without noise)")
    fast = smoothness * (workers * kappa2 / noise + 1 + M / workers) * R0 / steps
    return math.sqrt(noise * R0 / (workers * steps)) + fast


def remark7_rate(*, R0: float, smoothness: float, M: float, workers: int, steps: int, kappa2: float) -> float:
    """Remark 7, Theorem 5 with sigma^2 + MD = 0: (sqrt(L) kappa R0)^(2/3) / T^(2/3) + L(1 + M/n) R0 / T.

    The paper prints (L kappa R0)^(2/3), which is no function value in its units; the best gamma in (25), where
    2 R0 / (gamma T) meets 6L kappa^2 gamma^2, gives sqrt(L). The 1/T term, left out there, is the step-size limit's.

    >>> remark7_rate(R0=1.0, smoothness=1.0, M=0.0, workers=1, steps=8, kappa2=1.0)
    0.375
    """
    _check(locals())
    return math.cbrt(smoothness * kappa2 * (R0 / steps) ** 2) + smoothness * (1 + M / workers) * R0 / steps


def remark8_rate(
    *, R0: float, D: float, smoothness: float, M: float, sigma2: float, workers: int, steps: int, delta: float
) -> float:
    """Remark 8, Theorem 5 for a delta-contraction: sqrt((sigma^2 + D(1/delta + M/n)) R0 / T) + L(1/delta + M) R0 / T.

    >>> remark8_rate(R0=1.0, D=1.0, smoothness=1.0, M=0.0, sigma2=2.0, workers=1, steps=4, delta=0.5)
    1.5
    """
    _check(locals())
    slow = math.sqrt((sigma2 + D * (1 / delta + M / workers)) * R0 / steps)
    return slow + smoothness * (1 / delta + M) * R0 / steps


def theorem9_rate(
    *,
    R0: float,
    D: float,
    smoothness: float,
    convexity: float,
    M: float,
    sigma2: float,
    workers: int,
    steps: int,
    kappa2: float,
) -> float:
    """Theorem 9 iii), strongly convex, absolute, with the step sizes of ``theorem9_lr``; T from 2.

    (sigma^2 + MD) / (mu n T) + (mu L^2 (1 + M/n)^2 R0 + L kappa^2 ln T) / (mu T)^2. The paper prints the lone mu at
    the kappa^2 term instead; Lemma 8 with a = mu/2, r0 = 2 R0 and b = 6L kappa^2 puts it here, and so do the units.

    >>> constants = dict(R0=1.0, D=0.0, smoothness=1.0, convexity=0.5, M=0.0, sigma2=1.0, workers=1)
    >>> theorem9_rate(**constants, steps=4, kappa2=0.0)
    0.625
    """
    _check(locals())
    if steps < 2:
        raise ValueError(f"steps must be at least 2 for Theorem 9, not {steps!r}")
    start = convexity * (smoothness * (1 + M / workers)) ** 2 * R0
    fast = (start + smoothness * kappa2 * math.log(steps)) / (convexity * steps) ** 2
    return (sigma2 + M * D) / (convexity * workers * steps) + fast
