"""Table 6: ACCORDION against the threshold 1 / (2 sqrt k_min) and both its top-k, three networks on CIFAR-10."""

import math
import statistics

from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import cifar
from gradsieve.lab.papers.sahu2021.cifar import arms, made
from gradsieve.lab.papers.sahu2021.figures2and11 import densities
from gradsieve.lab.papers.sahu2021.methods import Method, Stages, data_of, epoch_results, make_all, ratio, waited
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.papers.trainings import load, stand_in
from gradsieve.theory import threshold_from_k

LOW, HIGH = 0.001, 0.01
INTERVAL = 10 / 300
"""Between two looks at the gradient's norm, of the training: ACCORDION's 10 of 300 epochs, shorter in a short one."""

NETWORKS = {"resnet18": "ResNet-18", "googlenet": "GoogLeNet", "senet18": "SENet18"}
METHODS = {"high": "top-k 1%", "low": "top-k 0.1%", "accordion": "ACCORDION", "threshold": "hard threshold"}
COLOURS = {
    "high": plots.COLOURS[5],
    "low": plots.COLOURS[1],
    "accordion": plots.COLOURS[2],
    "threshold": plots.COLOURS[0],
}
KEY = "sahu2021/table6"


def stages(context: Context) -> Stages:
    yield [arm for network in NETWORKS for method in METHODS for arm in _arms(context, network, method)]


def run(context: Context) -> Outcome:
    make_all(context, stages(context))
    found = {
        network: {method: made(context, _arms(context, network, method)) for method in METHODS} for network in NETWORKS
    }
    rows = Comparison(KEY)
    why = cifar.reasons(context)
    rows.against("parameters", found["resnet18"]["high"].runs[0].about.parameters)
    for network, methods in found.items():
        rows.against(f"{network}_lambda", _threshold(context, network))
        for name, method in methods.items():
            spread = f"{method.label}, the paper has 6"
            if len(method.runs) > 1:
                spread = f"standard deviation {method.deviation:.2f}, {spread}"
            rows.against(f"{network}_{name}_accuracy", method.accuracy, "; ".join(filter(None, [spread, why])))
            rows.against(f"{network}_{name}_density", method.density, why)
    for network, methods in found.items():
        _compare(rows, NETWORKS[network], methods["threshold"], methods["accordion"])
    less = [ratio(methods["accordion"].density, methods["threshold"].density) for methods in found.values()]
    rows.against("less", statistics.fmean(less), why)
    everything = {
        f"{NETWORKS[network]}, {METHODS[name]}": method
        for network, methods in found.items()
        for name, method in methods.items()
    }
    waited(rows, everything.values())
    first = found["resnet18"]["high"]
    note, data = (text.replace("ResNet-18", "three networks") for text in (cifar.note(context, first), data_of(first)))
    return Outcome(draw(found, rows, note), rows.rows, epoch_results(everything), data, cifar.notes(context))


def _compare(rows: Comparison, network: str, hard: Method, accordion: Method) -> None:
    rows.alone(
        f"{network}: hard threshold less ACCORDION, points of accuracy",
        hard.accuracy - accordion.accuracy,
        "the paper: 0.5 to 0.8 above in all three",
    )
    rows.alone(
        f"{network}: bytes sent, ACCORDION over hard threshold",
        ratio(accordion.bytes, hard.bytes),
        "with headers and padding; the paper counts elements",
    )


def _arms(context: Context, network: str, method: str) -> list[Arm]:
    return arms(context, _rule(context, network, method), task=f"cifar-{network}")


def _rule(context: Context, network: str, method: str) -> str:
    if method == "accordion":
        return f"accordion:{LOW},{HIGH},interval={_interval(context, f'cifar-{network}')}"
    if method == "threshold":
        return f"threshold:{_threshold(context, network)}"
    return f"topk:{HIGH if method == 'high' else LOW}"


def _interval(context: Context, name: str) -> int:
    """In steps, a whole number of epochs."""
    task = load(context, stand_in(context, name))
    (arm, *_) = arms(context, "dense", task=name)
    steps_per_epoch = task.steps_per_epoch(arm.workers, arm.batch_size or task.recipe.batch_size)
    return max(1, round(INTERVAL * arm.epochs)) * steps_per_epoch


def _threshold(context: Context, network: str) -> float:
    """1 / (2 sqrt k_min), to the three digits that the paper prints."""
    model = load(context, stand_in(context, f"cifar-{network}")).model(0)
    k = math.floor(LOW * sum(parameter.numel() for parameter in model.parameters()))
    return float(f"{threshold_from_k(k):.3g}")


def draw(found: dict[str, dict[str, Method]], rows: Comparison, note: str) -> Figure:
    """Each network's methods as points, ours filled and the paper's hollow."""
    with plots.style():
        figure, axes = plots.panels(len(found), note)
        for part, (network, methods) in zip(axes, found.items(), strict=True):
            shown = []
            for name, method in methods.items():
                colour = COLOURS[name]
                theirs = [rows.value(f"{network}_{name}_{what}") for what in ("density", "accuracy")]
                part.errorbar(
                    [method.density],
                    [method.accuracy],
                    [method.deviation],
                    marker="o",
                    linestyle="none",
                    capsize=3,
                    color=colour,
                    label=METHODS[name],
                )
                part.plot([theirs[0]], [theirs[1]], "o", color=colour, fillstyle="none")
                shown += [method.density, theirs[0]]
            part.plot([], [], "o", color=plots.BASELINE, fillstyle="none", label="the same in the paper")
            (trained,) = {run.about.task for method in methods.values() for run in method.runs}
            own = trained == f"cifar-{network}"
            title = NETWORKS[network] if own else f"{trained} in place of {NETWORKS[network]}"
            part.set(title=title, xlabel="average density (%)", ylabel="test accuracy (%)")
            densities(part, shown)
        return plots.finish(figure, axes)
