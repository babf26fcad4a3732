"""Sparse data-parallel training in plain PyTorch. Run it again and it resumes.

One machine:    torchrun --nproc-per-node 4 examples/ddp.py
Many machines:  torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/ddp.py
"""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gradsieve as gs


def save(path: Path, rank: int, ddp, optimizer, sieve, epoch: int) -> None:
    """Each rank saves its own memory, rank 0 what all share; ``latest`` names an epoch that all of them have saved."""
    state = {"epoch": epoch, "sieve": sieve.state_dict()}
    if rank == 0:
        state |= {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
    folder = path / f"epoch{epoch}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / f"rank{rank}.pt")
    dist.barrier()
    if rank == 0:
        (path / "latest.tmp").write_text(folder.name)
        os.replace(path / "latest.tmp", path / "latest")
        shutil.rmtree(path / f"epoch{epoch - 1}", ignore_errors=True)


def load(path: Path, rank: int, ddp, optimizer, sieve) -> int:
    """The epoch to go on with."""
    latest = path / "latest"
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, latest.read_text() if latest.exists() else None)
    if len(set(found)) > 1:
        raise SystemExit(f"--checkpoint takes a directory that all machines see; the ranks found {found}")
    if found[0] is None:
        return 0
    shared, own = (torch.load(path / found[0] / f"rank{r}.pt", weights_only=True) for r in (0, rank))
    ddp.module.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    sieve.load_state_dict(own["sieve"])
    return shared["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", default="threshold:0.05", help="dense, topk:0.01, threshold:0.05, ...")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/ddp"))
    arguments = parser.parse_args()

    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each rank its own: NCCL refuses two on one
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    ddp = DistributedDataParallel(model)
    sieve = gs.attach(ddp, gs.parse(arguments.rule))  # the one line
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)

    for epoch in range(load(arguments.checkpoint, rank, ddp, optimizer, sieve), arguments.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(ddp(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(arguments.checkpoint, rank, ddp, optimizer, sieve, epoch + 1)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}; {sieve.stats()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
