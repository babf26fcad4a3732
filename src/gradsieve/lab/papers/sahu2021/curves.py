"""Methods side by side as training goes on, in the panels of Figures 3, 5, 6, 12 and 13."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.sahu2021.methods import Method

_LABELS = {"error": "mean over workers of |e|²", "density": "density $k_t / d$"}


def draw(
    methods: Mapping[str, Method],
    note: str,
    *,
    figures: Sequence[str] = (),
    baseline: Method | None = None,
    by_epoch: bool = False,
) -> Figure:
    """Accuracy by iteration or epoch, then ``figures`` of the steps: means over seeds, with their range as a shade."""
    with plots.style():
        several = any(len(method.runs) > 1 for method in methods.values())
        figure, axes = plots.panels(1 + len(figures), f"{note}; shade: range over seeds" if several else note)
        for letter, part in zip("abc", axes, strict=False):
            part.set(title=f"({letter})" if figures else "", xlabel="epoch" if by_epoch else "iteration")
        axes[0].set_ylabel("test accuracy (%)")
        if baseline is not None:
            plots.curve(axes[0], *_accuracy(baseline, by_epoch), "no compression", plots.BASELINE, dash="--")
        for (name, method), colour in zip(methods.items(), plots.COLOURS, strict=False):
            plots.curve(axes[0], *_accuracy(method, by_epoch), name, colour)
        for what, part in zip(figures, axes[1:], strict=True):
            part.set_ylabel(_LABELS[what])
            _by_step(part, methods, what, by_epoch)
        return plots.finish(figure, axes)


def _accuracy(method: Method, by_epoch: bool) -> tuple[np.ndarray, np.ndarray]:
    step_P, value_PS = method.by_epoch()
    return step_P / _steps(method, by_epoch), value_PS


def _steps(method: Method, by_epoch: bool) -> float:
    """Of an epoch, or of an iteration: one."""
    return method.runs[0].epochs[0].step if by_epoch else 1


def _by_step(axes: Axes, methods: Mapping[str, Method], what: str, by_epoch: bool) -> None:
    every: list[float] = []
    for (name, method), colour in zip(methods.items(), plots.COLOURS, strict=False):
        step_P, value_PS = method.by_step(what)
        shown_PS = np.where(np.isfinite(value_PS) & (value_PS > 0), value_PS, np.nan)  # zero has no logarithm
        plots.curve(axes, step_P / _steps(method, by_epoch), shown_PS, name, colour)
        every += shown_PS[~np.isnan(shown_PS)].tolist()
    if every and max(every) > 10 * min(every):
        plots.logarithmic(axes)
