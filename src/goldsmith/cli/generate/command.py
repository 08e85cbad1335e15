"""`goldsmith generate`: from the command line's words to text, and what is said of it."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from ..say import Problem, console, ends_like_ctrl_c, put_json
from .checks import check, prompts, stretched
from .show import Shown

WRONG, INTERRUPTED = 1, 130
_KEYWORD = re.compile(r"\b(budget|cache|device|format|guard|prefill|profile|threads)=(?=[\w'])")
_FUNCTION = re.compile(r"^(offload(\.\w+)?|ExpertStore\.\w+): ")


def run(given: dict[str, Any]) -> int:
    """The whole command; returns the exit status."""
    texts = prompts(given)
    check(given)
    show = Shown(console(stderr=True), stream=given["stream"], as_json=given["json"])
    command = Command(given, texts, show)
    status, problems = 0, list[Problem]()
    try:
        with ends_like_ctrl_c(), contextlib.suppress(BrokenPipeError), _warnings_in_words(show):
            status = command.carry_out()  # where whoever reads the text has gone (`| head`) no more is made
    except KeyboardInterrupt:
        show.interrupted(bool(command.made and command.made.tokens))
        status = INTERRUPTED
    except Problem as problem:
        problems.append(problem)
    finally:
        problems += command.end()
    if given["json"] and (command.made and command.made.tokens or not problems):
        put_json(command.result())  # what was made, before what went wrong after it
    if problems:
        raise problems[0]
    return status


class Command:
    """One run: the model and its engine, the text, the figures."""

    def __init__(self, given: dict[str, Any], texts: list[str], show: Shown):
        self.given, self.prompts, self.show = given, texts, show
        self.held: Any = None
        self.made: Any = None
        self.error: dict[str, Any] | None = None
        self._stats: dict[str, Any] = {}
        self._explain: dict[str, Any] = {}

    def carry_out(self) -> int:
        from torch import OutOfMemoryError

        try:
            from ...hf.offload import generation as text
            from ...hf.offload.loading import folder
            from ...offload.attach import from_pretrained
            from ...offload.errors import RoutingError, StoreError
            from ...offload.guard.report import NumericsError
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
            budget = given["budget"] if len(given["budget"]) <= 40 else f"{given['budget'][:40]}..."
            raise Problem(
                f"--budget {budget!r} is no amount of memory: give auto, bytes, or 6GiB, 6GB, 500MiB."
            ) from error
        try:
            with self.show.doing("reading the tokenizer"):
                place = folder(given["model"])
                config = _config(place)
                tokenizer = text.tokenizer_of(place)
                inputs = text.encoded(tokenizer, self.prompts, chat=given["chat"])
            with self.show.doing("loading the model") as told:
                rows, width = inputs["input_ids"].shape
                self._check_length(config, width)
                room = {"batch": rows, "max_length": width + given["max_new_tokens"]}
                options = room | self._engine_options()
                self.held = from_pretrained(place, store=given["store"], progress=told, **options)
            if given["verify_store"]:
                self._verify()
            self._say_what_is_not_plain(width)
            self.made = text.Generation([])
            with self._trace(), self.show.text(self.prompts) as written:
                text.generate(
                    self.held.model, tokenizer, self.prompts, generation=self.made, inputs=inputs, on_piece=written,
                    **{name: given[name] for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed")},
                )  # fmt: skip
        except NumericsError as error:
            self.error = error.report.to_dict()
            self.show.failed(str(error))
            return WRONG
        except text.NothingToDraw as error:
            said = f"{error}."
            if error.scaled:
                raise Problem(f"--temperature {given['temperature']}: {said} Give a higher one, or 0.") from error
            said = said[:1].upper() + said[1:]
            if given["guard"] != "raise":
                said += (
                    f" --guard {given['guard']} was not to stop at a NaN or Inf; --guard raise says where it was born."
                )
            self.error = {"error": said}
            self.show.failed(said)
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
        except StoreError as error:
            raise Problem(self._about_store(error)) from error
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise Problem(self._about(error)) from error
        return 0

    def end(self) -> list[Problem]:
        """The figures of what was done, the profile, and the engine closed; what of it could not be written."""
        if self.held is None:
            return []
        problems = []
        with contextlib.suppress(KeyboardInterrupt):
            try:
                self.held.engine.flush()
            except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:  # of what was under way
                self.show.failed(_sentence(error))
            explained = self.held.explain()
            self._stats, self._explain = self.held.stats().to_dict(), explained.to_dict()
            if self.given["stats"] and self.made is not None:
                self.show.stats(self.made, self._stats, str(explained))
            if self.given["profile"] is not None and self.given["cache"] != "static":
                try:
                    self._write_profile()
                except Problem as problem:
                    problems.append(problem)
        self.held.close()
        return problems

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

    def _about(self, error: Exception) -> str:
        """In a sentence, after the option that it is about: the model, if no other is named."""
        text, store = _sentence(error), self.given["store"]
        if text.startswith("--"):
            return text
        file = getattr(error, "filename", None)
        if store is not None and file in (str(store), str(store.parent)):
            return f"--store {store}: {text}"
        if file is not None and file == str(self.given["trace"]):
            return f"--trace {file} could not be written: {error.strerror or error}."  # type: ignore[attr-defined]
        return f"MODEL {self.given['model']}: {text}"

    def _about_store(self, error: Exception) -> str:
        from ...offload.errors import StoreCorrupt

        text, store = _sentence(error), self.given["store"]
        where = f"--store {store}: " if store is not None and str(store) not in text else ""
        way = " Delete it: the next run makes it anew." if isinstance(error, StoreCorrupt) else ""
        return f"{where}{text}{way}"

    def _check_length(self, config: Any, width: int) -> None:
        """Before the model is loaded: a prompt that it has no positions for would be hours of noise."""
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and width > most and not stretched(config):
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


@contextlib.contextmanager
def _warnings_in_words(show: Shown) -> Iterator[None]:
    """What goldsmith warns of is said as everything else is; --stats says it of a calibration on a busy machine."""
    with warnings.catch_warnings():
        plain = warnings.showwarning

        def told(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
            line: str | None = None,
        ) -> None:  # fmt: skip
            if category.__module__.startswith("goldsmith") or str(message).startswith("offload."):
                show.note(_words(str(message)))
            else:
                plain(message, category, filename, lineno, file, line)

        warnings.showwarning = told
        warnings.filterwarnings("ignore", "offload.calibrate: others took", RuntimeWarning)
        yield


def _quiet() -> None:
    """Figures and errors are all that is said beside the text."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config(place: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place).get_text_config()
    except OSError as error:
        raise ValueError(f"its config.json cannot be read: {error}") from error


def _sentence(error: BaseException) -> str:
    """What an error says, without what a program would want of it: a number, the name of a function."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None and str(error.filename) not in text:
            text += f": {error.filename}"
    text = _words(text) or type(error).__name__
    return text if text.endswith((".", "?", "!")) else text + "."


def _words(text: str) -> str:
    """Keywords of the functions as the options that they come from."""
    text = (
        _FUNCTION.sub("", " ".join(text.split()))
        .replace("gpu_budget=", "budget=")
        .replace("give store=", "give --store")
    )
    return _KEYWORD.sub(r"--\1 ", text)
