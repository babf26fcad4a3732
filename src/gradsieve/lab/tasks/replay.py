"""The gradients of W workers as one CUDA graph: a small network is bound by launches, and a graph is one launch.

Shape suffixes: W workers in all, B examples in a worker's batch, n coordinates of the flat gradient.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from gradsieve.lab.tasks.flat import shaped

_LANES = 2
_WARM_UPS = 3
_NARROWED = (nn.Conv2d, nn.Linear)


class Replay:
    """Forward and backward of every worker, captured once and replayed for each batch.

    Workers run in two lanes side by side, so that one's memory traffic hides behind another's arithmetic. Batch norms
    take each worker's batch on its own; running statistics take in the workers in rank order, as if they had run one
    after the other. With ``narrow`` the result is that of bfloat16 autocast, but weights are cast once a step instead
    of once a worker. The losses ``[W]`` and gradients ``[W, n]`` that a call returns are overwritten by the next.
    """

    def __init__(
        self, model: nn.Module, batch: tuple[Tensor, Tensor], *, smoothing: float, narrow: bool, compiled: bool = False
    ):
        inputs_WB, labels_WB = batch
        self._smoothing = smoothing
        self._labels_WB = labels_WB.clone()
        rows = inputs_WB.flatten(0, 1)
        layout = torch.channels_last if narrow and rows.dim() == 4 else torch.contiguous_format
        self._inputs = rows.to(torch.bfloat16 if narrow else rows.dtype, memory_format=layout, copy=True)
        self._net, self._casts, self._sources = _sharing(model, narrow)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(self._net, dynamic=False) if compiled else self._net
        self._weights = list(self._net.parameters())
        self._norms = _Norms(model, self._net, len(labels_WB))
        n = sum(weight.numel() for weight in self._weights)
        self._losses_W = torch.zeros(len(labels_WB), device=rows.device)
        self._grads_Wn = torch.zeros(len(labels_WB), n, device=rows.device)
        self._replay = self._captured()

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs_WB, labels_WB = batch
        self._inputs.copy_(inputs_WB.flatten(0, 1))
        self._labels_WB.copy_(labels_WB)
        self._replay()
        return self._losses_W, self._grads_Wn

    def _captured(self) -> Callable[[], None]:
        """What computes all workers' gradients of what lies in the input buffers."""
        graph = torch.cuda.CUDAGraph()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with _fast_and_repeatable():
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):  # cuDNN chooses, autograd starts, a compiler compiles
                    self._worker(0)
            here.wait_stream(aside)
            with torch.cuda.graph(graph):
                self._all_workers()
        return graph.replay

    def _all_workers(self) -> None:
        if self._casts:
            torch._foreach_copy_(self._casts, self._sources)
        self._side_by_side()
        self._norms.fold()

    def _side_by_side(self) -> None:
        here = torch.cuda.current_stream()
        lanes = [torch.cuda.Stream() for _ in range(_LANES)]  # type: ignore[no-untyped-call]
        for lane in lanes:
            lane.wait_stream(here)
        for worker in range(len(self._labels_WB)):
            with torch.cuda.stream(lanes[worker % _LANES]):
                self._worker(worker)
        for lane in lanes:
            here.wait_stream(lane)

    def _worker(self, worker: int) -> None:
        self._norms.belong_to(worker)
        labels_B = self._labels_WB[worker]
        inputs_B = self._inputs[worker * len(labels_B) : (worker + 1) * len(labels_B)]
        loss = functional.cross_entropy(self._forward(inputs_B).float(), labels_B, label_smoothing=self._smoothing)
        gradients = torch.autograd.grad(loss, self._weights)
        views = shaped(self._grads_Wn[worker], self._weights)
        for dtype in {gradient.dtype for gradient in gradients}:  # one launch where all are of one type
            alike = [i for i, gradient in enumerate(gradients) if gradient.dtype == dtype]
            torch._foreach_copy_([views[i] for i in alike], [gradients[i] for i in alike])
        self._losses_W[worker].copy_(loss.detach())


class _Norms:
    """The batch norms of a model: each worker's batch statistics go to a place of their own, and then into the model.

    Running statistics after W workers, each with ``r = (1 - m) r + m s``, are
    ``(1 - m)^W r + sum over w of m (1 - m)^(W - 1 - w) s_w``.
    """

    def __init__(self, model: nn.Module, net: nn.Module, workers: int):
        self._running = list[Tensor]()
        momenta = set()
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                assert norm.running_mean is not None
                assert norm.running_var is not None
                assert norm.momentum is not None
                self._running += [norm.running_mean, norm.running_var]
                momenta.add(norm.momentum)
        assert len(momenta) <= 1, "batch norms of several momenta"
        self._momentum = momenta.pop() if momenta else 0.0
        self._batch = [[torch.zeros_like(statistic) for statistic in self._running] for _ in range(workers)]
        self._norms = [norm for norm in net.modules() if isinstance(norm, _BatchNorm)]
        for norm in self._norms:
            norm.momentum = 1.0  # the last batch alone
            norm.num_batches_tracked = None  # nothing reads it, and counting is a launch a layer

    def belong_to(self, worker: int) -> None:
        for i, norm in enumerate(self._norms):
            norm.running_mean, norm.running_var = self._batch[worker][2 * i : 2 * i + 2]

    def fold(self) -> None:
        """Take the batch statistics of all workers into the model's running ones."""
        if not self._norms:
            return
        kept = 1.0 - self._momentum
        torch._foreach_mul_(self._running, kept ** len(self._batch))
        for later, statistics in enumerate(reversed(self._batch)):
            torch._foreach_add_(self._running, statistics, alpha=self._momentum * kept**later)


def _sharing(model: nn.Module, narrow: bool) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A twin of the model, on the model's own parameters; with ``narrow``, on bfloat16 copies of those that autocast
    would cast: the copies, and what they are copies of."""
    twin = copy.deepcopy(model)
    casts, sources = [], []
    for mine, its in zip(twin.modules(), model.modules(), strict=True):
        for name, parameter in its.named_parameters(recurse=False):
            shared = parameter
            if narrow and isinstance(its, _NARROWED):
                shared = nn.Parameter(parameter.detach().to(torch.bfloat16))
                casts.append(shared.detach())
                sources.append(parameter.detach())
            mine.register_parameter(name, shared)
    return twin, casts, sources


@contextmanager
def _fast_and_repeatable() -> Iterator[None]:
    """Let cuDNN measure which of its deterministic algorithms is the fastest: the others gain next to nothing."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark = cudnn.deterministic = True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before
