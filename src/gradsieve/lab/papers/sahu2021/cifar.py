"""What the CIFAR-10 figures share: the paper's trainings (its Tables 2 and 5)."""

from collections.abc import Sequence

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.sahu2021.methods import Method, exchange_of, shortened, topk_at
from gradsieve.lab.papers.trainings import load, stand_in, trained

RESNET = "cifar-resnet18"
EPOCHS = 300
QUICK_EPOCHS, QUICK_BATCH = 2, 8
SEEDS = 3


def check(context: Context) -> None:
    load(context, stand_in(context, RESNET))


def epochs_of(context: Context) -> int:
    return context.epochs or (QUICK_EPOCHS if context.quick else EPOCHS)


def arms(
    context: Context,
    rule: str,
    *,
    task: str = RESNET,
    scope: str = "layer",
    feedback: str = "gradient",
) -> list[Arm]:
    """One training a seed."""
    name = stand_in(context, task)
    exchange, strict = exchange_of(rule)
    return [
        Arm(
            name,
            rule,
            epochs_of(context),
            seed=seed,
            scope=scope,
            feedback=feedback,
            exchange=exchange,
            strict=strict,
            batch_size=QUICK_BATCH if name == "cifar" else None,
        )
        for seed in range(context.seeds)
    ]


def made(context: Context, group: Sequence[Arm]) -> Method:
    """A method's trainings, from the store where they are there."""
    return Method(tuple(trained(context, group).values()))


def equal_topk(context: Context, rule: str, scope: str = "layer") -> list[Arm]:
    """Top-k at the average density that a rule came to over its own trainings, to three digits.

    What a threshold sends hangs on the length of the schedule, so that the printed k would not compare like with like.
    """
    return arms(context, topk_at(made(context, arms(context, rule)).density), scope=scope)


def reasons(context: Context) -> str:
    """Why an accuracy may not be the paper's: what was trained instead of its 300 epochs on the original images."""
    name, epochs = stand_in(context, RESNET), epochs_of(context)
    task = load(context, name)
    found = [
        "" if name == RESNET else f"{name} instead of the paper's network",
        "JPEG copies of the images" if "JPEG copies" in task.description else "",
        "" if epochs == EPOCHS else shortened(epochs, EPOCHS, task.recipe),
    ]
    return "; ".join(filter(None, found))


def notes(context: Context) -> list[str]:
    return [text] if (text := reasons(context)) else []


def note(context: Context, method: Method) -> str:
    """What was run, for under a figure."""
    about = method.runs[0].about
    return (
        f"{about.description}\n{about.workers} workers x {about.batch_size}, {about.epochs} epochs "
        f"(paper: {EPOCHS}), {method.label}{', a quick run' if context.quick else ''}"
    )
