"""Table 1's rows of block-random-k in layer scope, with as many steps for many workers as for one.

In a fixed number of epochs W workers take a W-th of the steps. Over 300 epochs that is nothing to a coordinate that
waits for 100 of them; over 10 it is all there is, and hides what the exchange does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.foroutan2020 import table1
from gradsieve.lab.papers.foroutan2020.claims import Cell, held, number
from gradsieve.lab.papers.foroutan2020.configurations import BLOCK_GATHER, BLOCK_REDUCE, WORKERS
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.papers.trainings import Arm, trained

KEY = "foroutan2020/table1steps"
EPOCHS = 10
"""Of one worker; W workers take W times as many."""
KINDS = (BLOCK_GATHER, BLOCK_REDUCE)


def cells(context: Context) -> dict[Cell, list[Arm]]:
    """The trainings of each cell, one a seed."""
    alone = context.epochs or (1 if context.quick else EPOCHS)
    return {
        (kind.key, "layer", workers): [
            replace(table1.arm(context, kind, "layer", workers, seed), epochs=alone * workers)
            for seed in range(context.seeds)
        ]
        for kind in KINDS
        for workers in WORKERS
    }


def stages(context: Context) -> Iterator[Sequence[Arm]]:
    yield list(dict.fromkeys(arm for arms in cells(context).values() for arm in arms))


def run(context: Context) -> Outcome:
    (arms,) = stages(context)
    runs = trained(context, arms)
    found = {cell: [runs[arm] for arm in chosen] for cell, chosen in cells(context).items()}
    accuracy = {cell: table1.mean(of_seeds) for cell, of_seeds in found.items()}
    rows, epochs = Comparison(KEY), arms[0].epochs
    for kind in KINDS:
        rows.against(f"{kind.key}-layer-held", held(accuracy, kind.key, "layer"), f"{epochs} epochs a worker")
    for cell in accuracy:
        rows.against(number(cell), accuracy[cell], table1.reasons(epochs * cell[2], table1.task(context)))
    about = found[BLOCK_GATHER.key, "layer", 1][0].about
    note = (
        f"{about.description}\nk = 1%, layer scope; {epochs} epochs with 1 worker, {epochs * WORKERS[-1]} with "
        f"{WORKERS[-1]}; seeds: {context.seeds}\ndotted: the paper's, {table1.EPOCHS} epochs each"
    )
    return Outcome(draw(accuracy, note), rows.rows, table1.results(found), about.description)


def draw(accuracy: Mapping[Cell, float], note: str) -> Figure:
    theirs = table1.published()
    with plots.style():
        figure, (axes,) = plots.panels(1, note, height=4.2)
        for kind, colour in zip(KINDS, plots.COLOURS, strict=False):
            table1.line(axes, accuracy, (kind.key, "layer"), kind.name, colour, "o-")
            table1.line(axes, theirs, (kind.key, "layer"), "_theirs", colour, ":")
        table1.label(axes)
        return plots.finish(figure, [axes])
