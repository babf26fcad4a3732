"""Ranks that the lab starts."""

import subprocess
import sys

RANK = """
import os
import torch
from torch.nn.parallel import DistributedDataParallel
import gradsieve as gs
from gradsieve.lab.group import in_group

def threads():
    names = (open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
    return sorted(name.strip() for name in names if "gloo" in name)

@in_group()
def rank():
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    gs.attach(ddp, gs.TopK(0.1))
    ddp(torch.ones(2, 8)).sum().backward()
    assert threads()

rank()
assert not threads(), threads()
"""


def test_no_thread_of_the_group_outlives_a_rank():
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", RANK], env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
