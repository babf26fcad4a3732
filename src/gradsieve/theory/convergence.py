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

from gradsieve.theory.arguments import check, check_lr, positive_noise


def theorem6_max_lr(*, smoothness: float, M: float, C: float, workers: int) -> float:
    """The step-size limit of Theorem 6, n / (2L(M(C+1) + n)); with C = 0, n = 1 that of Theorem 1, 1 / (2L(M+1)).

    >>> theorem6_max_lr(smoothness=2.0, M=1.0, C=0.0, workers=1)
    0.125
    """
    check(locals())
    return workers / (2 * smoothness * (M * (C + 1) + workers))


def theorem7_max_lr(*, smoothness: float, M: float, C: float, workers: int, delta: float) -> float:
    """The step-size limit of Theorem 7: min{n / (2L(M(C+1) + n)), 1 / (2L(2/delta + M) sqrt(C+1))}.

    >>> theorem7_max_lr(smoothness=1.0, M=0.0, C=3.0, workers=1, delta=0.5)
    0.0625
    """
    check(locals())
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
    check(locals())
    return 1 / (4 * smoothness * (1 + 2 * M / workers))


def theorem9_lr(step: float, *, smoothness: float, convexity: float, M: float, workers: int) -> float:
    """The decreasing step size of Theorem 9 iii): 4 / (mu(phi + t)), phi = (16L/mu)(1 + 2M/n), t from 0.

    >>> theorem9_lr(0, smoothness=1.0, convexity=0.5, M=0.0, workers=1)  # starts at the limit of Theorem 4
    0.25
    """
    check(locals())
    return 4 / (16 * smoothness * (1 + 2 * M / workers) + convexity * step)


def theorem1_bound(
    *, gap: float, smoothness: float, M: float, sigma2: float, steps: int, lr: float, total_error: float
) -> float:
    """Theorem 1, one worker, any compressor: 4 gap / (gamma T) + 2 gamma L sigma^2 + (2 L^2 / T) total_error.

    Bounds the mean of E|grad f(x_t)|^2; ``total_error`` is the sum of E|e_t|^2, in update units (Remark 4).

    >>> theorem1_bound(gap=1.0, smoothness=1.0, M=0.0, sigma2=1.0, steps=4, lr=0.5, total_error=2.0)
    4.0
    """
    check(locals())
    check_lr(lr, theorem6_max_lr(smoothness=smoothness, M=M, C=0, workers=1), "Theorem 1")
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
    check(locals())
    check_lr(lr, theorem6_max_lr(smoothness=smoothness, M=M, C=C, workers=workers), "Theorem 6")
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
    check(locals())
    limit = theorem7_max_lr(smoothness=smoothness, M=M, C=C, workers=workers, delta=delta)
    check_lr(lr, limit, "Theorem 7")
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
    check(locals())
    check_lr(lr, theorem8_max_lr(smoothness=smoothness, M=M, C=C, workers=workers), "Theorem 8")
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
    check(locals())
    noise = positive_noise(M * zeta2 + sigma2, "M * zeta2 + sigma2")
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
    check(locals())
    noise = positive_noise(M * zeta2 + sigma2, "M * zeta2 + sigma2")
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
    check(locals())
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
    check(locals())
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
    check(locals())
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
    check(locals())
    noise = positive_noise(sigma2 + M * D, "sigma2 + M * D", " (remark7_rate is the case without noise)")
    fast = smoothness * (workers * kappa2 / noise + 1 + M / workers) * R0 / steps
    return math.sqrt(noise * R0 / (workers * steps)) + fast


def remark7_rate(*, R0: float, smoothness: float, M: float, workers: int, steps: int, kappa2: float) -> float:
    """Remark 7, Theorem 5 with sigma^2 + MD = 0: (sqrt(L) kappa R0)^(2/3) / T^(2/3) + L(1 + M/n) R0 / T.

    The paper prints (L kappa R0)^(2/3), which is no function value in its units; the best gamma in (25), where
    2 R0 / (gamma T) meets 6L kappa^2 gamma^2, gives sqrt(L). The 1/T term, left out there, is the step-size limit's.

    >>> remark7_rate(R0=1.0, smoothness=1.0, M=0.0, workers=1, steps=8, kappa2=1.0)
    0.375
    """
    check(locals())
    return math.cbrt(smoothness * kappa2 * (R0 / steps) ** 2) + smoothness * (1 + M / workers) * R0 / steps


def remark8_rate(
    *, R0: float, D: float, smoothness: float, M: float, sigma2: float, workers: int, steps: int, delta: float
) -> float:
    """Remark 8, Theorem 5 for a delta-contraction: sqrt((sigma^2 + D(1/delta + M/n)) R0 / T) + L(1/delta + M) R0 / T.

    >>> remark8_rate(R0=1.0, D=1.0, smoothness=1.0, M=0.0, sigma2=2.0, workers=1, steps=4, delta=0.5)
    1.5
    """
    check(locals())
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
    check(locals())
    if steps < 2:
        raise ValueError(f"steps must be at least 2 for Theorem 9, not {steps!r}")
    start = convexity * (smoothness * (1 + M / workers)) ** 2 * R0
    fast = (start + smoothness * kappa2 * math.log(steps)) / (convexity * steps) ** 2
    return (sigma2 + M * D) / (convexity * workers * steps) + fast
