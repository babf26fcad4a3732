"""Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization": its convex figures."""

from gradsieve.lab.papers.entry import Context, Entry
from gradsieve.lab.papers.sahu2021 import figure7
from gradsieve.lab.papers.sahu2021.figures1and4 import EPOCHS, View
from gradsieve.lab.papers.sahu2021.figures8and9 import Setting
from gradsieve.lab.tasks import logistic

_GISETTE = "gisette_scale (LIBSVM); a generated set where it is missing"
_MADELON = "madelon (LIBSVM)"


def _check(context: Context) -> None:
    logistic.madelon_path(context.data_dir)


ENTRIES = (
    Entry(
        "sahu2021/fig1",
        "logistic regression on gisette, 20 workers: suboptimality and error norm",
        _GISETTE,
        View("sahu2021/fig1"),
        seeds=3,
        epochs=EPOCHS,
    ),
    Entry(
        "sahu2021/fig4",
        "the run of Figure 1: norms of the compensated gradient and of the error",
        _GISETTE,
        View("sahu2021/fig4"),
        seeds=3,
        epochs=EPOCHS,
    ),
    Entry(
        "sahu2021/fig7",
        "logistic regression on madelon, 20 workers: extreme sparsification",
        _MADELON,
        figure7.run,
        check=_check,
        seeds=10,
        quick_seeds=2,
    ),
    Entry(
        "sahu2021/fig8",
        "EF-GDstar on madelon, 20 workers, 70,000 iterations",
        _MADELON,
        Setting("sahu2021/fig8", workers=20, k=1, steps=70_000, shown=60_000),
        check=_check,
        seeds=1,
    ),
    Entry(
        "sahu2021/fig9",
        "EF-GDstar on madelon, 100 workers, 100,000 iterations",
        _MADELON,
        Setting("sahu2021/fig9", workers=100, k=5, steps=100_000, shown=100_000),
        check=_check,
        seeds=1,
    ),
)
