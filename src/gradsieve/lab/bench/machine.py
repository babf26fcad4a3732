"""What a row says about where it was measured."""

import os
import platform
from pathlib import Path

import torch


def machine(device: str = "cpu") -> str:
    """The name of what computed: the GPU, or the CPU with its widest vectors and its cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
