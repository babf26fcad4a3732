"""Simulated training of CIFAR-10 on a GPU: seconds an epoch, and the share of it that a rule takes.

``python benchmarks/cifar.py --data-dir DIR --epochs 8 --rule dense --rule threshold:0.0072 --rule topk:0.001``
"""

import argparse
import json
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.runner import Options, train
from gradsieve.lab.tasks.base import Task, on_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", help="default: cifar-resnet18; give it again for more")
    parser.add_argument("--rule", action="append", help="default: dense, threshold:0.0072, topk:0.001")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=8, help="the first is warm-up")
    parser.add_argument("--strict", action="store_true", help="exact sizes at every step")
    parser.add_argument("--compile", action="store_true", help="compile the networks first")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cifar.jsonl"))
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for name in arguments.task or ["cifar-resnet18"]:
        task = on_device(tasks.get(name, data_dir=arguments.data_dir), arguments.device)
        for rule in arguments.rule or ["dense", "threshold:0.0072", "topk:0.001"]:
            options = Options(
                workers=arguments.workers,
                epochs=arguments.epochs,
                batch_size=arguments.batch_size,
                strict=arguments.strict,
                device=arguments.device,
                compiled=arguments.compile,
            )
            row = about(arguments.device) | {"task": name, "rule": rule} | measure(task, rule, options)
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row["ms_a_step"].items())
            print(
                f"{name:16} {rule:18} {row['seconds_an_epoch']:6.3f} s an epoch ({row['with_evaluation']:.3f} with "
                f"evaluation); ms a step: {parts}; the rule's share {row['share']:.1%}; density {row['density']:.3%}, "
                f"accuracy {row['accuracy']:.1%} after {options.epochs} epochs",
                flush=True,
            )


def measure(task: Task, rule: str, options: Options) -> dict[str, object]:
    """Medians over the epochs after the first: it compiles kernels and captures graphs."""
    per_epoch = task.steps_per_epoch(options.workers, options.recipe(task).batch_size)
    epochs, parts, evaluations = [], [], []
    started = time.perf_counter()
    last: dict[str, float] = {}
    for training in train(task, gs.parse(rule), options):
        if training.step % per_epoch:
            continue
        epochs.append(time.perf_counter() - started)
        spent = {
            "gradients": training.gradient_seconds,
            **(training.device_seconds or training.sieve.stats().total.seconds),
        }
        parts.append({part: spent[part] - last.get(part, 0.0) for part in spent})
        last = spent
        ended = time.perf_counter()
        accuracy = task.evaluate(training.model).accuracy
        started = time.perf_counter()
        evaluations.append(started - ended)
    median = statistics.median(epochs[1:])
    ms_a_step = {part: 1e3 * statistics.median(epoch[part] for epoch in parts[1:]) / per_epoch for part in last}
    ours = sum(ms for part, ms in ms_a_step.items() if part not in ("gradients", "update"))
    return {
        "workers": options.workers,
        "batch_size": options.recipe(task).batch_size,
        "strict": options.strict,
        "compiled": options.compiled,
        "epochs": options.epochs,
        "seconds_an_epoch": median,
        "slowest_epoch": max(epochs[1:]),
        "with_evaluation": median + statistics.median(evaluations[1:]),
        "first_epoch": epochs[0],
        "ms_a_step": ms_a_step,
        "share": ours * per_epoch / 1e3 / median,
        "density": training.sieve.stats().total.density,
        "accuracy": accuracy,
    }


def about(device: str) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    main()
