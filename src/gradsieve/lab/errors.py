"""The one exception that a user is meant to read."""


class LabError(Exception):
    """Something the user can put right; its message is one line that says what and how."""
