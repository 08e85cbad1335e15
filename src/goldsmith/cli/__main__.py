"""`python -m goldsmith.cli`: the same as the `goldsmith` command."""

from . import current_folder

current_folder.leave()

from . import app  # noqa: E402

app(prog_name="goldsmith")
