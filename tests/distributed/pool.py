"""Real processes for tests: a pool of ranks that stay alive, each test in a process group of its own."""

import datetime
import multiprocessing as mp
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

LIMIT = 60.0


def _serve(pipe: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        job = pipe.recv_bytes()
        if not job:
            return
        function, args, workers, store, timeout = cloudpickle.loads(job)
        torch.manual_seed(0)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, workers),
                rank=rank,
                world_size=workers,
                timeout=datetime.timedelta(seconds=timeout),
            )
            result = (True, function(rank, workers, *args))
        except BaseException as error:
            result = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(cloudpickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()


class RankError(AssertionError):
    """What a rank raised: ``kind`` and ``text`` by rank."""

    def __init__(self, failures: dict[int, tuple[str, str, str]]):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in failures.items()))


class Pool:
    """Ranks 0 to 3, started once; a test that breaks one gets the pool started anew."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Any]] = []

    def __call__(self, workers: int, function: Callable[..., Any], *args: Any, timeout: float = 20.0) -> list[Any]:
        """Run ``function(rank, workers, *args)`` on each rank; their results in rank order, or a ``RankError``."""
        context = mp.get_context("spawn")
        while len(self._ranks) < workers:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, len(self._ranks)), daemon=True)
            process.start()
            self._ranks.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            job = cloudpickle.dumps((function, args, workers, str(Path(folder) / "store"), timeout))
            for _, pipe in self._ranks[:workers]:
                pipe.send_bytes(job)
            deadline = time.monotonic() + LIMIT
            results = []
            for rank, (process, pipe) in enumerate(self._ranks[:workers]):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    alive = process.is_alive()
                    self.close()
                    raise TimeoutError(f"rank {rank} gave no result in {LIMIT} s (alive: {alive})")
                results.append(cloudpickle.loads(pipe.recv_bytes()))
        failures = {rank: result for rank, (good, result) in enumerate(results) if not good}
        if failures:
            raise RankError(failures)
        return [result for _, result in results]

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []
