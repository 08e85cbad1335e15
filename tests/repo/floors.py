"""The rules for imports, read from the source with `ast`: nothing is executed.

A module may import from its own part of the library and from those below it:

    cli -> hf -> offload, distributed -> families -> core        the assay imports only core.tracing

What runs in production does not load the assay: in the families only `cases.py` and benchmarks import it, in hf only
functions do.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FAMILIES = ("mhc", "router", "experts")
LAZY = {"numpy", "safetensors", "jinja2", "rich", "pytest", "triton"}  # the assay imports them inside functions only
BELOW = {
    "core": set(),
    "assay": {"core"},
    **{family: {"core", "assay"} for family in FAMILIES},
    "offload": {"core", "experts", "router"},
    "distributed": {"core", *FAMILIES},
    "hf": {"core", "assay", "offload", "distributed", *FAMILIES},
    "cli": {"core", "assay", "offload", "distributed", "hf", *FAMILIES},
    "__main__": {"cli"},
    "pytest_plugin": {"assay", "cli", "pytest_session"},  # inside functions only: pytest imports it at every start
    "pytest_session": set(),
}
TRIALS = ("cases", "_cases", "benchmarks")  # modules of a family that describe trials, and so may import the assay


@dataclass(frozen=True)
class Import:
    """One imported name. module: absolute, "goldsmith.core.op.Op" for `from ..core.op import Op`.

    runs: on import of the module; False inside a function or under TYPE_CHECKING. typing: under TYPE_CHECKING.
    """

    line: int
    module: str
    runs: bool
    typing: bool = False


@cache  # two tests read all modules
def imports(path: Path, package: str) -> list[Import]:
    """Every import of a module that lives in `package` ("goldsmith.mhc.post")."""
    rows: list[Import] = []

    def visit(node: ast.AST, runs: bool, typing: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                rows.extend(Import(child.lineno, alias.name, runs, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, base] if base else above)
                rows.extend(Import(child.lineno, f"{base}.{alias.name}", runs, typing) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                for inner in child.body:
                    visit(ast.Module([inner], []), False, True)
                for inner in child.orelse:
                    visit(ast.Module([inner], []), runs, typing)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(child, False, typing)
            else:
                visit(child, runs, typing)

    visit(ast.parse(path.read_text()), True, False)
    return rows


def is_backend(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(("_triton", "_native", "_kernels")) for part in parts)


def wrong(parts: tuple[str, ...], row: Import) -> str | None:
    """Why the module at `parts` (("mhc", "post", "op")) may not have this import, or None."""
    floor, target = parts[0], row.module.split(".")
    package = target[0]
    if package == "goldsmith":
        part = target[1] if len(target) > 1 else ""
        if floor == "__init__":
            return None if not row.runs else "the package's own __init__ imports nothing, so that it loads at once"
        if parts[-1] == "reference" and floor in FAMILIES and target[1:3] != ["core", "tracing"] and part != floor:
            return "a reference imports torch, core.tracing and the references of its own family"
        if part == "__version__":
            return None
        if floor == "pytest_plugin" and row.runs:
            return "the plugin imports ours inside functions, so that pytest starts at once"
        if floor == "assay" and part == "core" and target[2:3] != ["tracing"]:
            return "of goldsmith, the assay imports core.tracing only"
        if part == "assay" and not row.typing:
            if floor in FAMILIES and parts[-1] not in TRIALS:
                return "what runs in production does not load the assay"
            if floor == "hf" and row.runs:
                return "hf imports the assay inside functions, so that models run without it"
        if floor == "assay" and target[2:4] == ["report", "html"] and row.runs:
            if "html" not in parts and parts[:3] != ("assay", "diagnosis", "report"):
                return "few callers make pages: report.html, which needs jinja2, is imported inside functions"
        if part != floor and part not in BELOW.get(floor, set()):
            return f"{floor} may import {', '.join(sorted(BELOW[floor])) or 'none of ours'}, not {part}"
        if is_backend(tuple(target[2:])) and not is_backend(parts) and row.runs:
            return "backends are loaded by name, lazily"
    elif package == "triton":
        if floor == "assay" and row.runs or floor in FAMILIES and not is_backend(parts) and row.runs:
            return "triton is imported by backends only"
        if floor == "core" and row.runs and not is_backend(parts):
            return "core asks for triton inside functions only"
    elif package in ("transformers", "peft", "tokenizers", "trl", "datasets"):
        if floor not in ("hf", "cli") or floor == "cli" and row.runs:
            return "transformers, peft, trl and datasets are imported in goldsmith.hf only"
    elif parts[:3] == ("assay", "report", "html") and package == "jinja2":
        return None
    elif floor in ("core", "assay", *FAMILIES) and package in LAZY and row.runs and not is_backend(parts):
        return f"{package} is imported where it is used, inside a function"
    return None


def violations(source: Path) -> list[str]:
    """One line for each import under `source` (the folder of the package) that goes up or comes too early."""
    lines = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        package = ".".join(("goldsmith", *parts[:-1]))
        for row in imports(path, package):
            reason = wrong(parts, row)
            if reason:
                lines.append(f"{path.relative_to(source)}:{row.line}: {row.module}: {reason}")
    return lines


def module_name(path: Path, source: Path) -> str:
    """The dotted name of a file below `source`, the folder of the package: "goldsmith.mhc.post"."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(source: Path) -> list[list[str]]:
    """Groups of modules that import one another, counting imports inside functions and under TYPE_CHECKING."""
    paths = {module_name(path, source): path for path in sorted(source.rglob("*.py"))}

    def known(name: str) -> str | None:
        return name if name in paths else known(name.rpartition(".")[0]) if name else None

    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = {known(row.module) for row in imports(path, package)}
        graph[name] = {target for target in targets if target is not None} - {name}
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {frozenset({a, *(b for b in reached[a] if a in reached[b])}) for a in graph}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen
