"""The command `goldsmith generate` and the groups of its help."""

from __future__ import annotations

import typer

from .arguments import GenerateArguments
from .command_options import add_command

WHERE = (
    "budget", "format", "dense_format", "compute", "cache", "prefill", "device", "threads", "store", "verify_store",
    "profile",
)  # fmt: skip
GROUPS = {
    "Model and prompts": ("model", "adapter", "prompt", "prompt_file", "chat"),
    "The text": ("max_new_tokens", "temperature", "top_p", "top_k", "seed"),
    "Where experts are and run": WHERE,
    "Output": ("stream", "stats", "trace", "guard", "json"),
}


def register(app: typer.Typer) -> None:
    """Add the command to the program, once."""
    add_command(app, "generate", GenerateArguments, GROUPS, _run)


def _run(arguments: GenerateArguments) -> int:
    from .command import run

    return run(arguments)
