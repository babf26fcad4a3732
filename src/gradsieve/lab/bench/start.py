"""Start the ranks of a benchmark, on test hosts joined by shaped links or on this machine, and read rank 0's result."""

import json
import re
import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from subprocess import TimeoutExpired
from typing import Any

from gradsieve.lab.bench.hosts import NET, hosts, start, why_not
from gradsieve.lab.errors import LabError

LOOPBACK = "loopback"


def run_ranks(module: str, job: dict[str, Any], workers: int, link: str, *, limit: float) -> Any:
    """Run ``python -m module JOB`` on every rank; what rank 0 printed last, as JSON.

    ``link`` is ``loopback``, or ``unshaped``, ``1gbit``, ``100mbit`` ... between hosts of their own.
    """
    shaped = link != LOOPBACK
    with hosts(workers, None if link == "unshaped" else link) if shaped else nullcontext([None] * workers) as names:
        environment = {
            "WORLD_SIZE": str(workers),
            "MASTER_ADDR": f"{NET}.1" if shaped else "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",  # ranks are CPUs; PowerSGD waits for a GPU wherever it sees one
            # peers make large temporaries: keep their pages, so that page faults are not what is compared
            "MALLOC_MMAP_THRESHOLD_": "4294967295",
            "MALLOC_TRIM_THRESHOLD_": "8589934592",
        } | ({"GLOO_SOCKET_IFNAME": "eth0"} if shaped else {})
        command = [sys.executable, "-W", "ignore", "-m", module, json.dumps(job)]
        ranks = [start(name, command, {**environment, "RANK": str(i)}) for i, name in enumerate(names)]
        try:
            outputs = [rank.communicate(timeout=limit) for rank in ranks]
        except TimeoutExpired as error:
            raise LabError(f"the ranks took longer than {limit:.0f} s over {link}") from error
        finally:
            for rank in ranks:
                rank.kill()
    failed = [error for rank, (_, error) in zip(ranks, outputs, strict=True) if rank.returncode]
    if failed:
        raise LabError(f"a rank failed over {link}: {_cause(failed)}")
    return json.loads(outputs[0][0].splitlines()[-1])


def _cause(failed: list[str]) -> str:
    """The line that names an error, of the first rank that has one: others only lost their neighbour."""
    lines = [line for error in failed for line in error.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"(\[rank\d+\]:\s*)?[\w.]*(Error|Exception)\b", line)]
    return (named or lines or ["it said nothing"])[0 if named else -1].strip()


def _free_port() -> int:
    """Two benchmarks may run at a time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def links(wanted: Sequence[str]) -> tuple[list[str], str | None]:
    """The links that can be measured here, and why not others."""
    for link in wanted:
        if not re.fullmatch(r"loopback|unshaped|\d+(\.\d+)?[mg]bit", link):
            raise LabError(f"link takes loopback, unshaped, or a rate such as 100mbit or 1gbit, not {link!r}")
    reason = why_not()
    return ([LOOPBACK], reason) if reason else (list(wanted), None)
