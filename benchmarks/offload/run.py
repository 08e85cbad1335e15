"""Runs the cases of `python -m benchmarks.offload` one by one, and writes rows as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from goldsmith.cli.bench.session import Session, device_name, session
from goldsmith.cli.terminal import Failure
from goldsmith.experts.packed.formats import FORMATS
from goldsmith.offload.calibrate import calibrate
from goldsmith.offload.calibration.calibration import Calibration

from ..common.needs import require
from ..common.rows import installed
from . import calls, guard, steps, store, tables
from .rows import PACKAGES, OffloadRow
from .shapes import SHAPES, Layers

PARTS = ("calls", "steps", "guard", "memory", "store")
TOKENS = {"cuda": (1, 512, 4096), "cpu": (1, 32)}
SHORT = 1024  # most tokens of steps and, by default, of the guard; longer prompts are timed as calls only


@dataclass(frozen=True)
class OffloadRequest:
    """The options of the command line; an empty one stands for the device's default."""

    parts: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    layers: int = 4
    tokens: tuple[int, ...] = ()
    cached: tuple[float, ...] = (0.0, 0.5)
    format: str = "auto"
    device: str | None = None
    threads: int | None = None
    seconds: float = 0.5
    limit: float | None = None
    peers: bool = True
    folder: Path | None = None
    commit: str = ""


Case = tuple[str, Callable[[], Iterable[OffloadRow]]]


def run(request: OffloadRequest, out: str | None) -> int:
    """Run the command; returns the exit status."""
    device = torch.device(device_name(request.device))
    _check(request)
    began = time.monotonic()
    shapes = request.shapes or (("qwen3", "v2-lite") if device.type == "cuda" else ("tiny",))
    with session(str(device), out, request.commit) as current:
        current.warn_if_busy()
        for name in shapes:
            if not _over(request, began):
                current.err.print(f"[dim]{name}: drawing {request.layers} layers and writing their store[/]")
                with _layers(request, name, device) as layers:
                    layers.say = partial(_report, current.err, began)
                    _time(request, layers, current, began)
    return current.end(tables.LEGEND)


def _time(request: OffloadRequest, layers: Layers, current: Session, began: float) -> None:
    """Run the cases of one shape until the limit."""
    for what, make in _cases(request, layers, partial(_calibrated, request, layers)):
        if _over(request, began):
            current.err.print(f"[yellow]The limit of {request.limit:.0f} s is over: {what} and what follows "
                              "is left out.[/]")  # fmt: skip
            return
        layers.say(what)
        rows = [row.under(current, installed(PACKAGES)) for row in _kept(make, what, current.err)]
        current.write(rows)
        current.shown += len(rows)
        current.stream.print(tables.table(rows))


def _layers(request: OffloadRequest, name: str, device: torch.device) -> Layers:
    try:
        return Layers(SHAPES[name], request.layers, device, request.format, request.folder)
    except (OSError, MemoryError, torch.OutOfMemoryError) as error:
        reason = str(error).splitlines()[0] or type(error).__name__
        raise Failure(f"{request.layers} layers of {name} do not fit: {reason}. Give --layers or --folder.") from error


def _report(err: Console, began: float, text: str) -> None:
    err.print(f"[dim]{time.monotonic() - began:.0f} s: {text}[/]")


def _kept(make: Callable[[], Iterable[OffloadRow]], what: str, err: Console) -> Iterator[OffloadRow]:
    """Rows of a case; where memory runs out, the rows so far."""
    try:
        yield from make()
    except (MemoryError, torch.OutOfMemoryError) as error:
        err.print(f"[yellow]{what} ended: {str(error).splitlines()[0][:200]}[/]")
    finally:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _over(request: OffloadRequest, began: float) -> bool:
    return request.limit is not None and time.monotonic() - began > request.limit


def _calibrated(request: OffloadRequest, layers: Layers, case: str) -> tuple[Calibration, OffloadRow]:
    """The costs of this machine, measured now, and a row with the time that this took."""
    layers.say("calibrating")
    began = time.perf_counter()
    calibration = calibrate(layers.store, device=layers.device, threads=request.threads, force=True)
    figures = {"calibrate_s": time.perf_counter() - began}
    shape, others = layers.shape, calibration.others
    return calibration, OffloadRow(
        "offload.calibrate", shape.name, case,
        {"H": shape.H, "I": shape.I, "E": shape.E, "k": shape.k, "layers": layers.count}, "bfloat16",
        layers.store.format, calls.OURS, figures=figures, threads=request.threads,
        note="seconds"
        + ("" if others is None else f"; other programs took {100 * others:.0f} % of the processors' time"),
    )  # fmt: skip


def _cases(
    request: OffloadRequest, layers: Layers, measure: Callable[[str], tuple[Calibration, OffloadRow]]
) -> Iterator[Case]:
    """The cases, decoding first, because it matters most; each is calibrated, because the host's load changes."""
    parts = request.parts or PARTS
    if "store" in parts:
        yield f"{layers.shape.name}: store", partial(store.rows, layers)
    if set(parts) <= {"store"}:
        return
    calibration, row = measure("first, with what a process compiles and imports once")
    yield f"{layers.shape.name}: calibration", partial(list, [row])
    common: dict[str, Any] = {"seconds": request.seconds, "calibration": calibration, "threads": request.threads}
    name, cases = layers.shape.name, 0
    for tokens in sorted(request.tokens or TOKENS[layers.device.type]):
        shares = request.cached if tokens == 1 else (0.0,)
        for share in shares if "calls" in parts else ():
            if tokens == 1 and cases and layers.device.type == "cuda":
                common["calibration"], row = measure("again")
                yield f"{name}: calibration", partial(list, [row])
            cases += 1
            make = partial(calls.rows, layers, tokens, share, peers=request.peers, **common)
            yield f"{name}: calls of {tokens} tokens, {share:.0%} cached", make
        if tokens <= SHORT and "steps" in parts:
            make = partial(steps.rows, layers, tokens, peers=request.peers, **common)
            yield f"{name}: steps of {tokens} tokens", make
        if "guard" in parts and (tokens <= SHORT or request.tokens):
            yield f"{name}: guard at {tokens} tokens", partial(guard.rows, layers, tokens, 0.5, **common)
    if "memory" in parts:
        yield (
            f"{name}: memory",
            partial(guard.memory, layers, calibration=common["calibration"], threads=request.threads),
        )


def _check(request: OffloadRequest) -> None:
    require("benchmarks.offload")
    for words, known, kind in (
        (request.parts, PARTS, "part"), (request.shapes, tuple(SHAPES), "shape"),
        ((request.format,), ("auto", *FORMATS), "format"),
    ):  # fmt: skip
        for word in words:
            if word not in known:
                raise Failure(f"no {kind} {word!r}; there are: {', '.join(known)}.")
