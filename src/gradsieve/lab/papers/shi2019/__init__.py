"""Shi et al. 2019, "Understanding top-k sparsification in distributed deep learning": the figures a CPU can make."""

from gradsieve.lab.papers.entry import Entry
from gradsieve.lab.papers.shi2019 import figures

_TASKS = "nothing; CIFAR-10 as well where it is there"

ENTRIES = (
    Entry("shi2019/fig2", "histograms of the compensated gradient of TopK-SGD", _TASKS, figures.figure2),
    Entry("shi2019/fig3", "shape of the sorted magnitudes against the line of Theorem 1", _TASKS, figures.figure3),
    Entry("shi2019/fig5", "what top-k leaves out against its bounds", _TASKS, figures.figure5),
)
