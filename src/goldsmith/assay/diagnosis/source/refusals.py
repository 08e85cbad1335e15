"""Refusals: edits that are no patch, whatever they pass, since they delete the computation; and edits in doubt."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping

from .reading.candidate_source import CandidateSource, NativeSource

_GUARDS = ("clamp", "clamp_", "clamp_min", "clamp_max", "clip", "nan_to_num")


def refusal(source: CandidateSource, texts: Mapping[str, str]) -> str:
    """Why the edited texts are no patch, or ""."""
    if isinstance(source, NativeSource):
        dropped = any(t.count("clamp(") < source.files[p].data.count(b"clamp(") for p, t in texts.items())
        return "it drops clamp" if dropped else ""
    for path, text in texts.items():
        before = source.files[path].tree
        try:
            after = ast.parse(text)
        except (SyntaxError, ValueError):
            return "the edited text is no Python"
        if _launches(after) < _launches(before):
            return "a kernel is no longer launched"
        lost = {name for name in _GUARDS if _calls(after)[name] < _calls(before)[name]}
        if lost:
            return f"it drops {min(lost)}"
    return ""


def only_another_block(source: CandidateSource, texts: Mapping[str, str]) -> bool:
    """Whether nothing changes but the numbers that stand for blocks, the lengths of `tl.arange`.

    They must not change what a kernel computes: if one number is right and another wrong, the fault is elsewhere.
    """
    if isinstance(source, NativeSource):
        return False
    before = {path: source.files[path].data for path in texts}
    return all(_without_blocks(before[path]) == _without_blocks(text) for path, text in texts.items())


def _without_blocks(text: str | bytes) -> str:
    tree = ast.parse(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "arange"]
    lengths = {n.id for call in calls for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        named = node.arg if isinstance(node, ast.keyword) else ""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named = node.targets[0].id
        if named in lengths and isinstance(node.value, ast.Constant):  # type: ignore[attr-defined]
            node.value = ast.Constant(0)  # type: ignore[attr-defined]
    return ast.dump(tree)


def _launches(tree: ast.AST) -> int:
    """Calls of the form kernel[grid](...)."""
    return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript) for n in ast.walk(tree))


def _calls(tree: ast.AST) -> Counter[str]:
    return Counter(n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
