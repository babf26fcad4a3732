"""Figures 2b and 5: the LSTM on WikiText-2, as in Table 3."""

from gradsieve.lab.papers.sahu2021.benchmark import Benchmark, perplexity
from gradsieve.lab.papers.sahu2021.course import Course
from gradsieve.lab.papers.sahu2021.volume import Volume

LSTM = Benchmark(
    task="wikitext-lstm",
    small="wikitext-lstm-small",
    epochs=90,
    thresholds=(4.5e-3, 2.75e-3, 1.6e-3, 1.12e-3),
    judge=perplexity,
    measure="test perplexity",
    unit="perplexity",
    lower_is_better=True,
)
_VOLUME = Volume("sahu2021/fig2b", LSTM)
_COURSE = Course(
    "sahu2021/fig5", LSTM, 2.75e-3
)  # its caption prints Figure 3's lambda; this one is Table 3's for 0.05%
_NEEDS = "WikiText-2, and a GPU for the full scale"

ENTRIES = (
    LSTM.entry(_VOLUME, "LSTM on WikiText-2: perplexity against average density", _NEEDS),
    LSTM.entry(_COURSE, "LSTM on WikiText-2: perplexity, error and density by iteration", _NEEDS),
)
