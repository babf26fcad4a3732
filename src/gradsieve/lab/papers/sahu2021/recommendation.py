"""Figures 2c and 6: NeuMF on MovieLens, as in Table 4."""

from gradsieve.lab.papers.sahu2021.benchmark import Benchmark, best_hit_rate
from gradsieve.lab.papers.sahu2021.course import Course
from gradsieve.lab.papers.sahu2021.volume import Volume
from gradsieve.lab.tasks.recommendation import BATCH

NCF = Benchmark(
    task="movielens-ncf-apart",
    small="movielens-ncf-small",
    epochs=30,
    thresholds=(2e-6, 1.3e-6, 1e-6, 4e-7),
    judge=best_hit_rate,
    measure="best Hit-Rate@10 (%)",
    unit="points",
    lower_is_better=False,
    batch=BATCH,
)
_VOLUME = Volume("sahu2021/fig2c", NCF)
# its caption prints Figure 3's lambda; this one is Table 4's for 7.7%
_COURSE = Course("sahu2021/fig6", NCF, 2e-6, by_epoch=True)
_NEEDS = "MovieLens, and a GPU for the full scale"

ENTRIES = (
    NCF.entry(_VOLUME, "NeuMF on MovieLens: Hit-Rate@10 against average density", _NEEDS),
    NCF.entry(_COURSE, "NeuMF on MovieLens: Hit-Rate@10, error and density by epoch", _NEEDS),
)
