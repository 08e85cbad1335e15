"""`goldsmith generate`: from the command line's words to text, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..say import Problem, console, ends_like_ctrl_c
from .show import Shown

WRONG, INTERRUPTED = 1, 130


def run(given: dict[str, Any]) -> int:
    """The whole command; returns the exit status."""
    prompts = _prompts(given)
    _check(given)
    show = Shown(console(stderr=True), stream=given["stream"], as_json=given["json"])
    command = Command(given, prompts, show)
    status = 0
    try:
        with ends_like_ctrl_c(), _no_pipe_is_the_end():
            status = command.carry_out()
    except KeyboardInterrupt:
        show.interrupted(bool(command.made and command.made.tokens))
        status = INTERRUPTED
    finally:
        command.end()
    if given["json"]:
        sys.stdout.write(json.dumps(command.result()) + "\n")
        sys.stdout.flush()
    return status


class Command:
    """One run: the model and its engine, the text, the figures."""

    def __init__(self, given: dict[str, Any], prompts: list[str], show: Shown):
        self.given, self.prompts, self.show = given, prompts, show
        self.held: Any = None
        self.made: Any = None
        self.error: dict[str, Any] | None = None
        self._stats: dict[str, Any] = {}
        self._explain: dict[str, Any] = {}

    def carry_out(self) -> int:
        from torch import OutOfMemoryError

        try:
            from ...hf.offload import text
            from ...hf.offload.load import folder
            from ...offload.attach import from_pretrained
            from ...offload.errors import RoutingError
            from ...offload.report import NumericsError
            from ...offload.settings import parse_budget
        except ImportError as error:
            if error.name is not None:  # of one of ours; goldsmith.hf says in words what is not installed
                raise
            raise Problem(f"{error}.") from error
        _quiet()
        given = self.given
        try:
            parse_budget(given["budget"])
        except ValueError as error:
            raise Problem(
                f"--budget {given['budget']!r} is no amount of memory: give auto, bytes, or 6GiB, 6GB, 500MiB."
            ) from error
        try:
            with self.show.doing("reading the tokenizer"):
                place = folder(given["model"])
                tokenizer = text.tokenizer_of(place)
                inputs = text.encoded(tokenizer, self.prompts, chat=given["chat"])
            with self.show.doing("loading the model") as told:
                rows, width = inputs["input_ids"].shape
                self._check_length(place, width)
                room = {"batch": rows, "max_length": width + given["max_new_tokens"]}
                options = room | self._engine_options()
                self.held = from_pretrained(place, store=given["store"], progress=told, **options)
            if given["verify_store"]:
                self._verify()
            self._say_what_is_not_plain(width)
            self.made = text.Made([])
            with self._trace(), self.show.text(self.prompts) as written:
                text.generate(
                    self.held.model, tokenizer, self.prompts, made=self.made, inputs=inputs, told=written,
                    **{name: given[name] for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")},
                )  # fmt: skip
        except NumericsError as error:
            self.error = error.report.to_dict()
            self.show.failed(str(error))
            return WRONG
        except RoutingError as error:
            self.error = {"error": str(error)}
            self.show.failed(str(error))
            return WRONG
        except (OutOfMemoryError, MemoryError) as error:
            raise Problem(
                "There is too little memory: a smaller --budget, a shorter prompt, fewer prompts or --device cpu takes "
                f"less. What was said: {str(error).partition('. ')[0].removesuffix('.')}."
            ) from error
        except BrokenPipeError:
            raise
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise Problem(f"MODEL {given['model']}: {_sentence(error)}") from error
        return 0

    def end(self) -> None:
        """The figures of what was done, the profile, and the engine closed."""
        if self.held is None:
            return
        with contextlib.suppress(KeyboardInterrupt):
            explained = self.held.explain()
            self._stats, self._explain = self.held.stats().to_dict(), explained.to_dict()
            if self.given["stats"] and self.made is not None:
                self.show.stats(self.made, self._stats, str(explained))
            if self.given["profile"] is not None and self.given["cache"] != "static":
                self._write_profile()
        self.held.close()

    def result(self) -> dict[str, Any]:
        """What --json prints."""
        outputs = [
            {"prompt": o.prompt, "text": o.text, "tokens": o.tokens, "finish_reason": o.finish_reason}
            for o in (self.made.outputs if self.made else [])
        ]
        times = {
            "time_to_first_token": self.made.first_token if self.made else None,
            "tokens_per_s": self.made.tokens_per_s if self.made else None,
        }
        found = {"outputs": outputs, "stats": times | self._stats, "explain": self._explain}
        return found | ({"error": self.error} if self.error else {})

    def _engine_options(self) -> dict[str, Any]:
        given = self.given
        options = {name: given[name] for name in ("device", "cache", "guard", "threads")}
        options |= {"gpu_budget": given["budget"], "cpu_format": given["format"]}
        options["prefill"] = int(given["prefill"]) if given["prefill"].isdecimal() else given["prefill"]
        options["exact"] = given["format"] == "auto"
        if given["cache"] == "static":
            options["profile"] = given["profile"]
        return options

    def _say_what_is_not_plain(self, width: int) -> None:
        store, given = self.held.engine.store, self.given
        if not store.exact:
            self.show.note(
                f"--format {given['format']} rounds the experts' weights (exact=False): the text may differ from the "
                "plain model's."
            )
        most = getattr(self.held.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and width + given["max_new_tokens"] > most:
            tokens = "1 token" if width == 1 else f"{width:,} tokens"
            self.show.note(
                f"A prompt has {tokens}, and with --max-new-tokens {given['max_new_tokens']:,} the text may "
                f"become longer than the {most:,} that the model was made for."
            )

    def _check_length(self, place: Path, width: int) -> None:
        """Before the model is loaded: a prompt that it has no positions for would be hours of noise."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(place).get_text_config()
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and width > most and not _stretched(config):
            raise Problem(
                f"A prompt has {width:,} tokens, and the model was made for at most {most:,} (max_position_embeddings "
                "of its config.json): shorten the prompt."
            )

    def _verify(self) -> None:
        store = self.held.engine.store
        with self.show.doing("checking the store") as told:
            done = 0
            for layer in store.layers:
                store.verify([layer])
                done += store.num_experts(layer) * store.expert_nbytes(layer)
                told(done, store.nbytes, f"checking the store, layer {layer}")

    def _trace(self) -> Any:
        return contextlib.nullcontext() if self.given["trace"] is None else self.held.trace(self.given["trace"])

    def _write_profile(self) -> None:
        path = Path(self.given["profile"])
        try:
            path.write_text(json.dumps(self.held.profile()) + "\n")
        except OSError as error:
            raise Problem(f"--profile {path} could not be written: {error.strerror or error}.") from error


