"""`python -m benchmarks.offload`."""

from .command import app

app(prog_name="python -m benchmarks.offload")
