"""`python -m benchmarks.generate`."""

from .command import app

app(prog_name="goldsmith bench generate")
