"""`python -m goldsmith.cli`: the same as the `goldsmith` command."""

from . import app

app(prog_name="goldsmith")
