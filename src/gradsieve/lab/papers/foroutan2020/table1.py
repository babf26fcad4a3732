"""Table 1: test accuracy on CIFAR-10 of six configurations, two scopes, one to eight workers."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.foroutan2020 import claims
from gradsieve.lab.papers.foroutan2020.claims import CELLS, Cell, number
from gradsieve.lab.papers.foroutan2020.configurations import ALL, SCOPES, SGD, WORKERS, Configuration
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.papers.trainings import Arm, load, trained
from gradsieve.lab.records import Run

KEY = "foroutan2020/table1"
EPOCHS = 300
_LR = {"cifar-resnet18": 0.1, "cifar": 0.01, "digits": 0.1}
"""Of one worker. ResNet-18's is the paper's; a net without batch norm diverges there under random rules."""
_DENSE_LR = _LR | {"cifar": 0.001}  # with momentum
_GLOBAL_LR = 0.1  # of that, in global scope
_BATCH = {"cifar-resnet18": 128, "cifar": 128, "digits": 64}


def task(context: Context) -> str:
    if context.quick:
        return "digits"
    return "cifar-resnet18" if context.device == "cuda" else "cifar"


def check(context: Context) -> None:
    load(context, task(context))


def arm(context: Context, kind: Configuration, scope: str, workers: int, seed: int) -> Arm:
    """The training of a cell. One worker has nobody to differ from, and standard SGD no scope: such cells are one."""
    name = task(context)
    whole = scope == "global" and kind != SGD
    alone = workers == 1 and kind != SGD
    return Arm(
        task=name,
        rule=kind.rule,
        epochs=context.epochs or (1 if context.quick else EPOCHS),
        seed=seed,
        workers=workers,
        scope="global" if whole else "layer",
        feedback="update" if kind != SGD else "gradient",
        exchange="allgather" if alone else kind.exchange,
        batch_size=_BATCH[name],
        lr=round((_DENSE_LR if kind == SGD else _LR)[name] * workers * (_GLOBAL_LR if whole else 1.0), 9),
        momentum=None if kind == SGD else 0.0,  # Algorithm 1 has none
    )


def cells(context: Context) -> dict[Cell, list[Arm]]:
    """The trainings of each cell, one a seed."""
    kinds = {kind.key: kind for kind in ALL}
    return {
        (key, scope, workers): [arm(context, kinds[key], scope, workers, seed) for seed in range(context.seeds)]
        for key, scope, workers in CELLS
    }


def stages(context: Context) -> Iterator[Sequence[Arm]]:
    yield list(dict.fromkeys(arm for arms in cells(context).values() for arm in arms))


def run(context: Context) -> Outcome:
    (arms,) = stages(context)
    runs = trained(context, arms)
    found = {cell: [runs[arm] for arm in chosen] for cell, chosen in cells(context).items()}
    accuracy = {cell: mean(of_seeds) for cell, of_seeds in found.items()}
    rows = compare(accuracy, arms[0].epochs, task(context))
    scale = f"epochs: {arms[0].epochs}, seeds: {context.seeds}"
    note = f"{found[CELLS[0]][0].about.description}\nk = 1%; {scale}; dotted: the paper's, of ResNet-18 on CIFAR-10"
    return Outcome(draw(accuracy, note), rows.rows, results(found), found[CELLS[0]][0].about.description)


def mean(of_seeds: Sequence[Run]) -> float:
    return 100 * float(np.mean([run.epochs[-1].accuracy for run in of_seeds]))


def compare(accuracy: Mapping[Cell, float], epochs: int, name: str) -> Comparison:
    """All cells, in percent, and what the text says of them."""
    rows = Comparison(KEY)
    why = reasons(epochs, name)
    for claim, ours in claims.all_of(accuracy).items():
        rows.against(claim, ours, why)
    for cell in CELLS:
        if cell[:2] != (SGD.key, "global"):
            rows.against(number(cell), accuracy[cell], why)
    return rows


def reasons(epochs: int, name: str) -> str:
    """Why an accuracy may not be the paper's."""
    shorter = "" if epochs == EPOCHS else f"{epochs} epochs instead of {EPOCHS}"
    return "; ".join(filter(None, (shorter, "" if name == "cifar-resnet18" else f"{name} instead of ResNet-18")))


def published() -> dict[Cell, float]:
    """The paper's own table."""
    known = Comparison(KEY)
    return {cell: known.value(number(cell)) for cell in CELLS}


def results(found: Mapping[Cell, Sequence[Run]]) -> list[dict[str, float | int | str]]:
    names = {kind.key: kind.name for kind in ALL}
    return [
        {
            "configuration": names[key],
            "scope": scope,
            "workers": workers,
            "seed": run.about.seed,
            "epochs": run.epochs[-1].epoch,
            "lr": run.about.lr,
            "accuracy": 100 * run.epochs[-1].accuracy,
            "best": 100 * max(epoch.accuracy for epoch in run.epochs),
            "density": run.epochs[-1].density,
            "megabytes": run.epochs[-1].bytes / 1e6,
            "seconds": run.epochs[-1].seconds,
        }
        for (key, scope, workers), runs in found.items()
        for run in runs
    ]


def draw(accuracy: Mapping[Cell, float], note: str) -> Figure:
    theirs = published()
    with plots.style():
        figure, axes = plots.panels(2, note, columns=2, height=4.4)
        for part, scope in zip(axes, SCOPES, strict=True):
            for kind, colour in zip(ALL, (plots.BASELINE, *plots.COLOURS), strict=False):
                line(part, accuracy, (kind.key, scope), kind.name, colour, "o-")
                line(part, theirs, (kind.key, scope), "_theirs", colour, ":")
            part.set(title=f"{scope} scope")
            label(part)
        return plots.finish(figure, axes)


def line(axes: Axes, accuracy: Mapping[Cell, float], of: tuple[str, str], label: str, colour: str, dash: str) -> None:
    ours = [accuracy[(*of, count)] for count in WORKERS]
    axes.plot(WORKERS, ours, dash, color=colour, label=label, markersize=4)


def label(axes: Axes) -> None:
    axes.set(xlabel="workers", ylabel="test accuracy, %")
    axes.set_xscale("log", base=2)
    axes.set_xticks(WORKERS, [str(count) for count in WORKERS])
