"""Test hosts on one machine: network namespaces on a bridge, with links shaped in both directions.

Needs root and iproute2. The hosts have addresses of 198.18.0.0/24, the range reserved for measuring networks, and no
route out. Up to 300 Mbit/s a token bucket with a 16 kB burst shapes a link, above that htb: a larger burst would let
sparse messages through for free.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from gradsieve.lab.errors import LabError

NET = "198.18.0"


class NoHosts(LabError):
    """Why this machine cannot make test hosts."""


def why_not() -> str | None:
    """None where hosts can be made, else the reason."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@contextmanager
def hosts(count: int, rate: str | None) -> Iterator[list[str]]:
    """``count`` hosts whose links run at ``rate`` (``100mbit``, ``1gbit``, None for as fast as they go)."""
    reason = why_not()
    if reason is not None:
        raise NoHosts(reason)
    own = f"gsv{os.getpid()}"  # two runs at a time have hosts of their own
    switch, names = f"{own}-switch", [f"{own}-host{i}" for i in range(count)]
    try:
        _run(f"ip netns add {switch}")
        _run(f"ip -n {switch} link add br0 type bridge")
        _run(f"ip -n {switch} link set br0 up")
        for i, name in enumerate(names):
            _run(f"ip netns add {name}")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip link add eth0 netns {name} type veth peer name v{i} netns {switch}")
            _run(f"ip -n {name} addr add {NET}.{i + 1}/24 dev eth0")
            _run(f"ip -n {name} link set eth0 up")
            _run(f"ip -n {switch} link set v{i} master br0 up")
            if rate is not None:
                _shape(name, "eth0", rate)
                _shape(switch, f"v{i}", rate)
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def start(host: str | None, command: Sequence[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a command on a host, or on this machine where ``host`` is None."""
    prefix = [] if host is None else ["ip", "netns", "exec", host]
    return subprocess.Popen(
        [*prefix, *command],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def bytes_sent(interface: str) -> int:
    """What an interface of this host has sent so far, by the kernel's own count."""
    with open("/proc/net/dev", encoding="ascii") as counters:
        for line in counters:
            name, _, figures = line.partition(":")
            if name.strip() == interface:
                return int(figures.split()[8])
    return 0


def _shape(host: str, device: str, rate: str) -> None:
    mbit = float(rate.removesuffix("gbit")) * 1000 if rate.endswith("gbit") else float(rate.removesuffix("mbit"))
    if mbit <= 300:
        _run(f"tc -n {host} qdisc add dev {device} root tbf rate {rate} burst 16kb latency 50ms")
    else:
        _run(f"tc -n {host} qdisc add dev {device} root handle 1: htb default 1 r2q 10000")
        _run(f"tc -n {host} class add dev {device} parent 1: classid 1:1 htb rate {rate} quantum 15140")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoHosts(f"{command}: {done.stderr.strip()}")
