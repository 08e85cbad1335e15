"""Modules of the assay import a name from where it is made, or from where `__all__` says that it is to be had."""

import ast
from pathlib import Path

from goldsmith import assay

SOURCE = Path(assay.__file__).parent
MODULES = {p.relative_to(SOURCE).with_suffix("").parts: ast.parse(p.read_text()) for p in SOURCE.rglob("*.py")}


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


def borrowed():
    """(who imports, the name, the third module that only imported it itself)"""
    for parts, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                source = (*parts[: len(parts) - node.level], *(node.module.split(".") if node.module else ()))
                if source in MODULES:
                    missing = {alias.name for alias in node.names} - constructed(MODULES[source])
                    yield from (("/".join(parts), name, "/".join(source)) for name in sorted(missing))


def test_no_name_is_imported_through_a_module_that_only_imported_it():
    assert len(MODULES) > 100 and list(borrowed()) == []
