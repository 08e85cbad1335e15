"""The reference of the site: a page for each package, from the names in its `__all__` and their docstrings."""

import ast
import functools
import re
from pathlib import Path

import griffe

from scripts.site.docstrings import is_formula, prose

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("goldsmith", "assay", "core", "mhc", "router", "experts", "distributed", "hf", "offload")
GUIDES = {
    "assay": "Guides: [verify a kernel](../verify-your-own-kernel.md), [diagnose it](../diagnosis.md), "
    "[watch a run](../watch.md).",
    "mhc": "Guide: [hyper-connections](../mhc.md), with [all formulas](../mathematics/mhc.md).",
    "router": "Guide: [a million tiny experts](../router.md), with [all formulas](../mathematics/router.md).",
    "experts": "Guide: [experts on one machine](../experts.md), with [all formulas](../mathematics/experts.md).",
    "distributed": "Guide: [train on several GPUs](../several-gpus.md).",
    "hf": "Guides: [with transformers and peft](../hf.md), [train with what you already use](../train-with.md).",
    "offload": "Guide: [generate](../offload.md).",
}


def public_names(package: str) -> dict[str, str]:
    """Each name in a package's `__all__` with the path of its definition, read from the source without importing it."""
    folder = ROOT / "src/goldsmith" / ("" if package == "goldsmith" else package)
    module = "goldsmith" if package == "goldsmith" else f"goldsmith.{package}"
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    names: list[str] = []
    places: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = module.rsplit(".", node.level - 1)[0] if node.level > 1 else module
            inside = f"{above}.{node.module}" if node.module else above
            places |= {name.asname or name.name: f"{inside}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    return {name: places.get(name, f"{module}.{name}") for name in names}


def reference(package: str) -> str:
    """The page of a package: a table of its names, classes first; then each with signature and docstring."""
    module = "goldsmith" if package == "goldsmith" else f"goldsmith.{package}"
    lines = [f"# {module}", ""]
    if package == "goldsmith":
        return "\n".join([*lines, *top_level(public_names(package))])
    names = public_names(package)
    order = sorted(names, key=lambda name: (not name[0].isupper(), name.lower()))
    source = packages()[package]
    lines += [summary(source), "", GUIDES.get(package, ""), ""]
    lines += ["| name | what it is |", "| --- | --- |"]
    lines += [f"| [`{name}`][{names[name]}] | {summary(source.members[name])} |" for name in order]
    lines.append("")
    for name in order:
        lines += [
            f"::: {names[name]}",
            "    options:",
            f'      heading: "{package}.{name}"',
            f'      toc_label: "{name}"',
            "",
        ]
    return "\n".join(lines)


def top_level(names: dict[str, str]) -> list[str]:
    lines = ["`import goldsmith` alone imports neither torch nor triton. Each name loads when it is first used.", ""]
    lines += ["| package | what it is |", "| --- | --- |"]
    lines += [f"| [`goldsmith.{name}`]({name}.md) | {summary(packages()[name])} |" for name in PACKAGES[1:]]
    own = [name for name in PACKAGES[1:] if name not in names]
    lines += ["", f"Import {join(own)} by their full names, such as `import goldsmith.{own[0]}`.", ""]
    lines += ["| name | what it is |", "| --- | --- |"]
    for name in sorted(set(names) - set(PACKAGES), key=str.lower):
        if name == "__version__":
            lines.append(f"| `goldsmith.{name}` | the version, a string |")
        else:
            lines.append(f"| [`goldsmith.{name}`][{names[name]}] | {summary(packages()['core'].members[name])} |")
    return lines


def join(names: list[str]) -> str:
    quoted = [f"`goldsmith.{name}`" for name in names]
    return ", ".join(quoted[:-1]) + " and " + quoted[-1]


@functools.cache
def packages() -> griffe.Object:
    """The source of goldsmith, read without importing it."""
    return griffe.load("goldsmith", search_paths=[ROOT / "src"], resolve_aliases=True)


def summary(named: griffe.Object | griffe.Alias) -> str:
    """The first sentence of a docstring, as Markdown in one line."""
    if not named.docstring:
        return ""
    lines = re.split(r"\n\s*\n", named.docstring.value.strip())[0].splitlines()
    if is_formula(lines):
        return f"`{lines[0].replace('`', '').strip()}`"
    text = " ".join(line.strip() for line in lines)
    sentence = re.match(r".*?\.(?= [A-Z`]|$)", text)
    return prose([sentence[0] if sentence else text]).replace("|", "\\|")
