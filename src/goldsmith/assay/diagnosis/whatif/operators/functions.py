"""Functions applied where the golden has none, another rounding to integers, another constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments, with_result

_MADE = frozenset("mul div add sub mean sum amax exp sigmoid tanh mm bmm var addmm".split())
_PUT_IN: tuple[tuple[str, str, Callable[[Tensor], Tensor]], ...] = (
    ("sqrt", "wrong_factor", torch.sqrt),
    ("square", "wrong_factor", torch.square),
    ("exp", "wrong_factor", torch.exp),
    ("log", "wrong_factor", torch.log),
    ("relu", "nan_swallowed", torch.relu),
    ("tanh", "wrong_factor", torch.tanh),
    ("sigmoid", "wrong_factor", torch.sigmoid),
)
_BENT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu by tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "x sigmoid(1.702 x)": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu squared": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "leaky relu": torch.nn.functional.leaky_relu,
}
_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "trunc": torch.trunc,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "floor(x + 1/2)": lambda x: torch.floor(x + 0.5),
}


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name.rstrip("_") in _WHOLE:
        yield from _rounded(call)
    if call.name.rstrip("_") in _BENT and floating(call.args[0]):
        yield from _bent(call)
    if call.name in ("mul", "div") and len(call.args) > 1 and isinstance(call.args[1], int | float):
        yield from _constants(call, float(call.args[1]))
    if not call.backward and call.name in _MADE and floating(call.out) and call.out.numel():
        yield from _put_in(call)


def _rounded(call: Node) -> Iterator[Change]:
    mine = call.name.rstrip("_")
    for name, other in _WHOLE.items():
        if name == mine:
            continue
        cause = "truncating_store" if name in ("trunc", "floor") else "scale_bias"
        text = f"{name} stands where {call.expression} has {mine}"
        yield Change(cause, text, call.index, instead(lambda x, *a, f=other, **k: f(x)), {"function": name}, 0.6)
    text = f"{call.expression} is left out"
    yield Change("missing_term", text, call.index, instead(lambda x, *a, **k: x.clone()), {"function": mine}, 0.55)


def _bent(call: Node) -> Iterator[Change]:
    """Another activation."""
    mine = call.name.rstrip("_")
    mine = "gelu by tanh" if mine == "gelu" and call.kwargs.get("approximate") == "tanh" else mine
    for name, other in _BENT.items():
        if name != mine:
            text = f"{name} stands where the golden has {mine}, of {call.operand(0) or 'an operand'}"
            change = instead(lambda x, *a, f=other, **k: f(x))
            yield Change("wrong_factor", text, call.index, change, {"function": name}, 0.4)


def _constants(call: Node, number: float) -> Iterator[Change]:
    """Changes of constants for goldens that round afterwards, where no gradient leads to the best number."""
    if number != round(number) or abs(number) < 3:
        return
    power = 2.0 ** round(torch.tensor(abs(number)).log2().item())
    for other in dict.fromkeys((number + 1, number - 1, power, power - 1, 2 * number, number / 2)):
        if other != number:
            text = f"{other:g} stands for {number:g} in {call.expression}"
            change = with_arguments(lambda args, c=other: replaced(args, 1, c))
            params = {"factor": f"{other:g}", "named": f"{other:g}/{number:g}", "value": other / number}
            yield Change("wrong_factor", text, call.index, change, params, 0.55, also=("scale_bias", "off_by_one"))


def _put_in(call: Node) -> Iterator[Change]:
    if bool(((call.out >= 0) & (call.out <= 1)).all()):  # a share whose complement is taken
        text = f"1 - {call.expression} stands in place of {call.expression}"
        params = {"factor": call.expression, "term": call.expression}
        change = with_result(lambda t: 1 - t)
        yield Change("swapped_results", text, call.index, change, params, 0.45, also=("wrong_factor", "missing_term"))
    for name, cause, f in _PUT_IN:
        if not call.name.startswith(name):
            text = f"{name} is taken of {call.expression}, and the golden takes none"
            yield Change(cause, text, call.index, with_result(f), {"function": name}, 0.25, also=("repeated_term",))
