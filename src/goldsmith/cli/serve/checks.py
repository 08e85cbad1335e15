"""Checks of the arguments of `goldsmith serve`, before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from ..generate.checks import check_model
from ..terminal import Failure

if TYPE_CHECKING:
    from .arguments import ServeArguments

PACKAGES = ("fastapi", "uvicorn", "pydantic", "openai")  # what transformers' server code needs
INSTALL = "pip install fastapi uvicorn openai"


def check(arguments: ServeArguments) -> None:
    """Raise Failure for a missing package, and for arguments that contradict each other."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise Failure(f"goldsmith serve needs the package {missing[0]}, which is not installed here: {INSTALL}")
    check_model(arguments)
    if arguments.profile is not None and arguments.cache != "static":
        raise Failure("--profile is read with --cache static only: give both. `goldsmith generate` writes one.")
    if arguments.context and arguments.total_tokens and arguments.total_tokens < arguments.context:
        raise Failure(
            f"--total-tokens {arguments.total_tokens} is less than --context {arguments.context}: a request of the "
            "whole context could never run."
        )


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def served_names(arguments: ServeArguments, adapters: dict[str, str]) -> dict[str, str | None]:
    """{name in requests: adapter, or None for the model itself}, the model first."""
    path = Path(arguments.model)
    own = arguments.name or (path.resolve().name if path.exists() else arguments.model)
    if own in adapters:
        raise Failure(f"The model and an adapter are both called {own}: give the model another --name.")
    return {own: None, **{name: name for name in adapters}}
