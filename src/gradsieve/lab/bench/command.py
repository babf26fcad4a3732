"""``gradsieve bench``: its options. What they start is loaded when it is asked for."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradsieve.lab import tasks
from gradsieve.lab.errors import ends_on_sigterm

_FORMATS = (".png", ".svg", ".pdf")


def _picture(path: Path | None) -> Path | None:
    """Said before anything is measured."""
    if path is not None and path.suffix not in _FORMATS:
        raise typer.BadParameter(f"takes a name that ends in {', '.join(_FORMATS)}, not {path.name}")
    return path


bench = typer.Typer(help="Measure: what an op, a step, a link costs here.", no_args_is_help=True)


@bench.command(
    "ops", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def bench_ops(context: typer.Context) -> int:
    """Every op against the floor that memory sets, e.add_(g), and against what peers do."""
    from gradsieve.lab.bench import ops

    ops.main(context.args)
    return 0


_STEP_HELP = """One DDP step under every way to exchange gradients, over links of several speeds.

The model has ResNet-18's shapes. Links join network namespaces of this machine and are shaped (needs root and \
iproute2); where that cannot be had, loopback is measured. All ways run in random order, again and again.

[bold]Examples[/bold]

  gradsieve bench step --workers 2 --link 100mbit

  gradsieve bench step --workers 4 --link 1gbit --way dense --way topk:0.001
"""


@bench.command("step", help=_STEP_HELP)
def bench_step(
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="How many ranks; give it again for more. Default: 2.")
    ] = None,
    link: Annotated[
        list[str] | None,
        typer.Option(help="unshaped, 1gbit, 100mbit, ...; or loopback. Default: unshaped, 1gbit, 100mbit, 10mbit."),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="dense, 'fp16 hook', 'PowerSGD rank 1', a rule, 'topk:0.001 float32 strict' ... "
            "Default: PyTorch's ways and six rules."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=2, help="How often each way gets its turn.")] = 8,
    bucket_view: Annotated[
        bool, typer.Option("--bucket-view", help="All ways under DDP's gradient_as_bucket_view=True.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("benchmarks/results/step.jsonl"),
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw all newest rows of --out.", callback=_picture)
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Where to write them as tables, with each phase's part.")
    ] = None,
) -> int:
    from gradsieve.lab.bench import network
    from gradsieve.lab.bench.step import OURS
    from gradsieve.lab.bench.ways import PEERS

    console = Console()
    ways = way or [*PEERS, *OURS]

    def tell(text: str) -> None:
        console.print(text, style="dim")

    with ends_on_sigterm():
        rows = network.run(
            workers or [2], link or network.LINKS, out, tell, ways=ways, rounds=rounds, bucket_view=bucket_view
        )
    for shown in network.tables(rows):
        console.print(shown)
    if plot is not None:
        network.plot(network.read(out), plot)
        print(plot)
    if markdown is not None:
        newest = network.read(out)
        markdown.write_text(network.markdown(newest) + "\n" + network.profile(newest), encoding="utf-8")
        print(markdown)
    return 0


_ACCURACY_HELP = """Seconds of training until an accuracy is reached over a slow link, for several ways to exchange.

Ours run first; another way is given up after --patience times our best, since then the ratio is told.

[bold]Examples[/bold]

  gradsieve bench accuracy --task digits-wide --link 100mbit --target 0.95

  gradsieve bench accuracy --task cifar-wide --data-dir DIR --target 0.4
"""


@bench.command("accuracy", help=_ACCURACY_HELP)
def bench_accuracy(
    task: Annotated[
        str,
        typer.Option(help="What to train: digits-wide, cifar-wide, or another task with labels."),
    ] = "digits-wide",
    workers: Annotated[int, typer.Option(min=1, help="How many ranks.")] = 2,
    link: Annotated[
        list[str] | None, typer.Option(help="unshaped, 1gbit, 100mbit, ...; or loopback. Default: 100mbit.")
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="dense, 'PowerSGD rank 1', a rule ... Default: dense, PowerSGD and two rules."),
    ] = None,
    target: Annotated[float, typer.Option(min=0.0, max=1.0, help="The accuracy to reach.")] = 0.95,
    epochs: Annotated[int, typer.Option(min=1, help="The schedule's length, and the most that is trained.")] = 20,
    every: Annotated[int, typer.Option(min=1, help="Steps between two evaluations.")] = 10,
    patience: Annotated[float, typer.Option(min=1.0, help="Times our best before another way is given up.")] = 25.0,
    judged_by: Annotated[int | None, typer.Option(min=1, help="Test examples of an evaluation. Default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the shuffling.")] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data is. Default: GRADSIEVE_DATA.")] = None,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("benchmarks/results/accuracy.jsonl"),
    plot: Annotated[
        Path | None, typer.Option(help="Where to draw all newest rows of --out.", callback=_picture)
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Where to write them as a table.")] = None,
) -> int:
    from gradsieve.lab.bench import training

    console = Console()
    tasks.get(task, data_dir=data_dir)  # missing data is said before anything starts
    with ends_on_sigterm():
        rows = training.run(
            task,
            link or ["100mbit"],
            out,
            lambda text: console.print(text, style="dim"),
            workers=workers,
            ways=way or training.WAYS,
            target=target,
            epochs=epochs,
            every=every,
            patience=patience,
            seed=seed,
            data_dir=data_dir,
            judged_by=judged_by,
        )
    console.print(training.table(rows))
    if plot is not None:
        training.plot(training.read(out), plot)
        print(plot)
    if markdown is not None:
        markdown.write_text(training.markdown(training.read(out)) + "\n", encoding="utf-8")
        print(markdown)
    return 0
