"""Runs `goldsmith bench generate`: writes models, judges and times the engines, and writes rows as they come."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from goldsmith.cli.bench.session import Session, device_name, session
from goldsmith.cli.terminal import Failure, console
from goldsmith.core import native
from goldsmith.core.device import machine
from goldsmith.experts._checks import WHOLE
from goldsmith.offload.settings import COMPUTES, parse_budget

from ..common.needs import require
from ..common.options import split
from . import rules, tables
from .engines import peers
from .engines.llama import Llama, NoLlama
from .engines.peers import AUTO, ON_REQUEST, PEERS, PLANS, Peer, Precision, Setting
from .model import gguf_files
from .model.shapes import BITS, SHAPES, Shape, shape_of
from .model.weights import FolderWeights, RandomWeights
from .model_run import ModelRun
from .resume import earlier, measured
from .rows import GenerateRow
from .scratch import scratch

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
    level: str | None = None
    budgets: tuple[str, ...] = ()
    plans: tuple[str, ...] = ()
    llama: Path | None = None
    folder: Path | None = None
    models: Path | None = None
    verify: bool = True
    resume: bool = False
    commit: str = ""


def run(request: GenerateRequest, out: str | None) -> int:
    """Run the command; returns the exit status."""
    err = console(stderr=True)
    setting = _setting(request)
    shapes, precisions = _shapes(request), _precisions(request)
    names = _peer_names(request, setting, err)
    done = earlier(out) if request.resume else []
    if request.models is not None:
        request.models.mkdir(parents=True, exist_ok=True)
    with session(setting.device, out, request.commit) as current, scratch(request.folder) as folder:
        current.warn_if_busy()
        current.stream.print(f"[dim]instruction level {setting.level}, {setting.threads} threads[/]")
        setting, names = _compiled(setting, names, folder, request)
        engines, of_peers = list(_engines(request, setting, names)), peers.versions(names, setting)
        rows: list[GenerateRow] = []
        try:
            for shape in shapes:
                source = RandomWeights(shape) if request.model is None else FolderWeights(request.model, shape)
                for precision in precisions:
                    rows += _measured(
                        ModelRun(request, setting, shape, precision, source, engines, folder, err, _gpu_bytes(setting)),
                        current, of_peers, measured_before=done, rounds=request.rounds,
                    )  # fmt: skip
        finally:
            _judge_rules(rows, current)
    return current.end(f"[dim]{tables.LEGEND}[/]")


def _measured(
    model: ModelRun, current: Session, of_peers: dict[str, str], *, measured_before: Sequence[GenerateRow], rounds: int
) -> list[GenerateRow]:
    """The rows of a model: of an earlier run, or measured now and written, also those before an interrupt."""

    def rows() -> list[GenerateRow]:
        return [replace(row.under(current, of_peers), command=_command()) for row in model.rows()]

    known = measured(rows(), measured_before, rounds)
    if known is not None:
        current.err.print(f"[dim]measured before: {model.shape.name}, {model.precision}[/]")
        _show(known, current)
        return known
    try:
        model.measure()
    finally:
        try:
            _show(rows(), current)
        finally:  # also where a second interrupt comes while they are shown
            current.write([row for row in rows() if model.has_outcome(row.label)])
    return rows()


def _judge_rules(rows: Sequence[GenerateRow], current: Session) -> None:
    """Record every comparison of a rule, and report those that are broken."""
    judged = list(rules.judged(rows))
    current.write(judged)
    for row in judged:
        if not row.kept:
            current.err.print(f"[yellow]Rule broken: {row}.[/]", soft_wrap=True, highlight=False)


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
        names = split(request.shapes) or ["small"]
        for name in names:
            if name not in SHAPES:
                raise Failure(f"--shape {name}: there are {', '.join(SHAPES)}.")
        chosen = [SHAPES[name] for name in names]
    if request.layers is not None:
        chosen = [replace(shape, layers=min(shape.layers, request.layers)) for shape in chosen]
    return chosen


def _precisions(request: GenerateRequest) -> list[Precision]:
    formats, dense_formats = split(request.formats), split(request.dense_formats)
    for option, words in (("--format", formats), ("--dense-format", dense_formats)):
        for word in words:
            if word not in BITS:
                raise Failure(f"{option} {word}: there are {', '.join(BITS)}.")
    if request.compute == "int8" and (floats := [word for word in formats if word not in WHOLE]):
        raise Failure(f"--compute int8 is for experts in int8 or int4: --format {floats[0]} has no codes.")
    if not formats and not dense_formats:
        return [Precision(*pair) for pair in STANDARD if request.compute != "int8" or pair[0] in WHOLE]
    pairs = [(f, d) for f in formats or ["int4"] for d in dense_formats or [f]]
    return [Precision(*pair) for pair in dict.fromkeys(pairs)]


def _setting(request: GenerateRequest) -> Setting:
    require("bench generate")
    if request.compute not in (None, *COMPUTES):
        raise Failure(f"--compute {request.compute}: there are {', '.join(COMPUTES)}.")
    if (why := gguf_files.missing()) is not None:
        raise Failure(f"bench generate writes the model for all engines as a GGUF file: {why}.")
    from .workers.ours import keywords

    known = frozenset(keywords())
    if request.compute is not None and "compute" not in known:
        raise Failure("--compute: this version's goldsmith.offload has one arithmetic, the exact one.")
    device = device_name(request.device)
    if request.compute == "int8" and device != "cpu":
        raise Failure(f"--compute int8 is for --device cpu, not {device}.")
    context = max(request.prompt, 16 + request.tokens) + SPARE
    threads = request.threads or machine().cores
    return Setting(threads, device, context, request.compute, _level(request.level), known)


def _level(name: str | None) -> str:
    """The level that engines in Python are allowed: the one that was asked for, or the native library's own."""
    library = native.library()
    if name is None:
        return native.LEVELS[library.gs_level()]
    highest = library.gs_machine_level()
    if name not in native.LEVELS or native.LEVELS.index(name) > highest:
        raise Failure(f"--level {name}: this machine has {', '.join(native.LEVELS[: highest + 1])}.")
    return name


