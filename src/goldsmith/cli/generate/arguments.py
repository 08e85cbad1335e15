"""What a command is given, checked before anything is loaded: what is wrong is said in its options' words."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from ..terminal import Problem


def prompts(given: dict[str, Any]) -> list[str]:
    found = list(given["prompt"] or [])
    name = given["prompt_file"]
    if name is not None:
        try:
            found.append(_stdin() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Problem(f"--prompt-file {name} cannot be read: {reason}.") from error
    for text in given["prompt"] or []:
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # what Python makes of bytes that it cannot read
            raise Problem(f"--prompt {text!r} cannot be read: it is not UTF-8 text.")
    if not found:
        raise Problem("There is nothing to go on from: give --prompt TEXT, or --prompt-file FILE (- is stdin).")
    return found


def _stdin() -> str:
    """Whatever the locale is; a program that stands in for stdin may have text alone."""
    raw = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if raw is None else str(raw.read(), "utf-8")


def check(given: dict[str, Any]) -> None:
    for name in ("top_p", "top_k"):
        if given[name] is not None and given["temperature"] == 0:
            option = "--" + name.replace("_", "-")
            raise Problem(f"{option} is about drawing, and --temperature 0 draws nothing: give --temperature 0.8, say.")
    if given["top_p"] is not None and not 0 < given["top_p"] <= 1:
        raise Problem(f"--top-p is {given['top_p']}, wanted a share above 0 and at most 1.")
    if not math.isfinite(given["temperature"]):
        raise Problem(f"--temperature is {given['temperature']}, wanted a finite number, 0 or more.")
    if not -(2**63) <= given["seed"] < 2**64:
        raise Problem(f"--seed is {given['seed']}, wanted a whole number from -2^63 to 2^64 - 1.")
    written = ["trace"] if given["cache"] == "static" else ["trace", "profile"]
    for name in written:
        if given[name] is not None:
            _check_writable(name, given[name])
    if given["prefill"].isdecimal() and int(given["prefill"]) < 1:
        raise Problem(f"--prefill is {given['prefill']}, wanted a number of at least 1 token, or auto.")
    if given["prefill"] not in ("auto", "cpu", "stream", "split") and not given["prefill"].isdecimal():
        raise Problem(f"--prefill is {given['prefill']}, wanted auto, cpu, stream, split or a number of tokens.")
    if given["cache"] == "static" and given["profile"] is None:
        raise Problem("--cache static keeps the experts that a profile names: give --profile FILE, as a run wrote it.")
    if given["cache"] == "static":
        _check_profile(given["profile"])
    if given["json"] and given["stream"]:
        raise Problem("--json prints one object and nothing else: leave --stream out.")


def _check_writable(option: str, path: Path) -> None:
    """What is written at the end, when the text has been made, is tried at the beginning."""
    why = None
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = f"{'it' if path.exists() else path.parent} may not be written to"
    if why:
        raise Problem(f"--{option} {path} cannot be written: {why}.")


def _check_profile(path: Path) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Problem(f"--profile {path} cannot be read: {error.strerror or error}.") from error
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("counts"), dict):
        raise Problem(
            f"--profile {path} is no profile: give a file that --profile wrote in a run with another --cache."
        )


def stretched(config: Any) -> bool:
    """Whether positions are scaled (YaRN and others), so that there may be more of them than the config says."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ways = [found, *(value for value in found.values() if isinstance(value, dict))]
    return any(way.get("rope_type", way.get("type", "default")) != "default" for way in ways)
