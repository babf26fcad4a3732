"""Rules from text: ``topk:0.001``, ``threshold:0.005``, ``accordion:0.001,0.1,interval=100``."""

from dataclasses import fields

from gradsieve.compressors.accordion import Accordion
from gradsieve.compressors.blockrandomk import BlockRandomK
from gradsieve.compressors.dense import Dense
from gradsieve.compressors.gaussiank import GaussianK
from gradsieve.compressors.randomk import RandomK
from gradsieve.compressors.sampledtopk import SampledTopK
from gradsieve.compressors.threshold import HardThreshold
from gradsieve.compressors.topk import TopK
from gradsieve.types import Rule

RULES: dict[str, type[Rule]] = {
    "dense": Dense,
    "threshold": HardThreshold,
    "topk": TopK,
    "randomk": RandomK,
    "blockrandomk": BlockRandomK,
    "gaussiank": GaussianK,
    "sampledtopk": SampledTopK,
    "accordion": Accordion,
}


def parse(text: str) -> Rule:
    """The rule that a text names: a name, a colon, then values in order or as ``name=value``, with commas.

    >>> parse("topk:0.001")
    TopK(density=0.001)
    >>> parse("accordion:0.001,0.1,interval=100")
    Accordion(low=0.001, high=0.1, interval=100, change=0.5)
    >>> parse("topk:much")
    Traceback (most recent call last):
    ValueError: rule 'topk:much': density takes a number, not 'much'
    """
    if not isinstance(text, str):
        raise TypeError(f"a rule is a text such as 'topk:0.001', not {text!r}")
    name, _, rest = text.strip().partition(":")
    if name not in RULES:
        raise ValueError(f"rule {text!r} is not known; rules are {', '.join(forms())}")
    rule = RULES[name]
    options = {field.name: field.type for field in fields(rule)}  # type: ignore[arg-type]
    positional = iter(options)
    values: dict[str, float | int] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, given, value = part.rpartition("=")
        key = key.strip() if given else next(positional, "")
        if key not in options or key in values:
            raise ValueError(f"rule {text!r} has a value too many or a wrong name: {part!r}; it is {_form(name)}")
        values[key] = _number(text, key, value.strip(), whole=options[key] is int)
    try:
        return rule(**values)
    except TypeError as missing:
        raise ValueError(f"rule {text!r} lacks a value; it is {_form(name)}") from missing
    except ValueError as wrong:
        raise ValueError(f"rule {text!r}: {wrong}") from wrong


def forms() -> list[str]:
    """The accepted text forms, for messages and help."""
    return [_form(name) for name in RULES]


def _form(name: str) -> str:
    options = [field.name.upper() for field in fields(RULES[name])]  # type: ignore[arg-type]
    return f"{name}:{','.join(options)}" if options else name


def _number(text: str, key: str, value: str, whole: bool) -> float | int:
    try:
        return int(value) if whole else float(value)
    except ValueError as wrong:
        takes = "a whole number" if whole else "a number"
        raise ValueError(f"rule {text!r}: {key} takes {takes}, not {value!r}") from wrong
