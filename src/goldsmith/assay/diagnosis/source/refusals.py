"""Refusals: edits that are no patch, whatever they pass, since they delete the computation or ask the golden."""

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


def _launches(tree: ast.AST) -> int:
    """Calls of the form kernel[grid](...)."""
    return sum(isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript) for n in ast.walk(tree))


def _calls(tree: ast.AST) -> Counter[str]:
    return Counter(n.func.attr for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
