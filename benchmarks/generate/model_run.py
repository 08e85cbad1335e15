"""One model in one precision: its file, the judge, all engines, and their rows."""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from goldsmith.cli.bench.ceilings import megabytes_beyond_caches
from goldsmith.cli.generate.display import GenerateDisplay
from goldsmith.cli.terminal import size
from goldsmith.core import native

from . import room
from .check import SEQUENCES, TOKENS, Agreement, Judge
from .engines import peers
from .engines.peers import Peer, Precision, Setting
from .engines.processes import EngineError, EngineProcess
from .model import gguf_files
from .model.shapes import Shape
from .model.weights import Source
from .rows import GenerateRow, Rate
from .turns import BEFORE, Measured, rounds, warm

if TYPE_CHECKING:
    from .run import GenerateRequest

PART_TOKENS = 32  # of the run that divides a token's time


class ModelRun:
    """Measures every engine on one model; `rows` has what was measured so far."""

    def __init__(
        self, request: GenerateRequest, setting: Setting, shape: Shape, precision: Precision, source: Source,
        engines: Sequence[Peer], folder: Path, err: Console, gpu: int | None = None,
    ) -> None:  # fmt: skip
        self.request, self.setting, self.precision, self.source = request, setting, precision, source
        self.folder, self.err = folder, err
        self.reads: list[float] = []  # bytes per second
        self.all_layers = shape.layers
        self.lacks = {peer.label: why for peer in engines if (why := peer.lacks(precision))}
        self.engines = {peer.label: peer for peer in engines if peer.label not in self.lacks}
        self.peers = {peer.label: peer for peer in engines}
        self.room = room.fitted(shape, precision, list(self.engines.values()), setting.context, folder, gpu)
        self.shape = shape.cut(self.room.layers)
        draw = random.Random(0)
        self.prompt = [draw.randrange(shape.vocabulary) for _ in range(max(request.prompt, BEFORE))]
        self.measured = {label: Measured() for label in self.engines}
        self.agreements: dict[str, Agreement] = {}
        self.notes: dict[str, str] = {}
        self.parts: dict[str, dict[str, float]] = {}

    def measure(self) -> None:
        if self.room.why:
            self.err.print(f"[yellow]{self.shape.name} in {self.precision}: {self.room.why}.[/]", soft_wrap=True)
        for label, peer in self.engines.items():
            stated = room.stated(peer, self.shape, self.precision, self.setting.context)
            self.measured[label].memory["stated"] = stated
        words = ", ".join(f"{label} {size(m.memory['stated'])}" for label, m in self.measured.items())
        self.err.print(f"[dim]memory that the engines will take: {words}; "
                       f"{size(room.available())} available[/]", soft_wrap=True)  # fmt: skip
        path = self._file(self.shape)
        try:
            with contextlib.ExitStack() as stack:
                loaded: dict[str, EngineProcess] = {}
                if self.request.verify:
                    self._judge(path, loaded, stack)
                self._time(path, loaded, stack)
        finally:
            self._forget(path)

    def rows(self) -> Iterator[GenerateRow]:
        for label, peer in self.peers.items():
            yield self._row(label, peer)

    def has_outcome(self, label: str) -> bool:
        """Whether an engine has a rate or a reason for none; an interrupt leaves others without either."""
        if label in self.lacks:
            return True
        measured = self.measured[label]
        return bool(measured.prompt or measured.decode or measured.failed)

    def _row(self, label: str, peer: Peer) -> GenerateRow:
        row = GenerateRow(
            self.shape.name, self.shape.sizes, self.all_layers, self.precision.format, self.precision.dense, peer.name,
            label, compute=self.setting.compute if peer.name == peers.OURS else None, level=self.setting.level,
            budget=peer.budget, plan=peer.plan,
            prompt_tokens=len(self.prompt), decode_tokens=self.request.tokens, threads=self.setting.threads,
            together=self.room.together,
        )  # fmt: skip
        if label in self.lacks:
            return replace(row, note=self.lacks[label])
        measured, agreement = self.measured[label], self.agreements.get(label)
        dense_used = peer.dense(self.precision)
        rate = statistics.median(self.reads) if self.reads else None
        read = self.shape.read_bytes(self.precision.format, dense_used)
        decode = Rate.of(measured.decode) if measured.decode else None
        checked = f" of {self.room.checked} layers" if self.room.checked < self.shape.layers else ""
        return replace(
            row, dense_used=dense_used, decode=decode, prompt=Rate.of(measured.prompt) if measured.prompt else None,
            verified=None if agreement is None else agreement.agrees,
            verified_by="" if agreement is None else f"{SEQUENCES} x {TOKENS} tokens{checked}: {agreement}",
            error=None if agreement is None else agreement.error,
            honest=None if agreement is None else agreement.honest,
            read_bytes=read, read_gb_s=None if rate is None else rate / 1e9,
            share_of_read=None if decode is None or rate is None else read * decode.median / rate,
            memory=measured.memory, parts=self.parts.get(label, {}),
            note="; ".join(filter(None, (self.notes.get(label, ""), measured.failed))),
        )  # fmt: skip

    def _file(self, shape: Shape) -> Path:
        """The GGUF file of this model, written unless --models has it."""
        place = self.request.models or self.folder
        precision = f"{self.precision.format}-{self.precision.dense}"
        path = place / f"{shape.name}-{shape.layers}-{precision}.gguf"
        if not path.exists():
            part = self.folder / f"{path.name}.part"
            bytes_of = size(shape.file_bytes(self.precision.format, self.precision.dense))
            display = GenerateDisplay(self.err, stream=None, as_json=False)
            with display.doing(f"writing {shape.name}, {self.precision}, {bytes_of}") as report:
                gguf_files.write(
                    part, shape, self.source, self.precision.format, self.precision.dense,
                    progress=lambda done, whole: report(done, whole, f"writing {shape.name}, {self.precision}"),
                )  # fmt: skip
            shutil.move(part, path)
        return path

    def _forget(self, path: Path) -> None:
        if self.request.models is None:
            path.unlink(missing_ok=True)

    def _judge(self, path: Path, loaded: dict[str, EngineProcess], stack: contextlib.ExitStack) -> None:
        """Compare every engine's logits with the golden. Engines stay loaded if they run the same file and all fit."""
        whole = self.room.checked == self.shape.layers
        keep = whole and self.room.together
        shape = self.shape.cut(self.room.checked)
        file = path if whole else self._file(shape)
        begun = self._begun(self.engines, file, shape, stack) if keep else {}
        try:
            with self._doing("the plain model in float64", 1 + len(self.engines)) as step:
                draw, process = random.Random(1), peers.golden(self.setting, file, shape, self.folder)
                try:
                    process.answer()
                    process.ask("load")
                    ids = [draw.randrange(shape.vocabulary) for _ in range(SEQUENCES * TOKENS)]
                    judge = Judge(process, self.folder, [ids[k::SEQUENCES] for k in range(SEQUENCES)])
                    step("")
                    arithmetics = {peer.arithmetic(self.precision) for peer in self.engines.values()}
                    for each in sorted(arithmetics, key=lambda a: (a.packs, a.dtype), reverse=True):  # float32 first
                        judge.prepare(each)
                finally:
                    process.close()
                for label, peer in self.engines.items():
                    step(f"checking {label}")
                    try:
                        engine = self._start(peer, file, shape, begun.get(label))
                        if keep:
                            stack.callback(engine.close)
                            loaded[label] = engine
                        self.agreements[label] = judge.judge(engine, peer.arithmetic(self.precision))
                        if not keep:
                            engine.close()
                    except EngineError as error:
                        self.measured[label].failed = str(error)
        finally:
            if not whole:
                self._forget(file)

    def _begun(
        self, labels: Iterable[str], file: Path, shape: Shape, stack: contextlib.ExitStack
    ) -> dict[str, EngineProcess]:
        """The processes of the engines in Python, which import torch at the same time."""
        begun = {}
        for label in labels:
            if (peer := self.engines[label]).in_python:
                begun[label] = peer.start(file, shape, self.precision, self.folder)
                stack.callback(begun[label].close)
        return begun

    def _start(self, peer: Peer, file: Path, shape: Shape, begun: EngineProcess | None = None) -> EngineProcess:
        """A loaded engine. Its memory is that of a process which runs the whole model."""
        process = begun or peer.start(file, shape, self.precision, self.folder)
        try:
            ready = process.ready()
            answer = process.ask("load") if peer.in_python else ready
            notes = [answer.get("note"), peers.beyond(self.setting.level, ready.get("system", ""))]
            if any(notes):
                self.notes[peer.label] = "; ".join(filter(None, notes))
            if shape == self.shape:
                self.measured[peer.label].watch(process)
        except BaseException:
            process.close()
            raise
        return process

    def _time(self, path: Path, loaded: dict[str, EngineProcess], stack: contextlib.ExitStack) -> None:
        starts: dict[str, Callable[..., EngineProcess]] = {
            label: partial(self._start, peer, path, self.shape)
            for label, peer in self.engines.items()
            if not self.measured[label].failed
        }
        number, count = self.request.rounds, self.request.tokens
        with self._doing("timing", number * len(starts)) as step:
            keep = None
            if self.room.together:
                begun = self._begun([label for label in starts if label not in loaded], path, self.shape, stack)
                for process in begun.values():  # an engine that is loaded may measure the machine
                    with contextlib.suppress(EngineError):  # `_start` meets it again
                        process.ready()
                for label, start in starts.items():
                    try:
                        if label not in loaded:
                            loaded[label] = start(begun=begun.get(label))
                            stack.callback(loaded[label].close)
                        step(f"warming up {label}", 0)
                        warm(loaded[label], self.prompt, count)
                    except EngineError as error:
                        self.measured[label].failed = str(error)
                keep = loaded
            step("timing in turns", 0)
            rounds(starts, self.measured, number, self.prompt, count, partial(step, "timing in turns"),
                   self._measure_reads, keep=keep)  # fmt: skip
            for label, peer in self.engines.items():
                if peer.has_parts and not self.measured[label].failed:
                    step(f"where the time of {label} goes", 0)
                    self._divide(label, starts[label], loaded.get(label))

    def _measure_reads(self) -> None:
        """Once before each round, because the rate changes with what others do on the machine's host."""
        threads, megabytes = self.setting.threads, megabytes_beyond_caches()
        self.reads.append(native.measure("read", threads=threads, seconds=0.2, megabytes=megabytes))

    def _divide(self, label: str, start: Callable[[], EngineProcess], process: EngineProcess | None) -> None:
        """Seconds of a token in each part, from a run of its own, because its clocks take time."""
        own = process is None
        try:
            engine = start() if process is None else process
            try:
                answer = engine.ask("parts", min(PART_TOKENS, self.request.tokens), self.prompt[:BEFORE])
                self.parts[label] = answer["parts"]
            finally:
                if own:
                    engine.close()
        except EngineError as error:
            self.notes[label] = f"its time could not be divided: {error}"

    @contextlib.contextmanager
    def _doing(self, task: str, total: int) -> Iterator[Callable[..., None]]:
        """A progress bar on a terminal; yields step(text, advance=1)."""
        if not self.err.is_terminal:
            self.err.print(f"[dim]{task}: {self.shape.name}, {self.precision}[/]")
            yield lambda text="", advance=1: None
            return
        count = TextColumn("{task.completed} of {task.total}")
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), count, TimeRemainingColumn())
        with Progress(*columns, console=self.err, transient=True) as bar:
            number = bar.add_task(task, total=total)

            def step(text: str = "", advance: int = 1) -> None:
                bar.update(number, advance=advance, description=text or task)

            yield step
