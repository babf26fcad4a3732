"""Who meets whom: links among virtual and real workers, and the ways to bring elements from all to all."""

from gradsieve.exchange.gather import Gather
from gradsieve.exchange.owner import Owner
from gradsieve.exchange.plan import Plan
from gradsieve.exchange.reduce import Reduce
from gradsieve.types import Exchange, Link

EXCHANGES = ("auto", "allgather", "allreduce", "owner", "dense")


def strategy(name: str, plan: Plan, link: Link) -> Exchange:
    """The exchange behind a name; ``auto`` gathers, and goes dense where that is cheaper."""
    if name == "allreduce":
        return Reduce(plan, link)
    if name == "owner":
        return Owner(plan, link)
    return Gather(plan, link)
