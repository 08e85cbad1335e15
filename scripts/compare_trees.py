"""Shows that a change moved and renamed code, and changed nothing else.

    python scripts/compare_trees.py OLD [NEW] [--strings] [--folder src/goldsmith]

OLD and NEW are git revisions; without NEW the working tree is read. Every function, method, class body and module-level
statement of both sides becomes a syntax tree without imports and docstrings, whose identifiers are blanked. Trees of
OLD and NEW are then matched, wherever they stand. The output lists

    names     every pair of identifiers (old -> new) of matched trees that differ, with its count. Both are defined in
              these files: a name of Python or of a library cannot be renamed, so x.sum() for x.mean() is a change
    changed   the definitions of either side that have no equal on the other

With --strings, the text of string constants is blanked as well: the change may also have rewritten messages.
Exits with 1 where anything is listed under "changed".
"""

import argparse
import ast
import builtins
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

IDENTIFIERS = {"id", "attr", "arg", "name", "asname", "rest"}  # the fields of ast nodes that hold one
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BUILTINS = frozenset(dir(builtins))


def sources(revision: str | None, folder: str) -> dict[str, str]:
    """The Python files below `folder`, by path, at a revision or in the working tree."""
    if revision is None:
        return {str(path): path.read_text() for path in Path(folder).rglob("*.py")}
    listing = subprocess.run(["git", "ls-tree", "-r", revision, folder], check=True, capture_output=True, text=True)
    rows = [line.split(None, 3) for line in listing.stdout.splitlines() if line.endswith(".py")]
    batch = subprocess.run(
        ["git", "cat-file", "--batch"], input="".join(f"{row[2]}\n" for row in rows).encode(), capture_output=True
    ).stdout
    texts, start = {}, 0
    for row in rows:
        head = batch.index(b"\n", start)
        size = int(batch[start:head].split()[2])
        texts[row[3]] = batch[head + 1 : head + 1 + size].decode()
        start = head + size + 2
    return texts


def without_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    kept = []
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if is_docstring and isinstance(statement.value.value, str):
            continue
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            continue
        kept.append(statement)
    return kept


def pieces(path: str, text: str) -> Iterator[tuple[str, ast.stmt]]:
    """(place, tree) of every module-level statement; a class gives its methods, and itself without them."""
    for statement in without_imports(ast.parse(text).body):
        place = f"{path}:{statement.lineno}"
        if isinstance(statement, ast.ClassDef):
            for method in [inner for inner in statement.body if isinstance(inner, FUNCTIONS)]:
                yield f"{path}:{method.lineno} {statement.name}.{method.name}", method
            statement.body = [inner for inner in statement.body if not isinstance(inner, FUNCTIONS)]
        yield f"{place} {getattr(statement, 'name', '')}".rstrip(), statement


def shape(tree: ast.AST, blank_strings: bool) -> tuple[str, tuple[str, ...]]:
    """The tree as text with its identifiers blanked, and these identifiers in order."""
    words: list[str] = []

    def visit(node: object) -> str:
        if isinstance(node, ast.FormattedValue) and blank_strings:
            return f"{{{visit(node.value)}}}"
        if isinstance(node, ast.JoinedStr) and blank_strings:  # the values of a message, without the words between them
            return "text" + "".join(visit(part) for part in node.values if isinstance(part, ast.FormattedValue))
        if isinstance(node, ast.Constant):
            return "text" if blank_strings and isinstance(node.value, str) else repr(node.value)
        if isinstance(node, list):
            return f"[{','.join(visit(item) for item in node)}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        parts = []
        for field, value in ast.iter_fields(node):
            if field in IDENTIFIERS and isinstance(value, str):
                words.append(value)
                value = "_"
            elif isinstance(node, ast.Global | ast.Nonlocal):
                words.extend(value)
                value = len(value)
            elif field == "body" and isinstance(value, list):
                value = without_imports(value)
            parts.append(visit(value))
        return f"{type(node).__name__}({','.join(parts)})"

    return visit(tree), tuple(words)


def own_names(texts: dict[str, str]) -> set[str]:
    """The names that these files define or import from one another, which alone can be renamed."""
    names: set[str] = set()
    for path, text in texts.items():
        names.update(Path(path).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.alias):
                names.add(node.asname or "")
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
                names.add(node.name or "")
    return names - BUILTINS


def renamed_consistently(old: tuple[str, ...], new: tuple[str, ...], own: tuple[set[str], set[str]]) -> bool:
    """Whether one renaming explains all differences: each name keeps one new name, and all of them are our own."""
    pairs = set(zip(old, new))
    one_to_one = len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
    return one_to_one and all(a == b or (a in own[0] and b in own[1]) for a, b in pairs)


def compare(old: dict[str, str], new: dict[str, str], blank_strings: bool) -> tuple[Counter, list[str], list[str]]:
    """(pairs of names that differ, places only in old, places only in new)"""

    def by_shape(texts: dict[str, str]) -> dict[str, list[tuple[str, tuple[str, ...]]]]:
        table = defaultdict(list)
        for path, text in sorted(texts.items()):
            for place, tree in pieces(path, text):
                key, words = shape(tree, blank_strings)
                table[key].append((place, words))
        return table

    before, after = by_shape(old), by_shape(new)
    own = own_names(old), own_names(new)
    names: Counter = Counter()
    gone, added = [], []
    for key in before.keys() | after.keys():
        left, right = list(before.get(key, ())), list(after.get(key, ()))
        for entry in list(left):  # those with the same names first
            twin = next((other for other in right if other[1] == entry[1]), None)
            if twin:
                left.remove(entry)
                right.remove(twin)
        while left and right:  # then those that a renaming makes equal, those that share most names first
            entry = left.pop()
            twins = [other for other in right if renamed_consistently(entry[1], other[1], own)]
            if not twins:
                gone.append(entry[0])
                continue
            twin = max(twins, key=lambda other: sum(a == b for a, b in zip(entry[1], other[1])))
            right.remove(twin)
            names.update((a, b) for a, b in zip(entry[1], twin[1]) if a != b)
        gone += [place for place, _ in left]
        added += [place for place, _ in right]
    return names, sorted(gone), sorted(added)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--strings", action="store_true", help="the text of strings may differ")
    parser.add_argument("--folder", default="src/goldsmith")
    options = parser.parse_args()
    old, new = sources(options.old, options.folder), sources(options.new, options.folder)
    if not old or not new:
        parser.error(f"--folder {options.folder}: no Python files in {options.new if old else options.old}")
    names, gone, added = compare(old, new, options.strings)
    print(f"names: {len(names)} renamed")
    for (a, b), count in names.most_common():
        print(f"  {a} -> {b}  ({count})")
    print(f"changed: {len(gone)} only in {options.old}, {len(added)} only in {options.new or 'the working tree'}")
    for sign, places in (("-", gone), ("+", added)):
        for place in places:
            print(f"  {sign} {place}")
    return 1 if gone or added else 0


if __name__ == "__main__":
    sys.exit(main())
