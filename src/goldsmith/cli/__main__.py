"""`python -m goldsmith.cli`: the same as the `goldsmith` command."""

from .main import app

app(prog_name="goldsmith")
