"""What a user is meant to read, and what the shell is told."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""The exit status of a run that Ctrl-C or a polite kill has ended."""


class LabError(Exception):
    """Something the user can put right; its message is one line that says what and how."""


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """A polite kill ends a run as Ctrl-C does: with what there is, readable."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
