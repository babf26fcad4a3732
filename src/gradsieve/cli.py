"""The command line: ``gradsieve compare | report | bench | reproduce``.

An error that the user can put right is one line on the error stream and exit status 2.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

try:
    import typer
    from rich.console import Console

    from gradsieve.lab import compare as comparison
    from gradsieve.lab import report as reports
    from gradsieve.lab import tasks
    from gradsieve.lab.bench.command import bench
    from gradsieve.lab.console import Watch, notes, table
    from gradsieve.lab.errors import INTERRUPTED, LabError, ends_on_sigterm
    from gradsieve.lab.processes import processes
    from gradsieve.lab.progress import Bars
    from gradsieve.lab.runner import Options, virtual
    from gradsieve.version import __version__
except ModuleNotFoundError as missing:  # the core alone is installed
    print(f"gradsieve: the command line needs {missing.name}: pip install 'gradsieve[lab]'", file=sys.stderr)
    raise SystemExit(2) from None

app = typer.Typer(
    name="gradsieve",
    help="Train over slow networks: send only the gradient coordinates that matter, and see what it cost and saved.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_COMPARE_HELP = """Train a task with several rules and compare accuracy, bytes and error.

Writes results.jsonl, summary.json, report.html and curves.png into --out.

[bold]Examples[/bold]

  gradsieve compare

  gradsieve compare --rule topk:0.01 --rule threshold:auto --out runs/demo

  gradsieve compare --workers 16 --rule blockrandomk:0.01 --exchange allreduce

  gradsieve compare --launch processes --workers 2 --rule topk:0.01 --epochs 5

  gradsieve compare --task cifar --data-dir DIR --epochs 10 --rule topk:0.001

  gradsieve compare --task cifar-resnet18 --data-dir DIR --device cuda
"""
_REPORT_HELP = """Rebuild report.html, curves.png and summary.json from the results.jsonl of a directory; never trains.

[bold]Example[/bold]

  gradsieve report runs/demo
"""


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False
) -> None:
    if version:
        print(f"gradsieve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("compare", help=_COMPARE_HELP)
def compare(
    task: Annotated[str, typer.Option(help=f"What to train: {', '.join(tasks.names())}.")] = "digits",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="A rule, such as dense, topk:0.01, threshold:0.005; give it again for more. threshold:auto finds "
            "the threshold that spends no more than the first top-k rule, or a density of 1%. "
            "Default: dense, topk:0.01, threshold:auto.",
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Workers.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs; the schedule is compressed to fit.")] = 20,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the weights and of the shuffling.")] = 0,
    out: Annotated[Path, typer.Option(help="Directory for the results; made where missing.")] = Path("runs/compare"),
    name: Annotated[str | None, typer.Option(help="Title of the report. Default: the name of --out.")] = None,
    scope: Annotated[
        Literal["layer", "bucket", "global"], typer.Option(help="The stretch of the gradient that a rule looks at.")
    ] = "layer",
    feedback: Annotated[
        Literal["gradient", "update", "momentum", "none"], typer.Option(help="What happens to what is not sent.")
    ] = "gradient",
    exchange: Annotated[
        Literal["auto", "allgather", "allreduce", "owner", "dense"], typer.Option(help="How workers meet.")
    ] = "auto",
    values: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Precision on the wire; the rest is remembered.")
    ] = "float32",
    strict: Annotated[
        bool,
        typer.Option(help="Exact sizes at every step, or sizes planned from the last step's counts, as in production."),
    ] = True,
    launch: Annotated[
        Literal["virtual", "processes"],
        typer.Option(help="Workers in this process, or as real processes with DDP over gloo."),
    ] = "virtual",
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where virtual workers train; on a GPU as one CUDA graph.")
    ] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the network first: half a minute or more, then faster steps.")
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Examples a worker a step. Default: the task's.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. Default: the task's.")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the data is. Default: the variable GRADSIEVE_DATA.")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Where decoded data is kept. Default: ~/.cache/gradsieve.")
    ] = None,
) -> int:
    rules = rule or ["dense", "topk:0.01", comparison.AUTO]
    comparison.entries(rules)  # a wrong rule is said before the data is loaded
    if launch == "processes" and device != "cpu":
        raise LabError("--launch processes trains on the CPU: leave out --device")
    options = Options(
        workers, epochs, seed, batch_size, lr, scope, feedback, exchange, values, strict, device, compiled
    )
    chosen = tasks.get(task, data_dir=data_dir, cache_dir=cache_dir)
    with ends_on_sigterm(), Bars(rules) as bars:
        launcher = processes(data_dir, cache_dir) if launch == "processes" else virtual
        outcome = comparison.compare(
            chosen, rules, options, out, Watch(bars, epochs), title=name or out.name, launcher=launcher
        )
    console = Console(soft_wrap=True)
    if outcome.runs:
        Console().print(table(outcome.runs))
        for note in notes(outcome.runs):
            console.print(note, markup=False, highlight=False)
    if outcome.interrupted:
        kept = f"; gradsieve report {out} shows what was finished" if outcome.runs else " before the first step"
        print(f"gradsieve: interrupted{kept}", file=sys.stderr)
        return INTERRUPTED
    console.print(f"report: {out / 'report.html'}", markup=False, highlight=False)
    return 0


@app.command("report", help=_REPORT_HELP)
def report(directory: Annotated[Path, typer.Argument(help="A directory that holds results.jsonl.")]) -> int:
    reports.build(directory)
    print(directory / "report.html")
    return 0


_REPRODUCE_HELP = """Run a figure or a table of a paper and set the paper's numbers beside ours.