def _prompts(given: dict[str, Any]) -> list[str]:
    found = list(given["prompt"] or [])
    name = given["prompt_file"]
    if name == "-":
        found.append(sys.stdin.read())
    elif name is not None:
        try:
            found.append(Path(name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise Problem(f"--prompt-file {name} cannot be read: {reason}.") from error
    if not found:
        raise Problem("There is nothing to go on from: give --prompt TEXT, or --prompt-file FILE (- is stdin).")
    return found


def _check(given: dict[str, Any]) -> None:
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
    trace = given["trace"]
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        why = "it is a folder" if trace.is_dir() else f"there is no folder {trace.parent}"
        raise Problem(f"--trace {trace} cannot be written: {why}.")
    if given["prefill"] not in ("auto", "cpu", "stream", "split") and not given["prefill"].isdecimal():
        raise Problem(f"--prefill is {given['prefill']}, wanted auto, cpu, stream, split or a number of tokens.")
    if given["cache"] == "static" and given["profile"] is None:
        raise Problem("--cache static keeps the experts that a profile names: give --profile FILE, as a run wrote it.")
    if given["json"] and given["stream"]:
        raise Problem("--json prints one object and nothing else: leave --stream out.")


def _stretched(config: Any) -> bool:
    """Whether positions are scaled (YaRN and others), so that there may be more of them than the config says."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    ways = [found, *(value for value in found.values() if isinstance(value, dict))]
    return any(way.get("rope_type", way.get("type", "default")) != "default" for way in ways)


@contextlib.contextmanager
def _no_pipe_is_the_end() -> Iterator[None]:
    """Whoever reads the text has gone (`| head`): no more is made, and that is no error."""
    try:
        yield
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # so that Python's own flush at its end has somewhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _quiet() -> None:
    """Figures and errors are all that is said beside the text; --stats says it of a calibration on a busy machine."""
    from transformers.utils import logging

    warnings.filterwarnings("ignore", "offload.calibrate: others took", RuntimeWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _sentence(error: BaseException) -> str:
    text = str(error).strip().removeprefix("offload: ")
    text = " ".join(text.split()) or type(error).__name__
    return text if text.endswith((".", "?", "!")) else text + "."
