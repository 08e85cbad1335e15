"""What a machine must have before whole layers or models can be timed on it."""

from __future__ import annotations

from goldsmith.cli.terminal import Failure
from goldsmith.core import native
from goldsmith.core.device import machine


def refuse_interpreter() -> None:
    if machine().interpreter:
        raise Failure("TRITON_INTERPRET is set: times of Triton's interpreter mean nothing. Unset it for bench.")


def require(command: str) -> None:
    """Raise Failure in Triton's interpreter, and without the native library or transformers."""
    refuse_interpreter()
    if native.reason() is not None:
        raise Failure(f"{command} needs the native library: {native.reason()}.")
    try:
        import peft  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise Failure(f"{command} needs transformers: {error}. pip install 'transformers>=5' peft") from None
