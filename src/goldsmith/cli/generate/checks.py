"""Checks of the arguments of `goldsmith generate`, before anything is loaded."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.json_values import parse_json
from ..terminal import Failure

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .arguments import GenerateArguments, ModelArguments


def adapters(arguments: ModelArguments) -> dict[str, str]:
    """{name: folder} of each --adapter, which is FOLDER or NAME=FOLDER. Raise Failure for a name given twice."""
    folders: dict[str, str] = {}
    for text in arguments.adapter or []:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).exists():
            name, folder = Path(text).resolve().name, text
        if not name or not folder:
            raise Failure(f"--adapter {text!r} is not an adapter: give FOLDER or NAME=FOLDER.")
        if name in folders:
            raise Failure(f"Two adapters are called {name}: give one of them as --adapter OTHER={folder}.")
        folders[name] = folder
    return folders


def prompts(arguments: GenerateArguments) -> list[str]:
    """All prompts, from the command line and the file."""
    texts = list(arguments.prompt or [])
    name = arguments.prompt_file
    if name is not None:
        try:
            texts.append(_stdin() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Failure(f"--prompt-file {name} cannot be read: {reason}.") from error
    for text in arguments.prompt or []:
        if any(
            "\ud800" <= letter <= "\udfff" for letter in text
        ):  # surrogates stand for bytes that Python could not decode
            raise Failure(f"--prompt {text!r} cannot be read: it is not UTF-8 text.")
    if not texts:
        raise Failure("There is no prompt: give --prompt TEXT, or --prompt-file FILE (- means stdin).")
    return texts


def _stdin() -> str:
    """stdin as UTF-8, whatever the locale; a replaced stdin may have no byte buffer."""
    raw = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if raw is None else str(raw.read(), "utf-8")


def check(arguments: GenerateArguments) -> None:
    """Raise Failure for arguments that contradict each other or are out of range."""
    for option, value in (("--top-p", arguments.top_p), ("--top-k", arguments.top_k)):
        if value is not None and arguments.temperature == 0:
            raise Failure(
                f"{option} needs a temperature above 0, such as --temperature 0.8: at 0 no token is drawn at random."
            )
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise Failure(f"--top-p is {arguments.top_p}; expected a share above 0 and at most 1.")
    if not math.isfinite(arguments.temperature):
        raise Failure(f"--temperature is {arguments.temperature}; expected a finite number of at least 0.")
    if not -(2**63) <= arguments.seed < 2**64:
        raise Failure(f"--seed is {arguments.seed}; expected a whole number from -2^63 to 2^64 - 1.")
    if arguments.trace is not None:
        _check_writable("trace", arguments.trace)
    if arguments.profile is not None and arguments.cache != "static":
        _check_writable("profile", arguments.profile)
    check_model(arguments)
    if arguments.json and arguments.stream:
        raise Failure("--json prints one object and nothing else: leave out --stream.")


def check_model(arguments: ModelArguments) -> None:
    """Raise Failure for options of a model that contradict each other or are out of range."""
    if arguments.prefill.isdecimal() and int(arguments.prefill) < 1:
        raise Failure(f"--prefill is {arguments.prefill}; expected at least 1 token, or auto.")
    if arguments.prefill not in ("auto", "cpu", "stream", "split") and not arguments.prefill.isdecimal():
        raise Failure(f"--prefill is {arguments.prefill}; expected auto, cpu, stream, split or a number of tokens.")
    if arguments.cache == "static":
        if arguments.profile is None:
            raise Failure(
                "--cache static keeps the experts that a profile lists: give --profile FILE, written by an earlier run."
            )
        _check_profile(arguments.profile)


def _check_writable(option: str, path: Path) -> None:
    """Raise Failure before the run if a file that is written at its end cannot be written."""
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = f"{'it' if path.exists() else path.parent} is not writable"
    if why:
        raise Failure(f"--{option} {path} cannot be written: {why}.")


def _check_profile(path: Path) -> None:
    try:
        profile = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failure(f"--profile {path} cannot be read: {error.strerror or error}.") from error
    except ValueError:
        profile = None
    if not isinstance(profile, dict) or not isinstance(profile.get("counts"), dict):
        raise Failure(
            f"--profile {path} is not a profile: give a file that --profile wrote in a run without --cache static."
        )


def stretched(config: PreTrainedConfig) -> bool:
    """Whether positions are scaled (YaRN and others), so that prompts may exceed max_position_embeddings."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ways = [scaling, *(value for value in scaling.values() if isinstance(value, dict))]
    return any(way.get("rope_type", way.get("type", "default")) != "default" for way in ways)
