"""The simulator as its user meets it: many workers, odd shapes, and the same as ranks that run apart."""

import threading

import pytest
import torch
from torch import nn

import gradsieve as gs
from gradsieve.exchange.local import Here
from gradsieve.meter import NullMeter
from gradsieve.options import options_of
from gradsieve.step import Channel

pytestmark = pytest.mark.usefixtures("poison")

RULES = [
    "dense",
    "threshold:1.5",
    "topk:0.05",
    "randomk:0.05",
    "blockrandomk:0.05",
    "gaussiank:0.05",
    "sampledtopk:0.05,sample=0.1",
    "accordion:0.02,0.2,interval=3",
]


@pytest.mark.parametrize("rule", ["threshold:3", "topk:0.001", "randomk:0.001"])
def test_256_workers(rule, generator):
    sim = gs.Simulator(20_000, gs.parse(rule), workers=256)
    grad_Wn = torch.randn(256, 20_000, generator=generator)
    sent_n = sim.step(grad_Wn).double()
    waiting_n = sim.channel.memory.memory_Ln.double().mean(0)
    torch.testing.assert_close(sent_n + waiting_n, grad_Wn.double().mean(0), rtol=0, atol=1e-7)


@pytest.mark.parametrize("exchange", ["auto", "allgather"])
@pytest.mark.parametrize("rule", RULES)
def test_parameters_may_be_empty_or_scalar(rule, exchange):
    for params in ([], 0, [torch.zeros(0), torch.tensor(1.0), torch.zeros(0)]):
        sim = gs.Simulator(params, gs.parse(rule), workers=3, exchange=exchange)
        for _ in range(3):
            assert sim.step(torch.ones(3, sim.layout.size)).shape == (sim.layout.size,)


def test_a_module_trains(generator):
    """A few steps of a linear model: the loss of sparse training falls as that of dense training does."""
    data, target = torch.randn(2, 32, 8, generator=generator)
    losses = {}
    for rule in ("dense", "topk:0.2"):
        model = nn.Linear(8, 8, bias=False)
        nn.init.zeros_(model.weight)
        sim = gs.Simulator(model, gs.parse(rule), workers=2, exchange="allgather")
        for _ in range(150):
            grads = []
            for part in range(2):
                loss = (model(data[part::2]) - target[part::2]).square().mean()
                grads.append(torch.autograd.grad(loss, model.weight)[0].flatten())
            with torch.no_grad():
                model.weight -= 0.5 * sim.step(torch.stack(grads)).view_as(model.weight)
        losses[rule] = (model(data) - target).square().mean().item()
    assert losses["topk:0.2"] == pytest.approx(losses["dense"], rel=0.02)


def test_no_graph_is_kept(generator):
    sim = gs.Simulator(100, gs.TopK(0.1), workers=2, exchange="allgather")
    mean_n = sim.step(torch.randn(2, 100, generator=generator, requires_grad=True))
    assert not mean_n.requires_grad
    assert not sim.channel.memory.memory_Ln.requires_grad


class RankLink:
    """One of W ranks, each in its own thread: what gloo does, without the network."""

    def __init__(self, rank, board, barrier):
        self.workers, self.ranks = len(board), range(rank, rank + 1)
        self.rank, self.board, self.barrier = rank, board, barrier

    def _meet(self, mine):
        self.board[self.rank] = mine
        self.barrier.wait(timeout=30)
        seen = list(self.board)
        self.barrier.wait(timeout=30)
        return seen

    def gather(self, rows_LN, into_WN=None):
        rows_WN = torch.cat(self._meet(rows_LN.clone()))
        return Here(rows_WN if into_WN is None else into_WN.copy_(rows_WN))

    def sum(self, rows_LN):
        total_N = torch.zeros(rows_LN.shape[1])
        for row_LN in self._meet(rows_LN.clone()):
            total_N += row_LN[0]
        return Here(total_N)

    def gather_varying(self, rows, sizes_W):
        return Here(torch.cat(self._meet(rows[0].clone())))

    def counts(self, count_L):
        return torch.cat(self._meet(count_L.clone())).tolist()


@pytest.mark.parametrize("exchange", ["allgather", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_ranks_that_run_apart_agree_with_the_simulator_and_with_each_other(rule, exchange, generator):
    """Bit for bit, regimes of Accordion and planned capacities included."""
    workers, steps = 3, 8
    params = [torch.zeros(300), torch.zeros(100)]
    scale_T = torch.tensor([1.0, 1, 1, 1, 1, 1, 4, 4]).view(-1, 1, 1)
    grads_TWn = torch.randn(steps, workers, 400, generator=generator) * scale_T
    sim = gs.Simulator(params, gs.parse(rule), workers=workers, exchange=exchange)
    expected_Tn = torch.stack([sim.step(grad_Wn) for grad_Wn in grads_TWn])

    board, barrier, results, failures = [None] * workers, threading.Barrier(workers), {}, []
    options = options_of(gs.parse(rule), "layer", "gradient", exchange, "float32")

    def run(rank):
        try:
            link = RankLink(rank, board, barrier)
            channel = Channel(options, sim.layout, link, NullMeter(), torch.device("cpu"), torch.float32)
            means = []
            for step, grad_Wn in enumerate(grads_TWn):
                mean_n = torch.full((400,), torch.nan)
                channel.step(grad_Wn[rank : rank + 1], mean_n, step).wait()
                means.append(mean_n)
            results[rank] = torch.stack(means), channel.state
        except Exception as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    for means_Tn, state in results.values():
        assert torch.equal(means_Tn, expected_Tn)
        for part, tensor in sim.channel.state.items():
            torch.testing.assert_close(state[part], tensor, rtol=0, atol=0, equal_nan=True)


def test_a_tampered_payload_is_refused_and_names_the_rank():
    sim = gs.Simulator(1000, gs.TopK(0.01), workers=3, exchange="allgather")

    class Tampered(type(sim.channel.link)):
        def gather(self, rows_LN, into_WN=None):
            rows_LN[1, 0] ^= 1
            return super().gather(rows_LN, into_WN)

    sim.channel.exchange.link = Tampered(3)
    with pytest.raises(RuntimeError, match="payload of rank 1: magic is"):
        sim.step(torch.randn(3, 1000))


@pytest.mark.parametrize("feedback", ["gradient", "update", "momentum"])
@pytest.mark.parametrize("exchange", ["auto", "owner"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("any_ops")
def test_defaults_of_the_process_change_nothing(rule, exchange, feedback, generator):
    """Somebody's default device is a GPU and somebody's default precision is low; here no tensor takes either."""
    if (rule, exchange) == ("dense", "owner"):
        pytest.skip("a pairing that is refused")
    grads_TWn = torch.randn(8, 3, 500, generator=generator)
    grads_TWn[5, 1, 7] = torch.inf
    runs = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        layers = [torch.zeros(300, device="cpu"), torch.zeros(200, device="cpu")]
        sim = gs.Simulator(layers, gs.parse(rule), workers=3, exchange=exchange, feedback=feedback)
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                means = [sim.step(grads_Wn, lr=0.3 / (t + 1)) for t, grads_Wn in enumerate(grads_TWn)]
                memory = [row for kinds in sim.state_dict()["memory"].values() for row in kinds.values()]
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append([*means, *memory])
    for here, there in zip(*runs, strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0, equal_nan=True)
