"""One training that a figure is made of, and the name under which its result is kept."""

import hashlib
import json
import re
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Arm:
    """One training. Sizes are planned unless ``strict``: on a GPU exact ones make every step wait for the host."""

    task: str
    rule: str
    epochs: int
    seed: int = 0
    workers: int = 8
    scope: str = "layer"
    feedback: str = "gradient"
    exchange: str = "auto"
    batch_size: int | None = None
    lr: float | None = None
    momentum: float | None = None
    values: str = "float32"
    strict: bool = False

    @property
    def title(self) -> str:
        """What it is, in words.

        >>> Arm("digits", "topk:0.01", 3, feedback="none").title
        'digits, topk:0.01, feedback=none, epochs=3, seed=0'
        """
        named = {name: value for name, value in self.chosen().items() if name not in ("task", "rule", "epochs", "seed")}
        parts = [f"{name}={value}" for name, value in named.items()]
        return ", ".join([self.task, self.rule, *parts, f"epochs={self.epochs}", f"seed={self.seed}"])

    def chosen(self) -> dict[str, object]:
        """What is not left at its default: a new field does not rename the trainings of before."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }

    def folder(self, **about: object) -> str:
        """A name that can be read, and is another one for whatever else decides the result.

        >>> Arm("digits", "topk:0.01", 3).folder(device="cpu")
        'digits-topk-0.01-epochs-3-seed-0-0bcb6dc4'
        """
        decides = json.dumps({**self.chosen(), **about}, sort_keys=True)
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.title)
        return f"{readable}-{hashlib.sha256(decides.encode()).hexdigest()[:8]}"
