"""`python -m goldsmith`: the same as the `goldsmith` command."""

from .cli import app

app(prog_name="goldsmith")
