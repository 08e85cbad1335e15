"""`goldsmith generate`: one run, from the command-line options to text and statistics."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from ..output_files import write_json_file
from ..signals import loading_hf, terminate_like_ctrl_c
from ..terminal import Failure, announce, console, write_json
from .checks import adapters, check, prompts, stretched
from .display import GenerateDisplay
from .loading import (
    check_budget,
    error_sentence,
    errors_as_failures,
    load_model,
    note_differences,
    notes_of_warnings,
    quiet,
    text_config_of,
    verify_store,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...hf.offload.generation import Generation
    from ...hf.offload.memory_needs import MemoryNeeds
    from ...offload.attach import Offloaded
    from ..json_types import JsonObject
    from .arguments import GenerateArguments

WRONG, INTERRUPTED = 1, 130


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
        with terminate_like_ctrl_c(), contextlib.suppress(BrokenPipeError), notes_of_warnings(show):
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
        self._width = 0  # tokens of the longest prompt
        self._finished: list[JsonObject] = []  # outputs of the adapters before the current one
        self._adapter: str | None = next(iter(folders), None)  # the one that computes now
        self.error: JsonObject | None = None
        self._stats: JsonObject = {}
        self._explain: JsonObject = {}

    def carry_out(self) -> int:
        with loading_hf():
            from ...hf.offload import generation  # noqa: F401
        quiet()
        check_budget(self.arguments)
        with errors_as_failures(self.arguments, self.adapters, self.arguments.trace):
            return self._generate()

    def _generate(self) -> int:
        """Load the model and generate every text; returns the exit status."""
        from ...hf.offload import generation as text
        from ...hf.offload.loading import folder
        from ...offload.errors import RoutingError
        from ...offload.guard.report import NumericsError

        arguments = self.arguments
        try:
            with self.show.doing("reading the tokenizer"):
                place = folder(arguments.model)
                config = text_config_of(place)
                tokenizer = text.tokenizer_of(place)
                inputs = text.encoded(tokenizer, self.prompts, chat=arguments.chat)
            with self.show.doing("loading the model") as report_progress:
                rows, width = inputs["input_ids"].shape
                self._width = width
                self._check_length(config, width)
                self.offloaded = load_model(
                    place, arguments, self.adapters, progress=report_progress, batch=rows,
                    max_length=width + arguments.max_new_tokens, on_memory=self._state_memory,
                )  # fmt: skip
            if arguments.verify_store:
                verify_store(self.offloaded, self.show)
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
                self.show.failed(error_sentence(error))
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

    def _state_memory(self, needs: MemoryNeeds) -> None:
        from ...hf.offload.token_loop import CHUNK

        if self.arguments.stats:
            arguments = self.arguments
            rows = len(self.prompts)
            self.show.needs(needs, rows * (self._width + arguments.max_new_tokens), rows * min(self._width, CHUNK))

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
        arguments = self.arguments
        note_differences(offloaded, arguments, self.show)
        most = getattr(offloaded.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and width + arguments.max_new_tokens > most:
            tokens = "1 token" if width == 1 else f"{width:,} tokens"
            self.show.note(
                f"A prompt has {tokens}: with --max-new-tokens {arguments.max_new_tokens:,} the text may exceed the "
                f"{most:,} tokens that the model supports."
            )

    def _check_length(self, config: PreTrainedConfig, width: int) -> None:
        """Raise Failure before the model is loaded if a prompt is longer than its positions."""
        most = getattr(config, "max_position_embeddings", None)
        if most is not None and width > most and not stretched(config):
            raise Failure(
                f"A prompt has {width:,} tokens, but the model supports at most {most:,} (max_position_embeddings in "
                "its config.json): shorten the prompt."
            )

    def _trace(self, offloaded: Offloaded) -> contextlib.AbstractContextManager[object]:
        path = self.arguments.trace
        return contextlib.nullcontext() if path is None else offloaded.trace(path)

    def _write_profile(self, offloaded: Offloaded, path: Path) -> None:
        try:
            write_json_file(path, offloaded.profile())
        except OSError as error:
            raise Failure(f"--profile {path} could not be written: {error.strerror or error}.") from error
