"""Smaller sizes for a file whose own sizes are too large to judge: its constants are halved, the largest first."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

ELEMENTS = 2**12  # of inputs and weights together: a check runs the golden dozens of times, in float64
SECONDS = 0.25  # of one forward in float32
SMALLEST = 4  # no constant becomes smaller than this: small ones are widths of kernels, groups, strides
FAR = 64  # a module with more than this many times the elements is not run
TRIES = 60

Weigh = Callable[[ModuleType], tuple[int, Callable[[], object]]]


def constants(module: ModuleType, content: str) -> dict[str, object]:
    """The module's whole-number constants: name -> value, for numbers and for tuples of them."""
    return {name: value for name in _assigned(content) if _sizes(value := getattr(module, name, None))}


def spelt(sizes: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def shrunk(module: ModuleType, content: str, elements: int, weigh: Weigh) -> tuple[ModuleType, dict[str, object]]:
    """(module, changed constants): the file itself if it is small enough, otherwise a copy with smaller constants.

    If none are small enough, it is the copy with the smallest constants that the file runs with.
    """
    if _fits(module, elements, weigh):
        return module, {}
    own = sizes = constants(module, content)
    smallest, frozen, fits = module, set[tuple[str, ...]](), False
    for _ in range(TRIES):
        chosen = next((names for names in _largest_ones(sizes) if names not in frozen), None)
        if chosen is None or fits:
            break
        tried = {n: _halved(v) if n in chosen else v for n, v in sizes.items()}
        try:
            smaller = _with(module, content, {n: v for n, v in tried.items() if v != own[n]})
            fits = _fits(smaller, elements, weigh)
        except Exception:  # noqa: BLE001  the file's own code, with sizes that it was not written for
            frozen.add(chosen)
            continue
        sizes, smallest = tried, smaller
    return smallest, {n: v for n, v in sizes.items() if v != own[n]}


def _fits(module: ModuleType, elements: int, weigh: Weigh) -> bool:
    """Whether inputs and weights are few, and a forward is quick; raises where the module cannot run."""
    if _declared_elements(module) > FAR * elements:
        return False  # not worth drawing
    total, call = weigh(module)
    if total > FAR * elements:
        return False
    began = time.perf_counter()
    with torch.no_grad():
        call()
    return total <= elements and time.perf_counter() - began <= SECONDS


def _declared_elements(module: ModuleType) -> int:
    """Elements of the inputs, counted without memory for them; 0 where that is not possible."""
    try:
        with torch.device("meta"):
            inputs = module.get_inputs()
        return sum(t.numel() for t in inputs if isinstance(t, torch.Tensor))
    except Exception:  # noqa: BLE001  some draws need values
        return 0


def _assigned(content: str) -> list[str]:
    try:
        tree = ast.parse(content)
    except SyntaxError:
        return []
    names = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        names += [t.id for t in targets if isinstance(t, ast.Name)]
    return list(dict.fromkeys(names))


def _sizes(value: object) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(_sizes(v) and not isinstance(v, tuple | list) for v in value)
    return isinstance(value, int) and not isinstance(value, bool)


def _largest(value: Any) -> int:
    return max(value) if isinstance(value, tuple | list) else int(value)


def _largest_ones(sizes: Mapping[str, object]) -> list[tuple[str, ...]]:
    """Constants to halve, in the order to try: those that are equal and largest together, then each alone."""
    able = {name: _largest(value) for name, value in sizes.items() if _largest(value) >= 2 * SMALLEST}
    order = sorted(able, key=lambda name: -able[name])
    largest = tuple(name for name in order if able[name] == able[order[0]])
    return [largest, *((name,) for name in order)]


def _halved(value: Any) -> Any:
    if isinstance(value, tuple | list):
        largest = max(value)
        return type(value)(v // 2 if v == largest else v for v in value)
    return value // 2


def _with(module: ModuleType, content: str, sizes: Mapping[str, object]) -> ModuleType:
    """The file executed again with other constants: each assignment to one of these names assigns the new value."""

    class Replaced(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            if len(names) == 1 and names[0] in sizes:
                return ast.copy_location(ast.Assign(node.targets, _literal(sizes[names[0]])), node)
            return node

    tree = ast.parse(content)
    tree.body = [Replaced().visit(node) if isinstance(node, ast.Assign) else node for node in tree.body]
    copy = ModuleType(module.__name__)
    copy.__file__ = getattr(module, "__file__", None)
    exec(compile(ast.fix_missing_locations(tree), str(copy.__file__ or "problem"), "exec"), vars(copy))
    return copy


def _literal(value: object) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body
