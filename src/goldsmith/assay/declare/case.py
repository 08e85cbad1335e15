"""Cases: named, seeded, device-independent draws of a target's inputs.

    @assay.case(T=[0, 1, 13], D=[32, 100], why="odd sizes")
    def tokens(make, T, D):
        return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}

`tokens` is then a list of six `Case`: every combination of the sizes. Tensors in the dict are inputs, everything else
is a scalar.
"""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import TargetError, TargetTypeError
from ..support import memory_errors
from ..support.random_state import seeded_generators
from .domain import Where, admits, of_sizes_alone
from .problem_steps import step


class Make:
    """The first argument of a case's function: draws tensors on the CPU from one seeded generator, rounds them to
    `dtype` and moves them to `device`.

    So the same seed gives the same values on every device, and float32 and bfloat16 cases differ only by rounding.

    dtype      dtype in which the check wants floating-point inputs; the argument `dtype` of a method overrides it
    device     device of the check
    generator  the seeded torch.Generator, for draws that no method makes: torch.randn(3, generator=make.generator)

    Sizes are given as numbers or as one list: `make.normal(3, 4)`, `make.normal([3, 4])`.
    """

    _repeating = 0  # further calls of `integers` whose numbers repeat

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int):
        self.dtype, self.device = dtype, torch.device(device)
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """std * N(0, 1): normally distributed values with mean 0."""
        return self._float(torch.randn(_shape(shape), generator=self.generator) * std, dtype)

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """U[0, 1): evenly distributed values, below 1 even after rounding to a 16-bit dtype."""
        drawn = self._float(torch.rand(_shape(shape), generator=self.generator), dtype)
        return torch.where(drawn < 1, drawn, torch.zeros_like(drawn))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Random whole numbers in [low, high), for indices and labels; int64 unless `dtype` says otherwise."""
        drawn = torch.randint(low, high, _shape(shape), generator=self.generator)
        if self._repeating:
            self._repeating -= 1
            drawn = self._repeated(drawn)
        return drawn.to(self.device, dtype)

    def permutation(self, n: int) -> Tensor:
        """The numbers 0 to n-1 in random order, int64."""
        return torch.randperm(n, generator=self.generator).to(self.device)

    def offsets(self, parts: int, total: int, empty: int = 1) -> Tensor:
        """The parts + 1 boundaries of random segments of 0..total, int64; `empty` of them (if possible) have length 0.

        For grouped kernels: segment i is `offsets[i]` to `offsets[i + 1]`.
        """
        full = max(parts - empty, min(parts, 1))
        owner = torch.randperm(parts, generator=self.generator)[:full]
        sizes = torch.zeros(parts, dtype=torch.int64)
        if full:
            drawn = owner[torch.randint(0, full, (total,), generator=self.generator)]
            sizes.index_add_(0, drawn, torch.ones(total, dtype=torch.int64))
        return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(self.device)

    def tied(self, *shape: int, levels: int = 8, dtype: torch.dtype | None = None) -> Tensor:
        """Values from `levels` evenly spaced numbers in [-1, 1), so that many are equal in every dtype; for top-k."""
        drawn = torch.randint(0, levels, _shape(shape), generator=self.generator)
        return self._float(drawn.double() * (2.0 / levels) - 1.0, dtype)

    def ones(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """1 everywhere."""
        return self.full(*shape, value=1.0, dtype=dtype)

    def full(self, *shape: int, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """`value` everywhere, rounded to the dtype."""
        return self._float(torch.full(_shape(shape), value, dtype=torch.float64), dtype)

    def _repeated(self, drawn: Tensor) -> Tensor:
        """Only the numbers of the first half of the last axis that is longer than 1, each for a random element."""
        axis = next((i for i in reversed(range(drawn.dim())) if drawn.shape[i] > 1), None)
        if axis is None:
            return drawn
        half = (drawn.shape[axis] + 1) // 2
        return drawn.gather(axis, torch.randint(0, half, drawn.shape, generator=self.generator))

    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"make has no {name!r}; it has: {', '.join(n for n in vars(Make) if n[0] != '_')}")

    def _float(self, drawn: Tensor, dtype: torch.dtype | None) -> Tensor:
        return drawn.to(self.dtype if dtype is None else dtype).to(self.device, non_blocking=self.device.type == "cuda")


def _shape(shape: tuple) -> tuple[int, ...]:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], list | tuple | torch.Size) else shape
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"sizes must be whole numbers >= 0, got {size!r} in {list(sizes)}")
    return sizes


Draw = Callable[..., Mapping[str, Any]]
_MOST_REPEATING = 32  # calls of `integers` in one draw, so that a function ends which draws until no number repeats
LARGE = "large"  # tag of a case that only a GPU runs, and that is drawn there, one tensor after another


@dataclass(frozen=True)
class Case:
    """A named set of sizes with the function that draws its inputs; `build` returns equal values for equal seeds."""

    name: str
    draw: Draw = field(repr=False, compare=False)
    sizes: Mapping[str, object] = field(default_factory=dict)
    why: str = ""
    tags: tuple[str, ...] = ()
    salt: int = 0
    given: bool = False
    where: Where | None = field(default=None, repr=False, compare=False)
    repeating: bool = False

    def build(
        self,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
        make: type[Make] = Make,
    ) -> dict:
        """The dict of inputs and scalars, drawn by an object of class `make` (benchmarks draw on the device).

        The seed also fixes what the function draws from torch's, numpy's and Python's own generators.
        """
        if self.repeating:
            with suppress(TargetError):
                drawn = self._drawn(dtype, device, seed, make)
                if self.admits(drawn):
                    return drawn
            return replace(self, repeating=False).build(dtype, device, seed, make)
        drawn = self._drawn(dtype, device, seed, make)
        if not self.admits(drawn):
            raise TargetError(f"case {self.name}: draws inputs that `where` excludes; draw others, or widen `where`")
        return drawn

    def _drawn(self, dtype: torch.dtype, device: str | torch.device, seed: int, make: type[Make]) -> dict:
        mixed = zlib.crc32(f"{self.name}/{seed}/{self.salt}".encode())
        source = make(dtype, device, mixed)
        source._repeating = _MOST_REPEATING if self.repeating else 0
        try:
            # torch's own generator must not draw the numbers of `make`: two inputs would be equal
            with (
                seeded_generators(zlib.crc32(f"global/{mixed}".encode()), torch.device(device)),
                step(f"the inputs of its case {self.name}"),
            ):
                drawn = self.draw(source, **self.sizes)
        except (TargetError, ImportError):
            raise
        except (Exception, SystemExit) as error:
            if memory_errors.out_of_memory(error):
                raise
            raise TargetError(f"case {self.name}: could not be drawn: {type(error).__name__}: {error}") from error
        if not isinstance(drawn, dict):
            raise TargetError(f"case {self.name}: must return a dict of inputs and scalars, got {type(drawn).__name__}")
        for name, value in drawn.items():
            _check_value(self.name, name, value)
        return self._shuffled(drawn, mixed) if self.given and self.salt else drawn

    def admits(self, supply: Mapping[str, object], sizes: Mapping[str, object] | None = None) -> bool:
        """Whether the kernel must take these inputs and scalars, as far as `where` says."""
        if self.where is None:
            return True
        with step(f"`where` of its case {self.name}"):
            return admits(self.where, {**(self.sizes if sizes is None else sizes), **supply})

    @property
    def own_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of the floating-point tensors of a literal dict, which are not drawn; empty for other cases."""
        if not self.given:
            return ()
        tensors = [v for v in self.draw(Make(torch.float32, "cpu", 0)).values() if isinstance(v, Tensor)]
        return tuple(dict.fromkeys(t.dtype for t in tensors if t.is_floating_point()))

    def variant(self, salt: int, *, repeating: bool = False) -> Case:
        """The same case with other values: another draw, or the rows of given tensors in another order.

        repeating: a row of `make.integers` holds a number twice, unless `where` excludes that.
        """
        return replace(self, salt=salt, repeating=repeating)

    def _shuffled(self, drawn: dict, seed: int) -> dict:
        generator = torch.Generator().manual_seed(seed)

        def shuffle(value: object) -> object:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
                return value
            return value[torch.randperm(len(value), generator=generator).to(value.device)]

        return {name: shuffle(value) for name, value in drawn.items()}

    def __str__(self) -> str:
        return self.name


