"""What is timed against what: every op, the floor that memory sets, and what peers do. Ops are checked first."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsieve.lab.bench.shapes import tensors
from gradsieve.ops import Ops, reference
from gradsieve.types import Pending, Segments

WORKERS = 8  # of a decode
KEY = 20_200_101


@dataclass
class Contender:
    """``run`` is timed, ``prepare`` before it is not; ``check`` says whether the op may report a figure."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], bool] = lambda: True
    against: str = "add"
    payload: int | None = None  # bytes
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    extra: int | None = None


class Bench:
    """The contenders of one size and density on one device; ``layers`` are ResNet-18's, scaled, unless given."""

    def __init__(
        self,
        module: Ops,
        size: int,
        density: float,
        device: torch.device,
        seed: int = 0,
        layers: Segments | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.module, self.size, self.device = module, size, device
        self.grad_Ln = torch.randn(1, size, generator=generator, device=device)
        self.start_Ln = torch.randn(1, size, generator=generator, device=device) * 0.1
        self.memory_Ln = self.start_Ln.clone()
        self.whole, self.layers = Segments((0, size), (0,)), layers or tensors("ResNet-18", size)
        self.k = max(1, round(size * density))
        self.threshold = float((self.start_Ln + self.grad_Ln).abs().flatten().topk(self.k).values[-1])
        self.into = reference.empty(1, size, self.k * 3 // 2 + 16, torch.float32, device)
        self.caches: dict[str, dict[str, Tensor]] = {}

    def restore(self) -> None:
        self.memory_Ln.copy_(self.start_Ln)

    def pending(self, name: str, segments: Segments, memory_Ln: Tensor) -> Pending:
        cache = self.caches.setdefault(name, {})
        return Pending(self.grad_Ln, memory_Ln, segments, into=self.into, cache=cache)

    def op(self, name: str, *arguments: object, segments: Segments | None = None, cold: bool = False) -> Contender:
        segments = segments or self.whole
        label = f"{name} {len(segments.keys)} {cold}"

        def prepare() -> None:
            self.restore()
            if cold:
                self.caches.pop(label, None)

        def run() -> object:
            return getattr(self.module, name)(self.pending(label, segments, self.memory_Ln), *arguments)

        def check() -> bool:
            return agree(name, self.pending(label, segments, self.start_Ln.clone()), self.module, arguments)

        parts = self.into.counts_LB, self.into.offsets_LK, self.into.values_LK
        return Contender(run, prepare, check, payload=sum(part.nbytes for part in parts))

    def layer_wise(self) -> dict[str, Contender]:
        """Rules over many tensors in one call, and the floor."""
        k_S = tuple(max(1, round(n * self.k / self.size)) if n else 0 for n in self.layers.sizes)
        keys_LS = torch.arange(len(k_S), device=self.device)[None] + KEY
        layered = self.op("threshold", self.threshold, segments=self.layers)
        layered.against = "threshold"
        return {
            "add": Contender(lambda: self.memory_Ln.add_(self.grad_Ln), self.restore),
            "threshold": self.op("threshold", self.threshold),
            "threshold layer-wise": layered,
            "topk layer-wise repeated": self.op("topk", k_S, segments=self.layers),
            "gaussiank layer-wise repeated": self.op("gaussiank", k_S, segments=self.layers),
            "sampledk layer-wise repeated": self.op("sampledk", k_S, 100, 7, segments=self.layers),
            "randomk layer-wise": self.op("randomk", k_S, keys_LS, segments=self.layers),
        }

    def contenders(self) -> dict[str, Contender]:
        layered = self.layer_wise()
        span = torch.arange(self.size // 3, self.size // 3 + self.k, device=self.device)[None]
        keys_LS = torch.tensor([[KEY]], device=self.device)
        return {
            "add": layered["add"],
            "peer threshold": Contender(self.plain_threshold, self.restore),
            "peer topk": Contender(self.plain_topk, self.restore),
            "threshold": layered["threshold"],
            "threshold layer-wise": layered["threshold layer-wise"],
            "topk cold": self.op("topk", (self.k,), cold=True),
            "topk repeated": self.op("topk", (self.k,)),
            "topk layer-wise repeated": layered["topk layer-wise repeated"],
            "gaussiank repeated": self.op("gaussiank", (self.k,)),
            "sampledk repeated": self.op("sampledk", (self.k,), 100, 7),
            "gaussiank cold": self.op("gaussiank", (self.k,), cold=True),
            "sampledk cold": self.op("sampledk", (self.k,), 100, 7, cold=True),
            "randomk": self.op("randomk", (self.k,), keys_LS),
            "blockrandomk": self.op("take", span),
            **self.decoding(),
        }

    def plain_threshold(self) -> Tensor:
        """What peers do: accumulate, mask, nonzero, gather, zero."""
        memory_n = self.memory_Ln[0].add_(self.grad_Ln[0])
        index_K = (memory_n.abs() >= self.threshold).nonzero().squeeze(1)
        values_K = memory_n[index_K]
        memory_n[index_K] = 0.0
        return values_K

    def plain_topk(self) -> Tensor:
        memory_n = self.memory_Ln[0].add_(self.grad_Ln[0])
        index_K = memory_n.abs().topk(self.k, sorted=False).indices
        values_K = memory_n[index_K]
        memory_n[index_K] = 0.0
        return values_K

    def decoding(self) -> dict[str, Contender]:
        """Decode of 8 workers against zeroing the output."""
        out_n, expected_n = torch.empty(self.size, device=self.device), torch.empty(self.size, device=self.device)
        rows = [torch.randperm(self.size, device=self.device)[: self.k].sort().values for _ in range(WORKERS)]
        sparse = reference.empty(WORKERS, self.size, self.k, torch.float32, self.device)
        for worker, index_K in enumerate(rows):
            sparse.counts_LB[worker] = torch.bincount(index_K // 65_536, minlength=sparse.counts_LB.shape[1])
            sparse.offsets_LK[worker] = reference.to_int16(index_K % 65_536)
        sparse.values_LK.normal_()

        def check() -> bool:
            self.module.decode(sparse, out_n, float(WORKERS))
            return torch.equal(out_n, reference.decode(sparse, expected_n, float(WORKERS)))

        def run() -> Tensor:
            return self.module.decode(sparse, out_n, float(WORKERS))

        return {"zero": Contender(out_n.zero_), "decode 8": Contender(run, check=check, against="zero")}


def agree(name: str, pending: Pending, module: Ops, arguments: tuple[object, ...]) -> bool:
    """Whether the op does what ``reference`` does: to the bit, or in mass and count for estimated thresholds."""
    before_Ln = pending.memory_Ln.clone()
    sent = getattr(module, name)(pending, *arguments)
    ours_Ln = pending.memory_Ln.clone()
    module.give_back(pending.memory_Ln, sent)
    conserved = torch.equal(pending.memory_Ln, before_Ln + pending.grad_Ln)
    oracle = Pending(pending.grad_Ln, before_Ln, pending.segments)
    expected = getattr(reference, name)(oracle, *arguments)
    count = int(expected.counts_LB.sum())
    if name in ("gaussiank", "sampledk"):
        return conserved and abs(int(sent.counts_LB.sum()) - count) <= 1e-3 * count + 1
    same_values = torch.equal(sent.values_LK[:, :count], expected.values_LK)
    same_memory = torch.equal(ours_Ln, oracle.memory_Ln)
    return conserved and same_values and same_memory and torch.equal(sent.counts_LB, expected.counts_LB)
