"""Shi et al. 2019, "Understanding top-k sparsification in distributed deep learning": its figures that run."""

from gradsieve.lab.papers.entry import Entry
from gradsieve.lab.papers.shi2019 import figure1, figure4, figures

_TASKS = "nothing; CIFAR-10 as well where it is there"
_BOTH = ("cpu", "cuda")

ENTRIES = (
    Entry(
        "shi2019/fig1",
        "convergence of Dense-SGD, TopK-SGD and RandK-SGD, 16 workers",
        f"{_TASKS}; on a GPU CIFAR-10",
        figure1.figure1,
        check=figure1.check,
        seeds=1,
        epochs=figure1.EPOCHS,
        devices=_BOTH,
        stages=figure1.stages,
    ),
    Entry("shi2019/fig2", "histograms of the compensated gradient of TopK-SGD", _TASKS, figures.figure2),
    Entry("shi2019/fig3", "shape of the sorted magnitudes against the line of Theorem 1", _TASKS, figures.figure3),
    Entry(
        "shi2019/fig4",
        "time of top-k, sampled top-k and Gaussian-k by vector size",
        "nothing; the paper's is of a GPU",
        figure4.figure4,
        devices=_BOTH,
    ),
    Entry("shi2019/fig5", "what top-k leaves out against its bounds", _TASKS, figures.figure5),
)
