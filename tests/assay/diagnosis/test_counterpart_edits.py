"""Edits that make a candidate like its counterparts: other functions, the golden, and itself for other names."""

import pytest

from assay.diagnosis.test_patch_edits import normal, source_of
from goldsmith.assay.diagnosis.source.edits.edit_queue import EditQueue
from goldsmith.assay.diagnosis.source.edits.edits import Edit, Function
from goldsmith.assay.diagnosis.source.edits.every_edit import EveryEdit, near_edits
from goldsmith.assay.diagnosis.source.reading.source_file import SourceFile

GOLDEN = "return x * (1 + w), n + D * d, torch.exp(x) * w, w - torch.special.erf(row)"


def test_terms_and_expressions_of_the_golden_are_brought_in():
    """Its names mean the same here; in Triton only what Triton has as well."""

    def texts(body):
        file, golden = source_of(body), source_of(GOLDEN)
        if "w_tile" in body:
            file = SourceFile("kernel.py", "kernel", file.data.replace(b"x, w,", b"x,"))
        functions = [Function(f, f.tree.body[0]) for f in (file, golden)]
        return {e.applied(file.data).decode() for e in near_edits(functions[0], golden=functions[1:])}

    wanted = {
        "w = tl.load(p)\nz = w": "w = tl.load(p)\nw = w + 1\nz = w",
        "w_tile = tl.load(p)\nz = w_tile": "w_tile = tl.load(p)\nw_tile = w_tile + 1\nz = w_tile",
        "n, y = tl.load(p), D + d\nz = n": "n, y = tl.load(p), D + d\nn = n + D * d\nz = n",
        "y = n + D / d\nz = tl": "y = n + D * d\nz = tl",
        "y = x * w\nz = tl": "y = x * (1 + w)\nz = tl",
        "y = tl.exp2(x) * w": "y = tl.exp(x) * w",
        "y = w - torch.special.exp(row)": "y = w - torch.special.erf(row)",
    }
    for wrong, right in wanted.items():
        assert any(right.replace("\n", "\n    ") in t for t in texts(wrong)), wrong
    assert not any("erf" in t for t in texts("w = tl.load(p)\ny = w - torch.special.exp(row)"))


BESIDE = {  # wrong body, body of another function: right body
    "factor of a bound": ("for i in range(n):\n    y = i", "for j in range(n * D):\n    y = j"),
    "operand": ("y = x * row * n", "z = w * row * (1.0 / (1.0 - n))"),
    "operator with its operand": ("y = x * row * n", "z = w.exp() * row / (1 - n)"),
    "condition around an exchange": ("y = x[row]", "if n:\n    row, D = D, row"),
}
RIGHT = {
    "factor of a bound": "for i in range(n * D):\n    y = i",
    "operand": "y = x * row * (1.0 / (1.0 - n))",
    "operator with its operand": "y = x * row / (1 - n)",
    "condition around an exchange": "if n:\n    row, D = D, row\ny = x[row]",
}


@pytest.mark.parametrize("kind", BESIDE)
def test_what_another_function_does_comes_in_where_the_statements_differ(kind):
    wrong, beside = map(source_of, BESIDE[kind])
    f, g = (Function(file, file.tree.body[0]) for file in (wrong, beside))
    assert any(
        normal(e.applied(wrong.data).decode()) == normal(source_of(RIGHT[kind]).data.decode())
        for e in near_edits(f, [g])
    )


def test_all_statements_for_names_that_nothing_reads_come_at_once_and_first():
    body = "x_row += n * x_step\nz = x_row + w_row + d_row"
    text = f"def f(x_row, w_row, d_row, n, x_step, w_step, d_step):\n    {body.replace(chr(10), chr(10) + '    ')}\n"
    file = SourceFile("kernel.py", "kernel", text.encode())
    edits = sorted(near_edits(Function(file, file.tree.body[0])), key=lambda e: e.cost)
    both = [n for n, e in enumerate(edits) if e.applied(file.data).count(b"_row += n * ") == 3]
    assert both and both[0] < 12


def test_statements_that_read_what_the_edited_line_of_the_golden_reads_come_earlier():
    file = source_of("y = min(x, n)\nz = min(x, w)")
    edits = EveryEdit([], ())
    edits.functions = [Function(file, file.tree.body[0])]
    reading = edits.reading({"n", "position", "min"})
    assert reading == {("kernel.py", 2)}
    other, near = (Edit("kernel.py", ((n, n, "x"),), "number", 1.0, n, n, "f") for n in (3, 2))
    assert next(EditQueue([other, near], reading=reading).batches(2)) == [near, other]
