"""Methods side by side as training goes on, in the panels of Figures 3, 12 and 13."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.sahu2021.cifar import Method

_LABELS = {"error": "mean over workers of |e|²", "density": "density k_t / d"}


def draw(
    methods: Mapping[str, Method], note: str, *, figures: Sequence[str] = (), baseline: Method | None = None
) -> Figure:
    """Accuracy by iteration, then ``figures`` of the steps: means over seeds, with their range as a shade."""
    with plots.style():
        figure, axes = plots.panels(1 + len(figures), note)
        for letter, part in zip("abc", axes, strict=False):
            part.set(title=f"({letter})" if figures else "", xlabel="iteration")
        axes[0].set_ylabel("test accuracy (%)")
        if baseline is not None:
            plots.curve(axes[0], *baseline.by_epoch(), "no compression", plots.BASELINE, dash="--")
        for (name, method), colour in zip(methods.items(), plots.COLOURS, strict=False):
            plots.curve(axes[0], *method.by_epoch(), name, colour)
        for what, part in zip(figures, axes[1:], strict=True):
            part.set_ylabel(_LABELS[what])
            _by_step(part, methods, what)
        return plots.finish(figure, axes)


def _by_step(axes: Axes, methods: Mapping[str, Method], what: str) -> None:
    every: list[float] = []
    for (name, method), colour in zip(methods.items(), plots.COLOURS, strict=False):
        step_P, value_PS = method.by_step(what)
        shown_PS = np.where(np.isfinite(value_PS) & (value_PS > 0), value_PS, np.nan)  # zero has no logarithm
        plots.curve(axes, step_P, shown_PS, name, colour)
        every += shown_PS[~np.isnan(shown_PS)].tolist()
    if every and max(every) > 10 * min(every):
        plots.logarithmic(axes)
