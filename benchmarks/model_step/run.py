"""Runs the ways of `python -m benchmarks.model_step` one after another, and writes a row for each."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from triton.errors import TritonError

from goldsmith.cli.bench.session import Session, device_name, session
from goldsmith.cli.bench.verifier import Verifier
from goldsmith.cli.terminal import Failure
from goldsmith.core.op import Op

from ..common.needs import refuse_interpreter
from ..common.rows import RunRow, installed
from .ways import NOTES, OURS, WAYS, Step, missing, model

PACKAGES = ("transformers", "liger-kernel", "triton")
OPERATORS = ("mhc.pre", "mhc.post", "mhc.connect_backward", "mhc.head")
WARM = 3
LEGEND = (
    "Milliseconds of a step, median; peak memory of the timed steps, weights and AdamW's state included. error: of the "
    "first gradients against those of plain, |difference| / |plain|; experts of a token may differ in bfloat16."
)


@dataclass(frozen=True)
class StepRequest:
    """The options of the command line."""

    ways: tuple[str, ...] = ()
    dim: int = 4096
    layers: int = 4
    experts: int = 16
    rows: int = 2
    length: int = 2048
    steps: int = 10
    dtype: str = "bfloat16"
    device: str | None = None
    verify: bool = True
    commit: str = ""


@dataclass(frozen=True, kw_only=True)
class StepRow(RunRow):
    """One way to compute the model's step. first_s: the first step, with all compilation; peak_bytes: None on a CPU.

    error: of the first gradients against those of plain, |difference| / |plain|
    """

    op: str = "model_step"
    peer: str
    sizes: dict[str, int]
    dtype: str
    step_ms: float | None = None
    p10: float | None = None
    p90: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    first_s: float | None = None
    runs: int = 0
    peak_bytes: int | None = None
    loss: float | None = None


def run(request: StepRequest, out: str | None) -> int:
    """Run the command; returns the exit status."""
    refuse_interpreter()
    device = device_name(request.device)
    ways = request.ways or tuple(way for way in WAYS if missing(way, device) is None)
    for way in ways:
        why = f"known: {', '.join(WAYS)}" if way not in WAYS else missing(way, device)
        if why is not None:
            raise Failure(f"--way {way}: {why}.")
    with session(device, out, request.commit) as current:
        current.warn_if_busy()
        verdict = _verdict(request, device, current, ways)
        gradients: dict[str, Tensor] = {}
        for way in ways:
            row = _measured(request, way, device, gradients)
            if way in OURS:
                row = replace(row, verified=verdict[0], verified_by=verdict[1])
            row = row.under(current, installed(PACKAGES))
            current.write([row])
            current.shown += 1
            current.stream.print(_table(row))
    return current.end(LEGEND)


def _verdict(request: StepRequest, device: str, current: Session, ways: tuple[str, ...]) -> tuple[bool | None, str]:
    """(passed, how it was checked) of the operators that ours consists of."""
    if not request.verify or not set(ways) & set(OURS):
        return None, "not verified (--no-verify)"
    verifier = Verifier(True, device, current.err)
    verifier.verify_all([(Op.get(name), getattr(torch, request.dtype)) for name in OPERATORS], "auto")
    wrong = [why for passed, why in verifier.verdicts.values() if not passed]
    return (False, wrong[0]) if wrong else (True, f"goldsmith verify {' '.join(OPERATORS)}, {request.dtype}")


def _measured(request: StepRequest, way: str, device: str, gradients: dict[str, Tensor]) -> StepRow:
    """The row of one way. The gradients of plain's first step are left in `gradients`."""
    sizes = {name: getattr(request, name) for name in ("dim", "layers", "experts", "rows", "length")}
    row = StepRow(peer=way, sizes=sizes, dtype=request.dtype, note=NOTES.get(way, ""))
    torch._dynamo.reset()
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    try:
        made = model(request.dim, request.layers, request.experts, getattr(torch, request.dtype), device)
        return _Trainer(made, WAYS[way](made), request, device).row(row, gradients)
    except (RuntimeError, TritonError) as error:  # out of memory, or a compiler that refuses
        return replace(row, note=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")


class _Trainer:
    """Steps of one model, with their times."""

    def __init__(self, made: nn.Module, call: Step, request: StepRequest, device: str) -> None:
        self.made, self.call, self.request, self.device = made, call, request, device
        draw = torch.Generator().manual_seed(1)
        words = made.get_input_embeddings().num_embeddings
        self.ids = torch.randint(2, words, (request.rows, request.length), generator=draw).to(device)
        self.optimizer = torch.optim.AdamW(made.parameters(), lr=1e-5)
        self.on_gpu = device.startswith("cuda")

    def row(self, row: StepRow, gradients: dict[str, Tensor]) -> StepRow:
        began = time.perf_counter()
        loss = self._gradients()
        self._wait()
        row = replace(row, first_s=time.perf_counter() - began, loss=float(loss))
        own = {name: p.grad for name, p in self.made.named_parameters() if p.grad is not None}
        if row.peer == "plain":
            gradients.update({name: gradient.cpu() for name, gradient in own.items()})
        elif gradients:
            row = replace(row, error=_difference(own, gradients))
        self.optimizer.zero_grad()
        del own
        for _ in range(WARM):
            self._step()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        parts = [self._step() for _ in range(self.request.steps)]
        whole = sorted(sum(times) for times in parts)
        forward, backward, optimizer = (statistics.median(times) for times in zip(*parts, strict=True))
        return replace(
            row, step_ms=statistics.median(whole), p10=whole[round(0.1 * (len(whole) - 1))],
            p90=whole[round(0.9 * (len(whole) - 1))], forward_ms=forward, backward_ms=backward, optimizer_ms=optimizer,
            runs=len(whole), peak_bytes=torch.cuda.max_memory_allocated() if self.on_gpu else None,
        )  # fmt: skip

    def _gradients(self) -> Tensor:
        loss = self.call(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def _step(self) -> tuple[float, float, float]:
        """Milliseconds of forward, backward and optimizer, by the wall; each waits for the device."""
        times = [self._now()]
        loss = self.call(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        times.append(self._now())
        loss.backward()
        times.append(self._now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(self._now())
        forward, backward, optimizer = (1e3 * (b - a) for a, b in zip(times, times[1:], strict=False))
        return forward, backward, optimizer

    def _now(self) -> float:
        self._wait()
        return time.perf_counter()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def _difference(own: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> float:
    """|own - others| / |others| over all parameters; one that is absent counts as 0."""
    apart = size = 0.0
    for name, other in others.items():
        mine = own.get(name)
        wide = other.double()
        apart += float((wide if mine is None else mine.cpu().double() - wide).square().sum())
        size += float(wide.square().sum())
    return (apart / size) ** 0.5 if size else 0.0


def _table(row: StepRow) -> Table:
    table = Table(title=row.peer, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in ("step", "forward", "backward", "optimizer", "peak", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    times = (row.step_ms, row.forward_ms, row.backward_ms, row.optimizer_ms)
    cells = ["-" if value is None else f"{value:,.1f}" for value in times]
    cells.append("-" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f} GiB")
    cells.append("-" if row.error is None else f"{row.error:.1e}")
    shown = {True: "[green]verified[/]", False: f"[red]WRONG: {escape(row.verified_by)}[/]", None: escape(row.note)}
    table.add_row(*cells, shown[row.verified])
    return table
