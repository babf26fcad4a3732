"""Figures 2, 3 and 5: histograms of the compensated gradient, its sorted shape, and what top-k leaves out of it."""

import torch
from torch import Tensor

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.shi2019.gradients import (
    DENSITY,
    WORKERS,
    available,
    below_line,
    compensated,
    described,
    iterations,
    left_out,
    shape,
)
from gradsieve.lab.papers.summary import Comparison
from gradsieve.theory import topk_contraction, topk_contraction_bell

_WIDTH = 4.0  # standard deviations either side that a histogram shows
_BINS = 81


def figure2(context: Context) -> Outcome:
    seen = iterations(context)
    rows = Comparison("shi2019/fig2")
    rows.against("density", DENSITY)
    rows.against("workers", WORKERS)
    rows.against("first", seen[0])
    rows.against("last", seen[-1])
    names = available(context)
    results: list[dict[str, float | int | str]] = []
    with plots.style():
        figure, axes = plots.panels(len(names), _note(names), columns=2)
        for part, name in zip(axes, names, strict=True):
            u_Un = compensated(name, context)
            for index, (iteration, u_n) in enumerate(zip(seen, u_Un, strict=True)):
                centres, heights = histogram(u_n)
                part.plot(centres, heights, color=plots.COLOURS[0], alpha=0.25 + 0.75 * index / len(seen),
                          linewidth=1.0, label=_label(index, iteration, seen))  # fmt: skip
                results += [
                    {"task": name, "iteration": iteration, "u_over_std": x, "density": y}
                    for x, y in zip(centres.tolist(), heights.tolist(), strict=True)
                ]
            normal = torch.exp(-centres.square() / 2) / (2 * torch.pi) ** 0.5
            part.plot(centres, normal, "--", color=plots.COLOURS[1], label="Gaussian of the same spread")
            part.set(title=name, xlabel="u / standard deviation of u", ylabel="density")
            plots.logarithmic(part)
            part.set_ylim(1e-4, None)
            _describe(rows, name, u_Un)
        return Outcome(plots.finish(figure, axes), rows.rows, results, described(context))


def histogram(u_n: Tensor) -> tuple[Tensor, Tensor]:
    """Centres and heights of the density of u over its standard deviation."""
    edges = torch.linspace(-_WIDTH, _WIDTH, _BINS + 1, dtype=torch.float64)
    scaled_n = u_n.double() / u_n.double().std()
    heights = torch.histogram(scaled_n, bins=edges).hist / len(u_n) * _BINS / (2 * _WIDTH)
    return (edges[1:] + edges[:-1]) / 2, heights


def _label(index: int, iteration: int, seen: list[int]) -> str:
    return f"iteration {iteration}" if index in (0, len(seen) - 1) else "_between"


def _describe(rows: Comparison, name: str, u_Un: Tensor) -> None:
    scaled_Un = (u_Un.double() - u_Un.double().mean(1, keepdim=True)) / u_Un.double().std(1, keepdim=True)
    inside = (scaled_Un.abs() <= 1).double().mean().item()
    rows.alone(f"{name}: share of u within a standard deviation", inside, "a Gaussian has 0.683")
    rows.alone(f"{name}: kurtosis of u", scaled_Un.pow(4).mean().item(), "a Gaussian has 3")
    peak = [histogram(u_n)[1].argmax().item() for u_n in u_Un]
    rows.alone(f"{name}: iterations whose histogram peaks at zero", sum(p == _BINS // 2 for p in peak) / len(peak))


def figure3(context: Context) -> Outcome:
    rows = Comparison("shi2019/fig3")
    gaussian_n = _gaussian()
    rows.against("size", len(gaussian_n))
    rows.against("below", below_line(gaussian_n))
    vectors, names = _vectors(context, gaussian_n)
    results: list[dict[str, float | int | str]] = []
    with plots.style():
        figure, axes = plots.panels(1, _note(names))
        for index, (name, u_n) in enumerate(vectors.items()):
            pi_n = shape(u_n)
            at = torch.linspace(0, len(pi_n) - 1, 400).long()
            share = at / len(pi_n)
            axes[0].plot(share, pi_n[at], color=plots.COLOURS[index], label=name)
            results += [
                {"vector": name, "i_over_d": x, "pi_squared": y}
                for x, y in zip(share.tolist(), pi_n[at].tolist(), strict=True)
            ]
            if index:
                rows.alone(f"{name}: share of coordinates below the line", below_line(u_n))
        axes[0].plot([0, 1], [1, 0], "--", color=plots.BASELINE, label="the line 1 - i/d")
        axes[0].set(xlabel="i / d", ylabel="(|u| over the largest)², sorted")
        return Outcome(plots.finish(figure, axes), rows.rows, results, described(context))


def figure5(context: Context) -> Outcome:
    rows = Comparison("shi2019/fig5")
    gaussian_n = _gaussian()
    vectors, names = _vectors(context, gaussian_n)
    results: list[dict[str, float | int | str]] = []
    with plots.style():
        figure, axes = plots.panels(len(vectors), _note(names))
        for part, (name, u_n) in zip(axes, vectors.items(), strict=True):
            size = len(u_n)
            wanted = [DENSITY, *torch.logspace(-4, -0.01, 60).tolist()]
            ks = sorted({max(1, round(size * share)) for share in wanted})
            exact = left_out(u_n, ks)
            classic = torch.tensor([1 - topk_contraction(k, size) for k in ks], dtype=torch.float64)
            bell = torch.tensor([1 - topk_contraction_bell(k, size) for k in ks], dtype=torch.float64)
            shares = [k / size for k in ks]
            part.plot(shares, classic, "--", color=plots.BASELINE, label="1 - k/d")
            part.plot(shares, bell, color=plots.COLOURS[1], label="(1 - k/d)²")
            part.plot(shares, exact, color=plots.COLOURS[0], label="left out by top-k")
            part.set(title=name, xlabel="k / d", ylabel="|u - top-k(u)|² / |u|²")
            part.set_xscale("log")
            results += [
                {"vector": name, "k_over_d": x, "exact": e, "classic": c, "bell": b}
                for x, e, c, b in zip(shares, exact.tolist(), classic.tolist(), bell.tolist(), strict=True)
            ]
            worst = (exact / bell).max().item()
            if name == _GAUSSIAN:
                rows.against("bound", worst)
            else:
                rows.alone(f"{name}: largest share left out over (1 - k/d)^2", worst)
            at = ks.index(max(1, round(size * DENSITY)))
            rows.alone(
                f"{name}: left out at k/d = 0.001",
                exact[at].item(),
                f"the bounds say {classic[at]:.4f} and {bell[at]:.4f}",
            )
        return Outcome(plots.finish(figure, axes), rows.rows, results, described(context))


_GAUSSIAN = "Gaussian, d = 100,000"


def _gaussian() -> Tensor:
    """The vector of the paper's Figure 3: d = 100,000, sigma = 1."""
    return torch.randn(100_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _vectors(context: Context, gaussian_n: Tensor) -> tuple[dict[str, Tensor], list[str]]:
    """The Gaussian vector, and u of each task half way through."""
    names = available(context)
    seen = iterations(context)
    middle = len(seen) // 2
    trained = {f"{name}, iteration {seen[middle]}": compensated(name, context)[middle] for name in names}
    return {_GAUSSIAN: gaussian_n, **trained}, names


def _note(names: list[str]) -> str:
    return f"u = memory + gradient of worker 0 of {WORKERS}; top-k, k = 0.001 d; {' and '.join(names)}"