def _check_value(case: str, name: object, value: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise TargetError(f"case {case}: {name!r} is not a valid parameter name")
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        raise TargetError(f"case {case}: {name!r} holds several tensors; give each its own name")
    if type(value).__module__ == "numpy" and hasattr(value, "shape") and value.shape:
        raise TargetError(f"case {case}: {name!r} is a numpy array; pass a tensor, torch.from_numpy(...)")
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        kinds = {"quantized": value.is_quantized, "nested": value.is_nested, "meta": value.is_meta}
        kind = next((k for k, it_is in kinds.items() if it_is), str(value.layout).removeprefix("torch."))
        raise TargetError(
            f"case {case}: {name!r} is a tensor of kind {kind}, which cannot be judged; pass a dense tensor"
        )
    if value.is_complex():
        raise TargetError(
            f"case {case}: {name!r} is complex, which cannot be judged; pass its real and imaginary parts"
        )


def case(
    *, tags: Iterable[str] = (), why: str = "", where: Where | None = None, **sizes: object
) -> Callable[[Draw], list[Case]]:
    """Decorator that turns `f(make, **sizes) -> dict` into a list of cases, one for every combination of the sizes.

    where  what the kernel may rely on: a function of sizes, scalars and inputs by name that is True for what it must
           take, as in where=lambda N, p: N % 4 == 0 and bool((p >= 0).all()). Combinations of sizes that it excludes
           are no cases, and no probe, no smaller case and no patch is tried on inputs that it excludes
    """
    if isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise TargetTypeError(f"tags: expected a tuple of words, got {tags!r}")
    if not isinstance(why, str):
        raise TargetTypeError(f"why: expected a text, got {why!r}")
    if where is not None and not callable(where):
        raise TargetTypeError(f"where: expected a function of sizes and inputs, got {where!r}")
    lists = {name: list(v) if isinstance(v, list | tuple | range) else [v] for name, v in sizes.items()}
    for name, values in lists.items():
        if not values:
            raise TargetError(f"case: {name}=[] leaves no case; give at least one value")

    def decorate(draw: Draw) -> list[Case]:
        if not callable(draw):
            raise TargetTypeError(
                f"case: expected a function of make and the sizes, got {type(draw).__name__} {draw!r}"[:200]
            )
        name = getattr(draw, "__name__", "case")
        try:
            inspect.signature(draw).bind(None, **{k: v[0] for k, v in lists.items()})
        except TypeError as error:
            takes = ", ".join(inspect.signature(draw).parameters)
            raise TargetError(
                f"case {name}: called as {name}(make, {', '.join(lists)}), takes ({takes}): {error}"
            ) from error
        every = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
        combinations = [s for s in every if where is None or not of_sizes_alone(where, s) or admits(where, s)]
        if not combinations:
            raise TargetError(f"case {name}: `where` excludes every combination of the sizes; give others, or widen it")
        return [_one(name, draw, chosen, tuple(tags), why, where) for chosen in combinations]

    return decorate


def _one(name: str, draw: Draw, sizes: dict[str, object], tags: tuple[str, ...], why: str, where: Where | None) -> Case:
    label = ",".join(f"{k}={v}" for k, v in sizes.items())
    return Case(f"{name}[{label}]" if label else name, draw, sizes, why, tags, where=where)


def given(tensors: Mapping[str, object], name: str = "given") -> Case:
    """One case from a literal dict; floating-point tensors keep their dtype."""
    values = {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in tensors.items()}

    def draw(make: Make) -> dict[str, object]:
        return {n: v.to(make.device).clone() if isinstance(v, Tensor) else v for n, v in values.items()}

    return Case(name, draw, given=True)


def as_cases(cases: object) -> tuple[Case, ...]:
    """Any value of `cases=` (a list from `@case`, lists of these, a Case, a literal dict) as a flat tuple of cases."""
    if isinstance(cases, Case):
        return (cases,)
    if isinstance(cases, Mapping):
        if not cases:
            raise TargetError("cases: the dict is empty; pass the inputs by name, {'x': torch.randn(3, 4)}")
        return (given(cases),)
    if isinstance(cases, list | tuple):
        literal = [item for item in cases if isinstance(item, Mapping)]
        if len(literal) > 1:  # a dict has no name of its own
            numbers = itertools.count(1)
            cases = [given(c, f"given{next(numbers)}") if isinstance(c, Mapping) else c for c in cases]
        flat = [c for item in cases for c in as_cases(item)]
        if not flat:
            raise TargetError("cases: the list is empty; pass at least one case")
        names = [c.name for c in flat]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise TargetError(f"cases: {twice[0]!r} occurs more than once; every case needs its own name")
        return tuple(flat)
    hint = "; put @assay.case(...) with its sizes above the function" if inspect.isfunction(cases) else ""
    hint = "; name it as the kernel's parameter, {'x': tensor}" if isinstance(cases, Tensor) else hint
    raise TargetTypeError(
        f"cases: expected @assay.case functions, a list of them or a dict of tensors, got {type(cases).__name__}{hint}"
    )
