"""What a user is meant to read, and what the shell is told."""

INTERRUPTED = 130
"""The exit status of a run that Ctrl-C or a polite kill has ended."""


class LabError(Exception):
    """Something the user can put right; its message is one line that says what and how."""
