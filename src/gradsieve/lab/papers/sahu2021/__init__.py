"""Sahu et al. 2021, "Rethinking gradient sparsification as total error minimization": convex, and its trainings."""

from collections.abc import Callable

from gradsieve.lab.papers.entry import Context, Entry, Outcome
from gradsieve.lab.papers.sahu2021 import cifar, figure3, figure7, figure12, figure13, language, recommendation, table6
from gradsieve.lab.papers.sahu2021.figures1and4 import EPOCHS, View
from gradsieve.lab.papers.sahu2021.figures2and11 import View as Volume
from gradsieve.lab.papers.sahu2021.figures8and9 import Setting
from gradsieve.lab.papers.sahu2021.methods import Stages
from gradsieve.lab.tasks import logistic

_GISETTE = "gisette_scale (LIBSVM); a generated set where it is missing"
_MADELON = "madelon (LIBSVM)"
_CIFAR = "CIFAR-10, and a GPU for the full scale"


def _check(context: Context) -> None:
    logistic.madelon_path(context.data_dir)


def _trained(name: str, title: str, run: Callable[[Context], Outcome], stages: Callable[[Context], Stages]) -> Entry:
    """An entry that is made of trainings on CIFAR-10."""
    return Entry(
        f"sahu2021/{name}",
        title,
        _CIFAR,
        run,
        check=cifar.check,
        seeds=cifar.SEEDS,
        epochs=cifar.EPOCHS,
        devices=("cpu", "cuda"),
        stages=stages,
    )


_LAYERS = Volume("sahu2021/fig2a", "layer", "layer-wise top-k")
_MODEL = Volume("sahu2021/fig11", "global", "entire-model top-k")

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
    _trained("fig2a", "ResNet-18 on CIFAR-10: accuracy against average density", _LAYERS, _LAYERS.stages),
    _trained("fig3", "ResNet-18 on CIFAR-10: accuracy, error and density by iteration", figure3.run, figure3.stages),
    _trained("fig11", "ResNet-18 on CIFAR-10: Figure 2a with entire-model top-k", _MODEL, _MODEL.stages),
    _trained("fig12", "ResNet-18 on CIFAR-10: 5% without feedback", figure12.run, figure12.stages),
    _trained("fig13", "ResNet-18 on CIFAR-10: gradients or updates compressed", figure13.run, figure13.stages),
    _trained("table6", "ACCORDION and a threshold: three networks on CIFAR-10", table6.run, table6.stages),
    *language.ENTRIES,
    *recommendation.ENTRIES,
)
