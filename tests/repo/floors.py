"""Who may import whom, read from the source with `ast`: nothing is executed.

A module may import its own floor's part of the library and what lies below it:

    cli -> hf -> offload -> families -> core        the assay imports none of ours
"""

import ast
from dataclasses import dataclass
from pathlib import Path

FAMILIES = ("mhc", "router", "experts")
LAZY = {"numpy", "safetensors", "jinja2", "rich", "pytest", "triton"}  # the assay has them inside functions only
BELOW = {
    "core": set(),
    "assay": set(),
    **{family: {"core", "assay"} for family in FAMILIES},
    "offload": {"core", "assay", "experts", "router"},
    "hf": {"core", "assay", "offload", *FAMILIES},
    "cli": {"core", "assay", "offload", "hf", *FAMILIES},
    "__main__": {"cli"},
    "pytest_plugin": {"assay", "cli"},  # inside functions alone: pytest imports it at every start
}


@dataclass(frozen=True)
class Import:
    line: int
    module: (
        str  # absolute, as far as it can be told from the text: "goldsmith.core.op.Op" for `from ..core.op import Op`
    )
    runs: bool  # when the module is imported; False inside a function or under TYPE_CHECKING
    typing: bool = False  # under TYPE_CHECKING


def imports(path: Path, package: str) -> list[Import]:
    """Every import of a module that lives in `package` ("goldsmith.mhc.post")."""
    found: list[Import] = []

    def visit(node: ast.AST, runs: bool, typing: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend(Import(child.lineno, alias.name, runs, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, base] if base else above)
                found.extend(Import(child.lineno, f"{base}.{alias.name}", runs, typing) for alias in child.names)
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
    return found


def is_backend(parts: tuple[str, ...]) -> bool:
    return any(part.startswith(("_triton", "_native", "_kernels")) for part in parts)


def wrong(parts: tuple[str, ...], found: Import) -> str | None:
    """Why the module at `parts` (("mhc", "post", "op")) may not have this import, or None."""
    floor, target = parts[0], found.module.split(".")
    package = target[0]
    if package == "goldsmith":
        part = target[1] if len(target) > 1 else ""
        if floor == "__init__":
            return None if not found.runs else "the package's own __init__ imports nothing, so that it loads at once"
        if parts[-1] == "reference" and floor in FAMILIES and part not in ("assay", floor):
            return "a reference imports torch, the assay's stage and its own family's references alone"
        if part == "__version__":
            return None
        if floor == "pytest_plugin" and found.runs:
            return "the plugin imports ours inside functions, so that pytest starts at once"
        if floor == "assay" and part == "assay" and "html" in target[2:3] and parts[1] != "html" and found.runs:
            return "pages are made by few callers: assay.html, which needs jinja2, is imported inside functions"
        if part != floor and part not in BELOW.get(floor, set()):
            return f"{floor} may import {', '.join(sorted(BELOW[floor])) or 'none of ours'}, not {part}"
        if is_backend(tuple(target[2:])) and not is_backend(parts) and found.runs:
            return "backends are loaded by name, lazily"
    elif package == "triton":
        if floor == "assay" and found.runs or floor in FAMILIES and not is_backend(parts) and found.runs:
            return "triton is imported by backends only"
        if floor == "core" and found.runs and not is_backend(parts):
            return "core asks for triton inside functions only"
    elif package in ("transformers", "peft", "tokenizers"):
        if floor not in ("hf", "cli") or floor == "cli" and found.runs:
            return "transformers and peft are imported in goldsmith.hf only"
    elif parts[:2] == ("assay", "html") and package == "jinja2":
        return None
    elif floor in ("core", "assay", *FAMILIES) and package in LAZY and found.runs and not is_backend(parts):
        return f"{package} is imported where it is used, inside a function"
    return None


def violations(source: Path) -> list[str]:
    """One line for each import under `source` (the folder of the package) that goes up or comes too early."""
    lines = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        package = ".".join(("goldsmith", *parts[:-1]))
        for found in imports(path, package):
            reason = wrong(parts, found)
            if reason:
                lines.append(f"{path.relative_to(source)}:{found.line}: {found.module}: {reason}")
    return lines
