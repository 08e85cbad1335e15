"""Loading of a model for `goldsmith generate` and `goldsmith serve`, and errors about it in the words of a command."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...core.messages import about, in_options, sentence
from ..notes import warnings_as_notes
from ..terminal import Failure

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...offload.attach import Offloaded
    from .arguments import ModelArguments

OPTIONS = ("adapter", "cache", "compute", "dense_format", "device", "format", "guard", "prefill", "profile", "threads")
CUT_SHORT = (
    b"The store or a file of the model was cut short while this process read it, which ends the process. Write the "
    b"file again, or give another --store.\n"
)
Progress = Callable[[int, int | None, str], None]


class Display(Protocol):
    """What loading shows."""

    def note(self, text: str) -> None: ...

    def doing(self, task: str) -> AbstractContextManager[Progress]: ...


def check_budget(arguments: ModelArguments) -> None:
    """Raise Failure unless --budget is an amount of memory."""
    from ...offload.settings import parse_budget

    try:
        parse_budget(arguments.budget)
    except ValueError as error:
        budget = arguments.budget if len(arguments.budget) <= 40 else f"{arguments.budget[:40]}..."
        raise Failure(
            f"--budget {budget!r} is not an amount of memory: give auto, bytes, or 6GiB, 6GB, 500MiB."
        ) from error


def load_model(
    place: Path, arguments: ModelArguments, adapters: Mapping[str, str], *, progress: Progress, batch: int,
    max_length: int, on_memory: Callable[[Any], None] | None = None,
) -> Offloaded:  # fmt: skip
    """The model with an engine in place of its experts, by the command's options."""
    from ...core import native
    from ...offload.attach import from_pretrained

    if native.reason() is None:
        native.library().gs_say_at_bus_error(CUT_SHORT)
    return from_pretrained(
        place,
        store=arguments.store,
        adapter=adapters or None,
        progress=progress,
        on_memory=on_memory,
        batch=batch,
        max_length=max_length,
        cpu_format=arguments.format.value,
        dense_format=arguments.dense_format.value,
        compute=arguments.compute.value,
        exact=arguments.format == "auto",
        device=arguments.device,
        gpu_budget=arguments.budget,
        cache=arguments.cache.value,
        profile=arguments.profile if arguments.cache == "static" else None,
        prefill=int(arguments.prefill) if arguments.prefill.isdecimal() else arguments.prefill,
        guard=arguments.guard.value,
        threads=arguments.threads,
    )


def verify_store(offloaded: Offloaded, show: Display) -> None:
    """Check every byte of the store; raises StoreCorrupt."""
    store = offloaded.engine.store
    with show.doing("checking the store") as report_progress:
        done = 0
        for layer in store.layers:
            store.verify([layer])
            done += store.num_experts(layer) * store.expert_nbytes(layer)
            report_progress(done, store.nbytes, f"checking the store, layer {layer}")


def note_differences(offloaded: Offloaded, arguments: ModelArguments, show: Display) -> None:
    """Print a note on what makes the text differ from the plain model's."""
    if not offloaded.engine.store.exact:
        show.note(
            f"--format {arguments.format} rounds the experts' weights (exact=False), so the text may differ from "
            "the plain model's."
        )
    if arguments.dense_format != "exact":
        show.note(f"--dense-format {arguments.dense_format} rounds the weights of the other linear layers, too.")
    if arguments.compute == "int8":
        show.note("--compute int8 rounds the experts' inputs to 8 bits, one scale for each group of weights.")
    name = type(offloaded.model).__name__
    if not name.endswith("ForCausalLM"):
        show.note(f"The model is loaded as {name} and receives only text.")


@contextmanager
def errors_as_failures(
    arguments: ModelArguments, adapters: Mapping[str, str], trace: Path | None = None
) -> Iterator[None]:
    """Raise the block's errors about the model, its store or its memory as Failure, with the option concerned."""
    from torch import OutOfMemoryError

    from ...offload.errors import StoreError

    try:
        yield
    except (OutOfMemoryError, MemoryError) as error:
        text = str(error).partition(". ")[0].removesuffix(".")
        raise Failure(
            "Out of memory. A smaller --budget, a shorter prompt, fewer prompts or --device cpu needs less."
            + (f" The error: {text}." if text else "")
        ) from error
    except BrokenPipeError:
        raise
    except StoreError as error:
        raise Failure(_about_store(error, arguments)) from error
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise Failure(_about(error, arguments, adapters, trace)) from error


@contextmanager
def notes_of_warnings(show: Display) -> Iterator[None]:
    """Print goldsmith's warnings as notes; hide the one about a busy machine, which --stats reports."""
    with warnings_as_notes(lambda text: show.note(as_options(text))):
        warnings.filterwarnings("ignore", "offload.calibrate: other programs took", RuntimeWarning)
        yield


def quiet() -> None:
    """Silence transformers: only goldsmith's own lines and errors are printed."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def text_config_of(place: Path) -> PreTrainedConfig:
    from ...hf.model_class import config_of

    return config_of(place).get_text_config()


def error_sentence(error: BaseException) -> str:
    """The text of an error as a sentence, in the words of the command."""
    return as_options(sentence(error))


def as_options(text: str) -> str:
    return in_options(text, OPTIONS).replace("gpu_budget=", "--budget ").replace("give store=", "give --store")


def _about(error: Exception, arguments: ModelArguments, adapters: Mapping[str, str], trace: Path | None) -> str:
    """The error as a sentence that begins with the option concerned, by default MODEL."""
    text, store = error_sentence(error), arguments.store
    for folder in adapters.values():
        if folder in text:
            return about("--adapter", folder, text)
    file = getattr(error, "filename", None)
    if store is not None and file in (str(store), str(store.parent)):
        return about("--store", store, text)
    if file is not None and file == str(trace):
        return f"--trace {file} could not be written: {error.strerror or error}."  # type: ignore[attr-defined]
    return about("MODEL", arguments.model, text)


def _about_store(error: Exception, arguments: ModelArguments) -> str:
    from ...offload.errors import StoreCorrupt

    text, store = error_sentence(error), arguments.store
    if store is not None and (text.startswith(str(store)) or str(store) not in text):
        text = about("--store", store, text)
    way = " Delete it: the next run builds a new one." if isinstance(error, StoreCorrupt) else ""
    return f"{text}{way}"