Writes results.csv, the figure as PNG and SVG, and summary.json into --out. A stopped run goes on with --resume.

[bold]Examples[/bold]

  gradsieve reproduce --list

  gradsieve reproduce sahu2021/fig7 --data-dir DIR --out runs/fig7

  gradsieve reproduce sahu2021/fig6 --data-dir DIR --jobs 4

  gradsieve reproduce all --quick --data-dir DIR
"""


@app.command("reproduce", help=_REPRODUCE_HELP)
def reproduce(
    entry: Annotated[str | None, typer.Argument(help="An entry of --list, or all.")] = None,
    show: Annotated[bool, typer.Option("--list", help="Show what can be run.")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data is. Default: GRADSIEVE_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the results. Default: runs/papers/ENTRY.")] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, max=1000, help="Repetitions. Default: the entry's.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs, for entries that have them.")] = None,
    quick: Annotated[bool, typer.Option(help="A small scale: shows that it works, compares with nothing.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on where a stopped run left --out and --trainings.")] = False,
    trainings: Annotated[
        Path | None,
        typer.Option(
            help="Where trainings are kept, for all entries. Default: OUT/trainings, or runs/papers/trainings."
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1,
            max=256,
            help="Trainings side by side, each in a process with its share of the threads; on a CPU a result depends "
            "on their number, as sums of rounded figures do.",
        ),
    ] = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="With --device cuda: compile networks first.")] = False,
) -> int:
    from gradsieve.lab.papers import command

    options = command.Options(data_dir, out, device, seeds, epochs, quick, resume, trainings, jobs, compiled)
    with ends_on_sigterm():
        return command.listing() if show else command.reproduce(entry, options)


app.add_typer(bench, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    try:
        return int(app(args=arguments, prog_name="gradsieve", standalone_mode=False) or 0)
    except typer.TyperException as error:
        message = error.format_message()
        if message.startswith("No such command"):
            message += f" Commands are {', '.join(_commands_of(error))}."
    except LabError as error:
        message = str(error)
    except (KeyboardInterrupt, typer.Abort):
        print("gradsieve: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    if message:  # a group without a command has shown its help
        print("gradsieve: " + " ".join(message.split()), file=sys.stderr)
    return 2


def _commands_of(error: Exception) -> list[str]:
    """Of the group in which the error was made."""
    context = getattr(error, "ctx", None)
    return context.command.list_commands(context) if context is not None else []


if __name__ == "__main__":
    sys.exit(main())
