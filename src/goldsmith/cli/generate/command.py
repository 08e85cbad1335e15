"""`goldsmith generate`: one run, from the command-line options to text and statistics."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.messages import about, in_options, sentence
from ..notes import warnings_as_notes
from ..output_files import write_json_file
from ..signals import loading_hf, terminate_like_ctrl_c
from ..terminal import Failure, announce, console, write_json
from .arguments import GenerateArguments, adapters, check, prompts, stretched
from .display import GenerateDisplay

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...hf.offload.generation import Generation
    from ...offload.attach import Offloaded
    from ..json_types import JsonObject

WRONG, INTERRUPTED = 1, 130
OPTIONS = ("adapter", "cache", "compute", "dense_format", "device", "format", "guard", "prefill", "profile", "threads")


def run(arguments: GenerateArguments) -> int:
    """Run the command and return its exit status."""
    texts = prompts(arguments)
    check(arguments)
    folders = adapters(arguments)
    announce(f"Loading torch and transformers, then {Path(arguments.model).name}")
    show = GenerateDisplay(console(stderr=True), stream=arguments.stream, as_json=arguments.json)
    command = GenerateRun(arguments, texts, folders, show)
    status, problems = 0, list[Failure]()
    try:
        with terminate_like_ctrl_c(), contextlib.suppress(BrokenPipeError), _warnings_as_notes(show):
            status = command.carry_out()  # BrokenPipeError: the reader has gone (`| head`), so generation stops
    except KeyboardInterrupt:
        show.interrupted(bool(command.generation and command.generation.tokens))
        status = INTERRUPTED
    except Failure as problem:
        problems.append(problem)
    finally:
        problems += command.end()
    if arguments.json and (command.generation and command.generation.tokens or not problems):
        write_json(command.result())  # the text comes first, errors that followed it come after
    if problems:
        raise problems[0]
    return status


class GenerateRun:
    """One run: the model and its engine, the text, the statistics."""

    def __init__(
        self, arguments: GenerateArguments, texts: list[str], folders: dict[str, str], show: GenerateDisplay
    ) -> None:
        self.arguments, self.prompts, self.adapters, self.show = arguments, texts, folders, show
        self.offloaded: Offloaded | None = None
        self.generation: Generation | None = None
        self._finished: list[JsonObject] = []  # outputs of the adapters before the current one
        self._adapter: str | None = next(iter(folders), None)  # the one that computes now
        self.error: JsonObject | None = None
        self._stats: JsonObject = {}
        self._explain: JsonObject = {}

    def carry_out(self) -> int:
        with loading_hf():
            from torch import OutOfMemoryError

            from ...hf.offload import generation as text
            from ...hf.offload.loading import folder
            from ...offload.attach import from_pretrained
            from ...offload.errors import RoutingError, StoreError
            from ...offload.guard.report import NumericsError
            from ...offload.settings import parse_budget
        _quiet()
        arguments = self.arguments
        try:
            parse_budget(arguments.budget)
        except ValueError as error:
            budget = arguments.budget if len(arguments.budget) <= 40 else f"{arguments.budget[:40]}..."
            raise Failure(
                f"--budget {budget!r} is not an amount of memory: give auto, bytes, or 6GiB, 6GB, 500MiB."
            ) from error
        try:
            with self.show.doing("reading the tokenizer"):
                place = folder(arguments.model)
                config = _config(place)
                tokenizer = text.tokenizer_of(place)
                inputs = text.encoded(tokenizer, self.prompts, chat=arguments.chat)
            with self.show.doing("loading the model") as report_progress:
                rows, width = inputs["input_ids"].shape
                self._check_length(config, width)
                self.offloaded = from_pretrained(
                    place,
                    store=arguments.store,
                    adapter=self.adapters or None,
                    progress=report_progress,
                    batch=rows,
                    max_length=width + arguments.max_new_tokens,
                    cpu_format=arguments.format,
                    dense_format=arguments.dense_format,
                    compute=arguments.compute,
                    exact=arguments.format == "auto",
                    device=arguments.device,
                    gpu_budget=arguments.budget,
                    cache=arguments.cache,
                    profile=arguments.profile if arguments.cache == "static" else None,
                    prefill=int(arguments.prefill) if arguments.prefill.isdecimal() else arguments.prefill,
                    guard=arguments.guard,
                    threads=arguments.threads,
                )
            if arguments.verify_store:
                self._verify(self.offloaded)
            self._warn_about_differences(self.offloaded, width)
            with self._trace(self.offloaded):
                for name in self.adapters or [None]:
                    self._begin_adapter(self.offloaded, name)
                    self.generation = text.Generation([])
                    heading = name if len(self.adapters) > 1 else None
                    with self.show.text(self.prompts, heading) as written:
                        text.generate(
                            self.offloaded.model, tokenizer, self.prompts, generation=self.generation, inputs=inputs,
                            on_piece=written, max_new_tokens=arguments.max_new_tokens,
                            temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k,
                            seed=arguments.seed,
                        )  # fmt: skip
        except NumericsError as error:
            self.error = error.report.to_dict()
            self.show.failed(str(error))
            return WRONG
        except text.NothingToDraw as error:
            message = f"{error}."
            if error.scaled:
                raise Failure(f"--temperature {arguments.temperature}: {message} Give a higher one, or 0.") from error
            message = message[:1].upper() + message[1:]
            if arguments.guard != "raise":
                message += f" --guard {arguments.guard} does not stop at a NaN or Inf; --guard raise names its origin."
            self.error = {"error": message}
            self.show.failed(message)
            return WRONG
        except RoutingError as error:
            self.error = {"error": str(error)}
            self.show.failed(str(error))
            return WRONG
        except (OutOfMemoryError, MemoryError) as error:
            raise Failure(
                "Out of memory. A smaller --budget, a shorter prompt, fewer prompts or --device cpu needs less. The "
                f"error: {str(error).partition('. ')[0].removesuffix('.')}."
            ) from error
        except BrokenPipeError:
            raise
        except StoreError as error:
            raise Failure(self._about_store(error)) from error
        except (OSError, ValueError, TypeError, ImportError) as error:
            raise Failure(self._about(error)) from error
        return 0

    def end(self) -> list[Failure]:
        """Print the statistics, write the profile, close the engine; returns the files that could not be written."""
        offloaded = self.offloaded
        if offloaded is None:
            return []
        problems = []
        with contextlib.suppress(KeyboardInterrupt):
            try:
                offloaded.engine.flush()
            except (
                ArithmeticError,
                ValueError,
                RuntimeError,
                MemoryError,
            ) as error:  # errors of work that was still under way
                self.show.failed(_sentence(error))
            explained = offloaded.explain()
            self._stats, self._explain = offloaded.stats().to_dict(), explained.to_dict()
            if self.arguments.stats and self.generation is not None:
                self.show.stats(self.generation, self._stats, str(explained))
            if self.arguments.profile is not None and self.arguments.cache != "static":
                try:
                    self._write_profile(offloaded, self.arguments.profile)
                except Failure as problem:
                    problems.append(problem)
        offloaded.close()
        return problems

    def _begin_adapter(self, offloaded: Offloaded, name: str | None) -> None:
        if name is not None and name != self._adapter:
            self._finished += self._outputs()
            self._adapter = name
            offloaded.set_adapter(name)

    def _outputs(self) -> list[JsonObject]:
        """The texts so far of the current adapter; without one they have no entry "adapter"."""
        own: JsonObject = {} if self._adapter is None else {"adapter": self._adapter}
        return [
            {"prompt": o.prompt, "text": o.text, "tokens": o.tokens, "finish_reason": o.finish_reason, **own}
            for o in (self.generation.outputs if self.generation else [])
        ]

    def result(self) -> JsonObject:
        """The object that --json prints."""
        outputs = [*self._finished, *self._outputs()]
        times = {
            "time_to_first_token": self.generation.first_token if self.generation else None,
            "tokens_per_s": self.generation.tokens_per_s if self.generation else None,
        }
        result: JsonObject = {"outputs": outputs, "stats": {**times, **self._stats}, "explain": self._explain}
        return result | ({"error": self.error} if self.error else {})

    def _warn_about_differences(self, offloaded: Offloaded, width: int) -> None:
        store, arguments = offloaded.engine.store, self.arguments
        if not store.exact:
            self.show.note(
                f"--format {arguments.format} rounds the experts' weights (exact=False), so the text may differ from "
                "the plain model's."
            )
        if arguments.dense_format != "exact":
            self.show.note(
                f"--dense-format {arguments.dense_format} rounds the weights of the other linear layers, too."
            )
        if arguments.compute == "int8":
            self.show.note("--compute int8 rounds the experts' inputs to 8 bits, one scale for each group of weights.")
        name = type(offloaded.model).__name__
        if not name.endswith("ForCausalLM"):
            self.show.note(f"The model is loaded as {name} and receives only text.")
        most = getattr(offloaded.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and width + arguments.max_new_tokens > most:
            tokens = "1 token" if width == 1 else f"{width:,} tokens"
            self.show.note(
                f"A prompt has {tokens}: with --max-new-tokens {arguments.max_new_tokens:,} the text may exceed the "
                f"{most:,} tokens that the model supports."
            )

    def _about(self, error: Exception) -> str:
        """The error as a sentence that begins with the option concerned, by default MODEL."""
        text, store = _sentence(error), self.arguments.store
        for folder in self.adapters.values():
            if folder in text:
                return about("--adapter", folder, text)
        file = getattr(error, "filename", None)
        if store is not None and file in (str(store), str(store.parent)):
            return about("--store", store, text)
        if file is not None and file == str(self.arguments.trace):
            return f"--trace {file} could not be written: {error.strerror or error}."  # type: ignore[attr-defined]
        return about("MODEL", self.arguments.model, text)

    def _about_store(self, error: Exception) -> str:
        from ...offload.errors import StoreCorrupt

        text, store = _sentence(error), self.arguments.store
        if store is not None and (text.startswith(str(store)) or str(store) not in text):
            text = about("--store", store, text)
        way = " Delete it: the next run builds a new one." if isinstance(error, StoreCorrupt) else ""
        return f"{text}{way}"

    def _check_length(self, config: PreTrainedConfig, width: int) -> None:
        """Raise Failure before the model is loaded if a prompt is longer than its positions."""
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and width > most and not stretched(config):
            raise Failure(
                f"A prompt has {width:,} tokens, but the model supports at most {most:,} (max_position_embeddings in "
                "its config.json): shorten the prompt."
            )

    def _verify(self, offloaded: Offloaded) -> None:
        store = offloaded.engine.store
        with self.show.doing("checking the store") as report_progress:
            done = 0
            for layer in store.layers:
                store.verify([layer])
                done += store.num_experts(layer) * store.expert_nbytes(layer)
                report_progress(done, store.nbytes, f"checking the store, layer {layer}")

    def _trace(self, offloaded: Offloaded) -> contextlib.AbstractContextManager[object]:
        path = self.arguments.trace
        return contextlib.nullcontext() if path is None else offloaded.trace(path)

    def _write_profile(self, offloaded: Offloaded, path: Path) -> None:
        try:
            write_json_file(path, offloaded.profile())
        except OSError as error:
            raise Failure(f"--profile {path} could not be written: {error.strerror or error}.") from error


@contextlib.contextmanager
def _warnings_as_notes(show: GenerateDisplay) -> Iterator[None]:
    """Print goldsmith's warnings as notes; hide the one about a busy machine, which --stats reports."""
    with warnings_as_notes(lambda text: show.note(_as_options(text))):
        warnings.filterwarnings("ignore", "offload.calibrate: other programs took", RuntimeWarning)
        yield


def _quiet() -> None:
    """Silence transformers: only statistics and errors are printed besides the text."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _config(place: Path) -> PreTrainedConfig:
    from ...hf.model_class import config_of

    return config_of(place).get_text_config()


def _sentence(error: BaseException) -> str:
    """The text of an error as a sentence, in the words of the command."""
    return _as_options(sentence(error))


def _as_options(text: str) -> str:
    return in_options(text, OPTIONS).replace("gpu_budget=", "--budget ").replace("give store=", "give --store")
