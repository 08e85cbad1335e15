"""`goldsmith serve`: from the command-line options to a server that answers until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generate.checks import adapters, stretched
from ..generate.loading import (
    check_budget,
    errors_as_failures,
    load_model,
    note_differences,
    notes_of_warnings,
    quiet,
    text_config_of,
    verify_store,
)
from ..signals import loading_hf, terminate_like_ctrl_c
from ..terminal import Failure, Interruption, announce, console, write_json
from .checks import INSTALL, check, is_loopback, served_names
from .display import ServeDisplay

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ...hf.offload.memory_needs import MemoryNeeds
    from ...hf.serving.batcher import ServingLimits
    from ...offload.attach import Offloaded
    from .arguments import ServeArguments

EACH = 4096  # tokens for which memory is kept, for each request that computes
POSITIONS = 4096  # context of a model that does not state its own
SHARE = 0.8  # of the free memory that keys and values may take
MODULE = "transformers.cli.serving"


def run(arguments: ServeArguments) -> int:
    """Run the command until it is stopped, and return its exit status."""
    check(arguments)
    folders = adapters(arguments)
    names = served_names(arguments, folders)
    announce(f"Loading torch and transformers, then {Path(arguments.model).name}")
    show = ServeDisplay(console(stderr=True), as_json=arguments.json)
    listener = _listener(arguments)
    try:
        with terminate_like_ctrl_c(), notes_of_warnings(show):
            return _serve(arguments, folders, names, listener, show)
    except KeyboardInterrupt:
        raise Interruption("Interrupted before the server was ready.") from None
    finally:
        listener.close()


def _serve(
    arguments: ServeArguments, folders: dict[str, str], names: dict[str, str | None], listener: socket.socket,
    show: ServeDisplay,
) -> int:  # fmt: skip
    with loading_hf():
        from ...hf.offload.generation import tokenizer_of
        from ...hf.offload.loading import folder
        from ...hf.offload.token_loop import CHUNK
    try:
        from ...hf.serving.server import ModelServer
    except ImportError as error:
        raise Failure(
            f"goldsmith serve needs transformers' own server code ({MODULE}), which cannot be imported: {error}. "
            f"Install what it needs: pip install 'transformers>=5.17'; {INSTALL}"
        ) from error
    quiet()
    check_budget(arguments)
    with contextlib.ExitStack() as stack:
        with errors_as_failures(arguments, folders):
            place = folder(arguments.model)
            tokenizer = tokenizer_of(place)
            limits = _limits(arguments, text_config_of(place))
            with show.doing("loading the model") as report_progress:
                needs: list[MemoryNeeds] = []

                def stated(memory: MemoryNeeds) -> None:
                    needs.append(memory)
                    show.needs(memory, limits.tokens, min(limits.context, CHUNK))

                offloaded = load_model(
                    place, arguments, folders, progress=report_progress, batch=1, max_length=limits.tokens,
                    on_memory=stated,
                )  # fmt: skip
            stack.callback(offloaded.close)
            if arguments.verify_store:
                verify_store(offloaded, show)
            note_differences(offloaded, arguments, show)
            limits = _within_memory(limits, arguments, offloaded, show)
        places = [place, *map(Path, folders.values())]
        places = [path for path in places if path.exists()]
        server = ModelServer(offloaded, tokenizer, limits, names, places, show.failed)
        stack.callback(server.close)
        ready = _Ready(arguments, list(names), limits, offloaded, listener, show, bool(tokenizer.chat_template), needs)
        hosts = [arguments.host.lower(), "localhost", "127.0.0.1", "[::1]"] if is_loopback(arguments.host) else None
        with show.doing("computing a first text"):
            server.begin()
        server.run(listener, hosts, ready)
        show.ended(server.served)
    return 0


class _Ready:
    """Prints what the server is and where it listens, once it does."""

    def __init__(
        self, arguments: ServeArguments, names: list[str], limits: ServingLimits, offloaded: Offloaded,
        listener: socket.socket, show: ServeDisplay, chat: bool, needs: list[MemoryNeeds],
    ) -> None:  # fmt: skip
        self._arguments, self._names, self._limits, self._offloaded = arguments, names, limits, offloaded
        self._listener, self._show, self._chat, self._needs = listener, show, chat, needs

    def __call__(self) -> None:
        import torch

        from ...offload.memory.host_memory import process_memory

        host, port = self._listener.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        memory, device = process_memory(), self._offloaded.engine.device
        gpu = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
        if not is_loopback(self._arguments.host):
            self._show.note(
                f"--host {self._arguments.host}: every machine that reaches this address can use the server."
            )
        self._show.listens(url, self._names, self._limits, memory, gpu, self._chat)
        if self._arguments.json:
            measured: dict[str, object] = {"own": memory.own, "files": memory.files, "gpu": gpu}
            limits = {name: getattr(self._limits, name) for name in ("parallel", "context", "tokens", "queue")}
            needed = self._needs[0].to_dict() if self._needs else None
            write_json(
                {"url": f"{url}/v1", "models": self._names, "limits": limits, "needs": needed, "takes": measured}
            )


def _listener(arguments: ServeArguments) -> socket.socket:
    """The socket, bound before the model is loaded: an address in use is found at once."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            arguments.host, arguments.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise Failure(f"--host {arguments.host} is no address of this machine: {error.strerror or error}.") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Failure(
                f"--port {arguments.port} is in use on {arguments.host}: give another one, or --port 0 for a free one."
            ) from error
        raise Failure(f"--host {arguments.host} --port {arguments.port}: {error.strerror or error}.") from error
    return listener


def _limits(arguments: ServeArguments, config: PreTrainedConfig) -> ServingLimits:
    from ...hf.serving.batcher import ServingLimits

    most: int | None = getattr(config, "max_position_embeddings", None)
    context = arguments.context or most or POSITIONS
    if most is not None and context > most and not stretched(config):
        raise Failure(
            f"--context {context:,} is more than the {most:,} tokens that the model supports (max_position_embeddings "
            "in its config.json)."
        )
    if arguments.context is None and arguments.total_tokens is not None:
        context = min(context, arguments.total_tokens)
    tokens = arguments.total_tokens or max(context, arguments.parallel * min(EACH, context))
    return ServingLimits(arguments.parallel, context, tokens, arguments.queue)


def _within_memory(
    limits: ServingLimits, arguments: ServeArguments, offloaded: Offloaded, show: ServeDisplay
) -> ServingLimits:
    """The limits, smaller if their keys and values do not fit in the memory that is free after loading."""
    import torch

    from ...hf.offload.budget import cache_bytes
    from ...hf.serving.batcher import ServingLimits
    from ...offload.memory.host_memory import memory_free

    model: Any = offloaded.model
    device = offloaded.engine.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_free()
    fit = int(SHARE * free) // max(1, cache_bytes(model, 1))
    if limits.tokens <= fit:
        return limits
    if arguments.total_tokens is not None or fit < 2 or (arguments.context or 0) > fit:
        given = f"--total-tokens {limits.tokens:,}" if arguments.total_tokens else f"--context {limits.context:,}"
        raise Failure(f"{given} does not fit: there is memory for keys and values of {max(0, fit):,} tokens.")
    show.note(f"There is memory for keys and values of {fit:,} tokens, not of {limits.tokens:,}.")
    return ServingLimits(limits.parallel, min(limits.context, fit), fit, limits.queue)
