"""`python -m goldsmith`: the same as the `goldsmith` command."""

from .cli import current_folder

current_folder.leave()

from .cli import app  # noqa: E402

app(prog_name="goldsmith")
