"""The laboratory: tasks to train, a runner of rules on them, and a report of what it cost and saved.

Needs the extra ``gradsieve[lab]``. Nothing in the core imports it.
"""
