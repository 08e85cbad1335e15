"""`python -m goldsmith` without the current folder on the path; imports nothing, because it could come from there."""

import os
import sys


def leave() -> None:
    """Removes the entry that `python -m` puts before all others: the current folder may hold candidates.

    The commands that take modules of the user's own add it where they import them.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
