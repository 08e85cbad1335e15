"""The data of a run: settings, results, and the arguments of one case."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..declare.target import Target
from .interpreter import Interpreted
from .memory import Overrun
from .memory_marks import NAN_FILL

USUAL, NO_GRAD, INFERENCE, THREAD = "", "with gradients off", "in inference mode", "in another thread"  # of a call


@dataclass(frozen=True)
class PlainBackward:
    """The backward of a plain call, through `.backward()`, as training runs it.

    number  of the call
    wants   the inputs that require a gradient; None: all that can have one
    views   these inputs are results of an operation, no leaves
    added   `.grad` holds zeros before the call, as after `zero_grad(set_to_none=False)`, instead of None
    """

    number: int
    wants: tuple[str, ...] | None = None
    views: bool = False
    added: bool = False


@dataclass(frozen=True)
class OpenGraphs:
    """Forwards whose graphs are all open before the first backward runs, as where several losses are summed up.

    graphs  (arguments, numbered as in `PlainCalls.schedule`, power of two that multiplies its output gradients)
    order   of the backwards
    held    arguments of further forwards, whose graphs stay open meanwhile and get no backward
    """

    graphs: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlainCalls:
    """Calls as a user makes them: no guard bands, no poison, no dispatch mode, no stages; one tensor per input for all.

    others      the arguments of further calls, beside those of the run
    schedule    for each call, which arguments: 0 those of the run, 1 the first of `others`, ...
    under       for the first calls, how: USUAL, NO_GRAD, INFERENCE or THREAD; all others are usual
    backward    the calls that also run the backward
    seconds     after which no further call starts
    watch       seconds for which the first results are watched afterwards; longer where threads were left running
    open        graphs that are open together, after these calls (None: none)
    shared      two inputs that are one tensor in a last call, and equal tensors in another one
    """

    others: tuple[Material, ...]
    schedule: tuple[int, ...]
    backward: tuple[PlainBackward, ...] = ()
    under: tuple[str, ...] = ()
    seconds: float = 0.1
    watch: float = 0.02
    open: OpenGraphs | None = None
    shared: tuple[str, ...] = ()


@dataclass
class OpenGraph:
    """What one of `OpenGraphs` gave. sent: the outputs that got a gradient."""

    outputs: dict[str, Tensor]
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    sent: tuple[str, ...] = ()


@dataclass
class Watched:
    """A tensor that the candidate returned or received, and what it holds as long as nobody writes to it."""

    name: str
    tensor: Tensor
    copy: Tensor


@dataclass
class PlainResults:
    """The results of plain calls; equal ones are one object.

    inputs   as their memory holds them at the end, for whoever knows what it held before the last call
    sent     call with a backward -> the outputs that got a gradient
    late     (call, result) whose memory changed after the call
    threads  left running
    open     of the open graphs, in the order of their forwards
    rewritten  of a graph whose results were written to before its backward; None where torch refuses that
    shared   results for two inputs that are equal tensors, and for one tensor as both
    kept     further calls whose gradients the caller kept
    overwritten  those of these gradients that a later backward wrote to
    watched  tensors to look at again later; they stay in the process of the calls
    """

    outputs: list[dict[str, Tensor]] = field(default_factory=list)
    grads: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    sent: dict[int, tuple[str, ...]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    late: list[tuple[int, str]] = field(default_factory=list)
    threads: int = 0
    open: list[OpenGraph] = field(default_factory=list)
    rewritten: OpenGraph | None = None
    shared: list[dict[str, Tensor]] = field(default_factory=list)
    kept: int = 0
    overwritten: list[str] = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """How often the candidate was called; open graphs have two more calls."""
        return len(self.outputs) + len(self.open) + 2 * bool(self.open) + len(self.shared) + self.kept


@dataclass(frozen=True)
class RunSettings:
    """Differences of a run from the plain one.

    fill             content of uninitialised memory: "nan", "dirt" or "zero"
    layouts          input, or "grad_<output>" -> "transposed", "stepped", "sliced" or "contiguous"
    cotangents       output -> gradient to send instead of the random one (with its own strides)
    backward_twice   run the backward a second time on the same graph
    threads          number of CPU threads (None: unchanged)
    backwards        Triton's interpreter runs the programs of each launch from the last to the first
    debug            `assay.tracing()` returns True
    substitute       stage -> value to continue with; also result -> value passed to the target's own backward
    fresh            call the target's `reset` first
    backward         False: forward only
    neighbour_sign   1, -1: bands hold large numbers of alternating sign, starting with this one; 0: bands hold NaN
    watch_seconds    time to watch the buffers of the forward after it has returned
    only_output      the only output that gets a gradient (None: all of them)
    between          the arguments of another call of the candidate, to be made between forward and backward
    keep             key under which the memory of the results is kept, for a later run to look at ("": not kept)
    earlier          key of a run that kept its results: read them again after the call in between
    plain            make these plain calls instead of a run
    """

    fill: str = NAN_FILL
    layouts: Mapping[str, str] = field(default_factory=dict)
    cotangents: Mapping[str, Tensor] = field(default_factory=dict)
    backward_twice: bool = False
    threads: int | None = None
    backwards: bool = False
    debug: bool = False
    substitute: Mapping[str, Tensor] = field(default_factory=dict)
    fresh: bool = True
    backward: bool = True
    neighbour_sign: int = 0
    watch_seconds: float = 0.0
    only_output: str | None = None
    between: Material | None = None
    keep: str = ""
    earlier: str = ""
    plain: PlainCalls | None = None


@dataclass
class CandidateRun:
    """The results of a run. Names: outputs `y`, saved outputs `saved.h`, gradients `x.grad`, stages by their own.

    names             of everything that the forward returned, including None
    second_grads      gradients of the second backward, if the settings asked for one
    changed           input or output gradient -> mask of the overwritten elements
    by_forward        those of them that the forward overwrote
    overwritten       output -> mask of the elements that the backward overwrote
    unwritten         tensor -> mask of the elements that still hold poison
    from_bands       tensor -> mask of the elements that hold bytes of a guard band
    aliases           pairs (result, tensor that it shares memory with)
    between           the run that the settings asked for between forward and backward
    earlier           results of the run `settings.earlier`, as its memory holds them after that call
    plain             results of the plain calls that the settings asked for; nothing else is set then
    live_outputs      outputs in the memory in which they were returned; live_grads: gradients likewise (empty if the
                      candidate ran in another process)
    called_tracing    the candidate called `assay.tracing()` and got False
    own_function      whether an autograd.Function of the candidate returned an output
    changed_settings  sentences about torch settings that the run left changed
    late_bytes        bytes of the forward's buffers that were written after it had returned
    reused            stage -> a later stage that overwrote its memory
    covered           stage that came in tiles -> mask of the elements that came
    flaws             stage that came in tiles -> why they are not one stage, which `stages` does not hold then
    """

    names: tuple[str, ...] = ()
    outputs: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    second_grads: dict[str, Tensor | None] | None = None
    stages: dict[str, Tensor] = field(default_factory=dict)
    cotangents: dict[str, Tensor] = field(default_factory=dict)
    saved: tuple[str, ...] = ()
    error: Exception | SystemExit | None = None
    phase: str = "forward"
    overruns: list[Overrun] = field(default_factory=list)
    changed: dict[str, Tensor] = field(default_factory=dict)
    by_forward: set[str] = field(default_factory=set)
    overwritten: dict[str, Tensor] = field(default_factory=dict)
    unwritten: dict[str, Tensor] = field(default_factory=dict)
    from_bands: dict[str, Tensor] = field(default_factory=dict)
    aliases: set[tuple[str, str]] = field(default_factory=set)
    between: CandidateRun | None = None
    earlier: dict[str, Tensor] = field(default_factory=dict)
    plain: PlainResults | None = None
    live_outputs: dict[str, Tensor] = field(default_factory=dict)
    live_grads: dict[str, Tensor] = field(default_factory=dict)
    called_tracing: bool = False
    own_function: bool = False
    late_bytes: int = 0
    reused: dict[str, str] = field(default_factory=dict)
    covered: dict[str, Tensor] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)
    changed_settings: list[str] = field(default_factory=list)
    interpreted: Interpreted = field(default_factory=Interpreted)

    def results(self) -> Iterator[tuple[str, str, Tensor | None]]:
        """(name, kind, tensor) of everything that a user receives: outputs, saved results, gradients."""
        for name, tensor in self.outputs.items():
            yield name, "saved" if name.startswith("saved.") else "output", tensor
        for name, grad in self.grads.items():
            yield name, "grad", grad


@dataclass(frozen=True)
class Material:
    """The arguments of a run: a target, inputs and scalars of one case, and the seed of the output gradients.

    order: names in the order of the case's dict, used for a callable without a readable signature.
    runs_on: the candidate's device where the tensors are on another one, that of the judge.
    """

    target: Target
    case: str
    sizes: Mapping[str, object]
    inputs: Mapping[str, Tensor]
    scalars: Mapping[str, object]
    seed: int
    nudged: bool = False  # honest runs also round their inputs by one unit
    order: tuple[str, ...] = ()
    runs_on: torch.device | None = None

    @property
    def supply(self) -> dict[str, object]:
        return self.ordered(self.inputs)

    def ordered(self, inputs: Mapping[str, object]) -> dict[str, object]:
        """These inputs and the scalars, in the order of the case's dict."""
        every = {**inputs, **self.scalars}
        return {n: every[n] for n in (*self.order, *every)}

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.inputs.values()), torch.device("cpu"))

    @property
    def candidate_device(self) -> torch.device:
        return self.runs_on or self.device

    def with_inputs(self, changed: Mapping[str, Tensor]) -> Material:
        return replace(self, inputs={**self.inputs, **changed})

    def cotangent(self, name: str, like: Tensor, power: int = 0) -> Tensor:
        """2^power * N(0, 1) in the output's dtype, equal in every run and on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.case}/{self.seed}/grad_{name}".encode()))
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)
        return (drawn * 2.0**power if power else drawn).to(like.device, non_blocking=like.is_cuda)
