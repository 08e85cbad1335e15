"""`python -m goldsmith`: the same as the `goldsmith` command.

`python -m` puts the current folder before all others on the path. It is removed, because candidates may lie there; the
commands that take modules of the user's own add it when they import them.
"""

import os
import sys

try:
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
except FileNotFoundError:  # there is no current folder any more
    pass

from .cli import app

app(prog_name="goldsmith")
