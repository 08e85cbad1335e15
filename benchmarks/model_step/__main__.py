"""`python -m benchmarks.model_step`."""

from .command import app

app(prog_name="python -m benchmarks.model_step")
