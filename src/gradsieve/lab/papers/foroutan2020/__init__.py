"""Foroutan Eghlidi and Jaggi 2020, "Sparse communication for training deep networks": both tables."""

from gradsieve.lab.papers.entry import Entry
from gradsieve.lab.papers.foroutan2020 import steps, table1, table2

ENTRIES = (
    Entry(
        table1.KEY,
        "test accuracy by rule, exchange, scope and number of workers",
        "CIFAR-10; a quick run nothing",
        table1.run,
        check=table1.check,
        seeds=1,
        epochs=table1.EPOCHS,
        devices=("cpu", "cuda"),
        stages=table1.stages,
    ),
    Entry(
        steps.KEY,
        "block-random-k by exchange and number of workers, at equal steps",
        "CIFAR-10; a quick run nothing",
        steps.run,
        check=table1.check,
        seeds=1,
        epochs=steps.EPOCHS,
        devices=("cpu", "cuda"),
        stages=steps.stages,
    ),
    Entry(
        table2.KEY,
        "time of a step by part, layer scope, 8 real processes",
        "nothing; root and iproute2 for the paper's 10 Gbit/s links",
        table2.run,
    ),
)
