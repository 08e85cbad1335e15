"""Runs `goldsmith bench generate`: writes models, judges and times the engines, and writes rows as they come."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from goldsmith.cli.bench.command import INTERRUPTED, device_name, open_rows
from goldsmith.cli.bench.rows import Conditions
from goldsmith.cli.signals import terminate_like_ctrl_c
from goldsmith.cli.terminal import Failure, console
from goldsmith.core import native
from goldsmith.core.device import machine
from goldsmith.offload.settings import parse_budget

from . import gguf_files, peers, tables
from .llama import Llama, NoLlama
from .model_run import ModelRun
from .peers import PEERS, Peer, Precision, Setting
from .rows import GenerateRow
from .scratch import scratch
from .shapes import BITS, SHAPES, Shape, shape_of
from .weights import FolderWeights, RandomWeights

BUSY = 1.5  # load average above which the machine counts as busy
STANDARD = (("int4", "int4"), ("int4", "fp32"), ("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32"))
SPARE = 32  # tokens of the context beyond those that are computed
NONE = "none"  # --against none


@dataclass(frozen=True)
class GenerateRequest:
    """The options of the command line; an empty one stands for the default."""

    model: Path | None = None
    shapes: tuple[str, ...] = ()
    against: tuple[str, ...] | None = None
    formats: tuple[str, ...] = ()
    dense_formats: tuple[str, ...] = ()
    compute: str | None = None
    prompt: int = 512
    tokens: int = 128
    layers: int | None = None
    rounds: int = 3
    threads: int | None = None
    device: str = "cpu"
    budgets: tuple[str, ...] = ()
    llama: Path | None = None
    folder: Path | None = None
    models: Path | None = None
    verify: bool = True
    commit: str = ""


def run(request: GenerateRequest, out: str | None) -> int:
    """Run the command; returns the exit status."""
    err = console(stderr=True)
    shapes, precisions = _shapes(request), _precisions(request)
    setting = _setting(request)
    names = _peer_names(request, setting, err)
    target = open_rows(out)
    stream = console() if out != "-" else err
    conditions = Conditions.here(setting.device, request.commit)
    stream.print(f"[dim]{conditions}[/]", soft_wrap=True)
    if (load := os.getloadavg()[0]) > BUSY:
        err.print(f"[yellow]Others use this machine (load {load:.1f}): all rates are of a busy machine.[/]")
    status, shown = 0, 0
    if request.models is not None:
        request.models.mkdir(parents=True, exist_ok=True)
    with terminate_like_ctrl_c(), scratch(request.folder) as folder:
        setting, names = _compiled(setting, names, folder, request, err)
        engines = list(_engines(request, setting, names))
        of_peers = peers.versions(names, setting)
        try:
            for shape in shapes:
                source = RandomWeights(shape) if request.model is None else FolderWeights(request.model, shape)
                for precision in precisions:
                    model = ModelRun(request, setting, shape, precision, source, engines, folder, err)
                    try:
                        model.measure()
                    finally:  # also the rounds before an interrupt
                        rows = [row.under(conditions, of_peers, _command()) for row in model.rows()]
                        _write(rows, target)
                        shown += sum(row.decode is not None for row in rows)
                        status = max(status, *(int(row.verified is False) for row in rows), 0)
                        _show(rows, stream)
        except KeyboardInterrupt:
            err.print("[yellow]Interrupted: the rows so far are kept.[/]")
            status = INTERRUPTED
        finally:
            if target is not None and target is not sys.stdout:
                target.close()
    if shown:
        stream.print(f"[dim]{tables.LEGEND}[/]")
    return status or (0 if shown else 2)


def _command() -> str:
    return shlex.join(["goldsmith", "bench", "generate", *_without_places(sys.argv[1:])])


def _without_places(words: Sequence[str]) -> Iterator[str]:
    """The arguments without folders of this machine."""
    places, skip = ("--llama", "--folder", "--models", "--json", "--out", "--commit"), False
    for word in words:
        if skip:
            skip = False
        elif word in places:
            skip = True
        elif not word.startswith(tuple(f"{place}=" for place in places)):
            yield word


def _shapes(request: GenerateRequest) -> list[Shape]:
    if request.model is not None:
        if request.shapes:
            raise Failure("--model and --shape both choose the model: give one of them.")
        if not request.model.is_dir():
            raise Failure(f"--model {request.model} is not a folder.")
        chosen = [shape_of(request.model)]
    else:
        names = _split(request.shapes) or ["small"]
        for name in names:
            if name not in SHAPES:
                raise Failure(f"--shape {name}: there are {', '.join(SHAPES)}.")
        chosen = [SHAPES[name] for name in names]
    if request.layers is not None:
        chosen = [replace(shape, layers=min(shape.layers, request.layers)) for shape in chosen]
    return chosen


def _precisions(request: GenerateRequest) -> list[Precision]:
    formats, dense_formats = _split(request.formats), _split(request.dense_formats)
    for option, words in (("--format", formats), ("--dense-format", dense_formats)):
        for word in words:
            if word not in BITS:
                raise Failure(f"{option} {word}: there are {', '.join(BITS)}.")
    if not formats and not dense_formats:
        return [Precision(*pair) for pair in STANDARD]
    pairs = [(f, d) for f in formats or ["int4"] for d in dense_formats or [f]]
    return [Precision(*pair) for pair in dict.fromkeys(pairs)]


def _split(words: Sequence[str]) -> list[str]:
    """Values of an option that takes commas and may be repeated."""
    return list(dict.fromkeys(part.strip() for word in words for part in word.split(",") if part.strip()))


def _setting(request: GenerateRequest) -> Setting:
    if machine().interpreter:
        raise Failure("TRITON_INTERPRET is set: times of Triton's interpreter mean nothing. Unset it for bench.")
    if native.reason() is not None:
        raise Failure(f"bench generate needs the native library: {native.reason()}.")
    if (why := gguf_files.missing()) is not None:
        raise Failure(f"bench generate writes the model for all engines as a GGUF file: {why}.")
    try:
        from .engines import keywords

        known = frozenset(keywords())
    except ImportError as error:
        raise Failure(f"bench generate needs transformers: {error}. pip install 'transformers>=5' peft") from None
    if request.compute is not None and "compute" not in known:
        raise Failure("--compute: this version's goldsmith.offload has one arithmetic, the exact one.")
    device = device_name(request.device)
    context = max(request.prompt, 16 + request.tokens) + SPARE
    return Setting(request.threads or machine().cores, device, context, request.compute, known)


def _peer_names(request: GenerateRequest, setting: Setting, err: Console) -> list[str]:
    """The peers that can run. Raises Failure for one that was asked for and cannot; the others are named on stderr."""
    wanted = None if request.against is None else [name for name in _split(request.against) if name != NONE]
    for name in wanted or ():
        if name not in PEERS:
            raise Failure(f"--against {name}: there are {', '.join(PEERS)}, and {NONE}.")
    names = []
    for name in PEERS if wanted is None else wanted:
        why = peers.missing(name, setting, request.llama)
        if why is None:
            names.append(name)
        elif wanted is not None or (name == "llama.cpp" and request.llama is not None):
            raise Failure(f"{name} cannot run: {why}.")
        else:
            err.print(f"[dim]{name} is left out: {why}[/]", soft_wrap=True)
    return names


def _compiled(
    setting: Setting, names: list[str], folder: Path, request: GenerateRequest, err: Console
) -> tuple[Setting, list[str]]:
    if "llama.cpp" not in names:
        return setting, names
    try:
        llama = Llama.find(request.llama)
        return replace(setting, llama=llama, runner=llama.compile(folder)), names
    except NoLlama as error:
        raise Failure(f"llama.cpp cannot run: {error}.") from error


def _engines(request: GenerateRequest, setting: Setting, names: Sequence[str]) -> Iterator[Peer]:
    budgets = list(_split(request.budgets)) or ["auto"]
    sizes = []
    for budget in budgets:
        try:
            sizes.append(parse_budget(budget))
        except ValueError as error:
            raise Failure(f"--budget {budget} is not an amount of memory: give auto, bytes, or 6GiB.") from error
    if setting.device == "cpu":
        yield peers.goldsmith(setting)
    else:
        yield from (peers.goldsmith(setting, budget) for budget in budgets)
    if "llama.cpp" in names:
        yield peers.llama_cpp(setting)
    if "transformers" in names:
        yield peers.transformers(setting)
    if "kt-kernel" in names:
        yield peers.kt_kernel(setting)
    if "accelerate" in names:
        for budget, bytes_of in zip(budgets, sizes, strict=True):
            if bytes_of is not None:
                yield peers.accelerate(setting, budget, bytes_of)


def _write(rows: Sequence[GenerateRow], target: object) -> None:
    if target is not None:
        with contextlib.suppress(BrokenPipeError):
            target.write("".join(json.dumps(row.to_json()) + "\n" for row in rows))  # type: ignore[attr-defined]
            target.flush()  # type: ignore[attr-defined]


def _show(rows: Sequence[GenerateRow], stream: Console) -> None:
    if any(row.prompt or row.decode for row in rows):
        stream.print(tables.table(rows))
    for line in tables.remarks(rows):
        stream.print(f"[dim]{line}[/]", highlight=False)
