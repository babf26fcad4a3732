"""Real processes for tests: a pool of ranks that stay alive, each test in a process group of its own."""

import datetime
import faulthandler
import multiprocessing as mp
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

LIMIT = 55.0  # below the limit of a test, so that what the ranks are doing is known when it strikes


def _serve(pipe: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        job = pipe.recv_bytes()
        if not job:
            return
        faulthandler.dump_traceback_later(LIMIT - 5)  # what a rank that hangs is doing, on the error stream
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
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = (True, function(rank, workers, *args))
        except BaseException as error:
            result = (False, (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send_bytes(cloudpickle.dumps(result))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


class RankError(AssertionError):
    """What ranks raised: (type, text, traceback) by rank in ``failures``."""

    def __init__(self, failures: dict[int, tuple[str, str, str]]):
        self.failures = failures
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in failures.items()))


class Pool:
    """Ranks 0 to 3, started once from a process that has torch; a test that breaks one gets the pool started anew."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Any]] = []
        # of all jobs: a FileStore whose folder goes while it is destroyed waits for it, for minutes
        self._folder, self._jobs = Path(tempfile.mkdtemp()), 0
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "gradsieve"])

    def __call__(self, workers: int, function: Callable[..., Any], *args: Any, timeout: float = 20.0) -> list[Any]:
        """Run ``function(rank, workers, *args)`` on each rank; their results in rank order, or a ``RankError``."""
        while len(self._ranks) < workers:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there, len(self._ranks)), daemon=True)
            process.start()
            there.close()  # so that a rank that dies is an end of file here
            self._ranks.append((process, here))
        self._jobs += 1
        job = cloudpickle.dumps((function, args, workers, str(self._folder / str(self._jobs)), timeout))
        for _, pipe in self._ranks[:workers]:
            pipe.send_bytes(job)
        deadline = time.monotonic() + LIMIT
        results = [self._result(rank, deadline) for rank in range(workers)]
        failures = {rank: result for rank, (good, result) in enumerate(results) if not good}
        if failures:
            raise RankError(failures)
        return [result for _, result in results]

    def _result(self, rank: int, deadline: float) -> Any:
        process, pipe = self._ranks[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return cloudpickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(1)
        code = process.exitcode
        self.close()
        raise TimeoutError(f"rank {rank} gave no result in {LIMIT} s" if code is None else f"rank {rank} died: {code}")

    def close(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []
        for store in self._folder.iterdir():
            store.unlink()
