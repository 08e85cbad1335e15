"""Modules of the assay import a name from where it is made, or from where `__all__` says that it is to be had."""

import ast
from pathlib import Path

from goldsmith import assay

SOURCE = Path(assay.__file__).parent


def constructed(tree):
    """The names that a module offers: those that it defines, and those of its `__all__`."""
    result = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
            if node.id == "__all__":
                result |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return result


def borrowed(modules):
    """(who imports, the name, the third module that only imported it itself)"""
    names = {source: constructed(tree) for source, tree in modules.items()}
    for parts, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                source = (*parts[: len(parts) - node.level], *(node.module.split(".") if node.module else ()))
                if source in names:
                    missing = {alias.name for alias in node.names} - names[source]
                    yield from (("/".join(parts), name, "/".join(source)) for name in sorted(missing))


def test_no_name_is_imported_through_a_module_that_only_imported_it():
    modules = {p.relative_to(SOURCE).with_suffix("").parts: ast.parse(p.read_text()) for p in SOURCE.rglob("*.py")}
    assert len(modules) > 100 and list(borrowed(modules)) == []