def _gpu_bytes(setting: Setting) -> int | None:
    """Memory of the GPU that the engines share; None for the CPU."""
    if setting.device == "cpu":
        return None
    return torch.cuda.get_device_properties(setting.device).total_memory


def _peer_names(request: GenerateRequest, setting: Setting, err: Console) -> list[str]:
    """The peers that can run. Raises Failure for one that was asked for and cannot; the others are named on stderr."""
    wanted = None if request.against is None else [name for name in split(request.against) if name != NONE]
    for name in wanted or ():
        if name not in (*PEERS, *ON_REQUEST):
            raise Failure(f"--against {name}: there are {', '.join((*PEERS, *ON_REQUEST))}, and {NONE}.")
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


def _compiled(setting: Setting, names: list[str], folder: Path, request: GenerateRequest) -> tuple[Setting, list[str]]:
    if "llama.cpp" not in names:
        return setting, names
    try:
        llama = Llama.find(request.llama)
        return replace(setting, llama=llama, runner=llama.compile(folder)), names
    except NoLlama as error:
        raise Failure(f"llama.cpp cannot run: {error}.") from error


def _engines(request: GenerateRequest, setting: Setting, names: Sequence[str]) -> Iterator[Peer]:
    budgets = list(split(request.budgets)) or ["auto"]
    sizes = []
    for budget in budgets:
        try:
            sizes.append(parse_budget(budget))
        except ValueError as error:
            raise Failure(f"--budget {budget} is not an amount of memory: give auto, bytes, or 6GiB.") from error
    plans = split(request.plans) or [AUTO]
    for plan in plans:
        if plan not in PLANS:
            raise Failure(f"--plan {plan}: there are {', '.join(PLANS)}.")
    if setting.device == "cpu":
        yield peers.goldsmith(setting)
    else:
        yield from (peers.goldsmith(setting, budget, plan) for budget in budgets for plan in plans)
    if "torch.compile" in names:
        yield peers.torch_compile(setting)
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


def _show(rows: Sequence[GenerateRow], current: Session) -> None:
    current.shown += sum(row.decode is not None for row in rows)
    if any(row.prompt or row.decode for row in rows):
        current.stream.print(tables.table(rows))
    for line in tables.remarks(rows):
        current.stream.print(f"[dim]{line}[/]", highlight=False)
