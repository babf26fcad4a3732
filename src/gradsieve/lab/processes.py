"""Real workers: one process each, over gloo. ``gradsieve compare --launch processes`` starts them on this machine.

On several machines, start the same line on each:

    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m gradsieve.lab.processes --task digits --rule topk:0.01 --epochs 20
"""

import argparse
import multiprocessing as mp
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.errors import LabError
from gradsieve.lab.group import in_group
from gradsieve.lab.records import EndRow, EpochRow, RunRow, StepRow, read_rows
from gradsieve.lab.runner import Launcher, Options, Training, optimizer_of, rows
from gradsieve.lab.tasks import Task
from gradsieve.lab.tasks.base import Classification
from gradsieve.types import Rule

POLL = 0.05  # seconds between two looks at what rank 0 has written


def processes(data_dir: Path | None, cache_dir: Path | None) -> Launcher:
    """A launcher that starts as many processes as there are workers; each loads the task from these folders."""

    def launch(task: Task, rule: Rule, options: Options, name: str) -> Iterator[StepRow | EpochRow | EndRow]:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "rows.jsonl"
            log.touch()
            failure = Path(folder) / "failure.txt"
            arguments = (task.name, data_dir, cache_dir, rule, options, name, log)
            # torchrun's agent takes the signals of its process, and on SIGTERM ends its ranks: it gets one of its own
            agent = mp.get_context("spawn").Process(target=_start, args=(options.workers, arguments, failure))
            agent.start()
            try:
                seen, over = 0, False
                while not over:
                    over = not agent.is_alive()
                    found = read_rows(log)
                    yield from (row for row in found[seen:] if not isinstance(row, RunRow))
                    seen = len(found)
                    time.sleep(0 if over else POLL)
            finally:
                agent.terminate()
                agent.join()
            if failure.exists():
                raise LabError(failure.read_text())
            if agent.exitcode:
                raise LabError(f"the ranks ended with status {agent.exitcode}")

    launch.__name__ = "processes"
    return launch


def _start(workers: int, arguments: tuple[object, ...], failure: Path) -> None:
    """Run all ranks to their end; the first failure's last line is what the user is told."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=workers,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(config, _rank)(*arguments)
    except SignalException:
        return  # whoever ended this run says so
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        failure.write_text(f"rank {rank} failed: {str(first.message).strip().splitlines()[-1]}")


@in_group()
def _rank(
    task_name: str,
    data_dir: Path | None,
    cache_dir: Path | None,
    rule: Rule,
    options: Options,
    name: str,
    log: Path,
    tell: bool = False,
) -> None:
    """One rank: train, and on rank 0 write down how it goes."""
    task = tasks.get(task_name, data_dir=data_dir, cache_dir=cache_dir)
    trainings = _train(task, rule, options)
    if dist.get_rank() == 0:
        with log.open("a", encoding="utf-8") as file:
            for row in rows(task, options, name, trainings):
                file.write(row.model_dump_json() + "\n")
                file.flush()
                if tell and isinstance(row, EpochRow):
                    sent = f"{row.bytes / 1e6:.2f} MB a worker, density {row.density:.2%}"
                    print(f"epoch {row.epoch}: accuracy {row.accuracy:.2%}, {sent}, {row.seconds:.1f} s", flush=True)
    else:
        for _ in trainings:
            pass


def _train(task: Task, rule: Rule, options: Options) -> Iterator[Training]:
    """What ``runner.train`` does, with this rank's share of each batch and DDP in between."""
    recipe = options.recipe(task)
    steps_per_epoch = task.steps_per_epoch(options.workers, recipe.batch_size)
    model: nn.Module = task.model(options.seed)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(model, recipe)
    sieve = gs.attach(
        ddp,
        rule,
        scope=options.scope,
        feedback=options.feedback,
        exchange=options.exchange,
        values=options.values,
        strict=options.strict,
        optimizer=optimizer,
    )
    training = Training(model, sieve, 0, 0.0, recipe.lr, float("nan"), 0.0)
    rank = dist.get_rank()
    for epoch in range(options.epochs):
        batches = task.batches(epoch, workers=options.workers, batch_size=recipe.batch_size, seed=options.seed)
        for inputs_WB, labels_WB in batches:
            training.lr = recipe.lr_at(training.step / (steps_per_epoch * options.epochs))
            for group in optimizer.param_groups:
                group["lr"] = training.lr
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = functional.cross_entropy(ddp(inputs_WB[rank]), labels_WB[rank], label_smoothing=recipe.smoothing)
            loss.backward()  # type: ignore[no-untyped-call]
            training.gradient_seconds += time.perf_counter() - started
            optimizer.step()
            training.step += 1
            training.epoch = training.step / steps_per_epoch
            training.loss = loss.item()
            yield training


def main() -> None:
    """One rank of a run that torchrun started, on one machine or many; rank 0 tells how each epoch went."""
    try:
        _train_a_rank()
    except (LabError, ValueError) as error:
        raise SystemExit(f"gradsieve: {error}") from None


def _train_a_rank() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits", help="digits, cifar, or another with labels")
    parser.add_argument("--rule", default="topk:0.01", help="dense, topk:0.01, threshold:0.05, ...")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="rank 0 appends its rows here")
    arguments = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("start it with torchrun: it says how many ranks there are")
    options = Options(int(os.environ["WORLD_SIZE"]), arguments.epochs, arguments.seed)
    rule = gs.parse(arguments.rule)
    if not isinstance(tasks.get(arguments.task, data_dir=arguments.data_dir), Classification):
        raise LabError(f"{arguments.task} trains on virtual workers only: choose a --task with labels")
    _rank(arguments.task, arguments.data_dir, None, rule, options, arguments.rule, arguments.log, True)


if __name__ == "__main__":
    main()
