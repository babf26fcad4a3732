"""Options as a user writes them, checked before anything runs."""

import torch

from gradsieve.compressors import BlockRandomK, RandomK
from gradsieve.exchange import EXCHANGES
from gradsieve.feedback import Momentum, feedback_of
from gradsieve.layout import check_scope
from gradsieve.step import Options
from gradsieve.types import Rule

VALUES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def options_of(
    compressor: Rule, scope: object, feedback: object, exchange: object, values: object, strict: object = False
) -> Options:
    """The options of a run, or an error that names the argument and what it takes."""
    if isinstance(compressor, type) or not callable(compressor) or not hasattr(compressor, "slots"):
        raise TypeError(f"compressor takes a rule such as gradsieve.TopK(0.001), not {compressor!r}")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange takes one of {', '.join(EXCHANGES)}, not {exchange!r}")
    if values not in tuple(VALUES):
        raise ValueError(f"values takes one of {', '.join(VALUES)}, not {values!r}")
    if not isinstance(strict, bool):
        raise TypeError(f"strict takes True or False, not {strict!r}")
    memory = feedback_of(feedback)
    if exchange == "allreduce" and not isinstance(compressor, RandomK | BlockRandomK):
        raise ValueError(
            f'exchange="allreduce" adds values up on the way, so all workers must choose the same coordinates: '
            f"it takes RandomK or BlockRandomK, not {compressor!r}"
        )
    if exchange == "allreduce" and values != "float32":
        raise ValueError(
            f'exchange="allreduce" adds values up on the way, and a sum of {values} loses what no memory sees: '
            'it takes values="float32"; exchange="allgather" takes any'
        )
    if isinstance(memory, Momentum) and memory.warmup and not hasattr(compressor, "density"):
        raise ValueError(f"warmup lowers a density step by step: it takes a rule that has one, not {compressor!r}")
    return Options(compressor, check_scope(scope), memory, str(exchange), VALUES[str(values)], strict)
