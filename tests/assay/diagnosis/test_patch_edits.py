"""The kinds of edits: each undoes its fault, judged by the text alone; what deletes a computation is refused."""

import ast
from dataclasses import replace

import pytest

from goldsmith.assay.diagnosis.facts.evidence import WhatIf
from goldsmith.assay.diagnosis.source.children.mutants import EditOutcome
from goldsmith.assay.diagnosis.source.edits.edit_queue import EditQueue
from goldsmith.assay.diagnosis.source.edits.edits import Edit, Function
from goldsmith.assay.diagnosis.source.edits.every_edit import EveryEdit, near_edits
from goldsmith.assay.diagnosis.source.edits.inverse_edits import GoldenHint, inverse_kinds
from goldsmith.assay.diagnosis.source.reading.candidate_source import CandidateSource
from goldsmith.assay.diagnosis.source.reading.source_file import SourceFile
from goldsmith.assay.diagnosis.source.refusals import refusal

LOAD = "x = tl.load(p + row, d < D, {})"
KINDS = {  # kind: (wrong, right) bodies of a function of x, w, n, row, p, g_ptr, D, d, mask
    "value of masked elements": (LOAD.format("0.0"), LOAD.format('-float("inf")')),
    "value added": ("x = tl.load(p, mask=mask)", "x = tl.load(p, mask=mask, other=0.0)"),
    "mask added": ("m = d < D\nx = tl.load(p)", "m = d < D\nx = tl.load(p, mask=d < D)"),
    "mask term": ("m = d < D\nx = tl.load(p, mask=mask)", "m = d < D\nx = tl.load(p, mask=(mask) & (d < D))"),
    "offset": ("g = tl.load(g_ptr)\nh = row", "g = tl.load(g_ptr + row)\nh = row"),
    "keyword added": ("y = x.sum(-1)", "y = x.sum(-1, keepdim=True)"),
    "keyword removed": ("y = x.sum(-1, keepdim=True)", "y = x.sum(-1)"),
    "initial value": ("m = 0.0", 'm = -float("inf")'),
    "assignment": ("y = x\ny = w", "y = x\ny += w"),
    "loop bounds": ("for i in range(n):\n    y = i", "for i in range(1, n):\n    y = i"),
    "loop turned": ("for i in range(n):\n    y = i", "for i in reversed(range(n)):\n    y = i"),
    "loop over a list turned": ("for i in f(n):\n    y = i", "for i in reversed(f(n)):\n    y = i"),
    "rounding": ("y = n // D", "y = (n + D - 1) // D"),
    "factor": ("y = x * w * n", "y = x * w"),
    "division": ("y = x\nz = n", "y = x / n\nz = n"),
    "operand order": ("y = x - w", "y = w - x"),
    "entries": ("return w, x", "return x, w"),
    "dict entries": ('return {"a": w, "b": x}', 'return {"a": x, "b": w}'),
    "axis": ("y = x.sum(0)", "y = x.sum(-1)"),
    "operand order of a difference": ("y = (w - x * n) * D", "y = (x * n - w) * D"),
    "bound of a mask": ("y = d < D - 1", "y = d < D"),
    "function": ("y = tl.max(x)", "y = tl.sum(x)"),
    "names exchanged": ("y = x + n * (w - x)", "y = w + n * (x - w)"),
    "another name": ("y = x.exp()\nz = w", "y = w.exp()\nz = w"),
    "another name throughout": ("y = n // row, n % row\nz = D", "y = n // D, n % D\nz = D"),
    "sign of a call": ("y = x.exp() * w", "y = -x.exp() * w"),
    "another number": ("y = x + 7\nz = x + 3", "y = x + 7\nz = x + 7"),
    "name for a number": ("y = x * 4\nz = D", "y = x * D\nz = D"),
    "saved tensor": ("c.save_for_backward(x, x)\nz = w", "c.save_for_backward(x, w)\nz = w"),
    "dtype": ("y = x.to(torch.bfloat16)", "y = x.to(torch.float32)"),
    "cast": ("y = x.half()", "y = x.float()"),
    "clone": ("y = x", "y = x.clone()"),
    "removed": ("y = x\ny *= n", "y = x\npass"),
    "order of statements": ("y = x + 1\nx = w", "x = w\ny = x + 1"),
    "statement too early": ("f(y)\nx = w\ny = x\nz = y", "x = w\ny = x\nf(y)\nz = y"),
    "condition that nothing reads": (
        "first_mask = d < D\ny = tl.exp(x)",
        "first_mask = d < D\ny = tl.where(first_mask, 0.0, tl.exp(x))",
    ),
    "into the loop": (
        "y = 0\nfor i in range(n):\n    z = y",
        "pass\nfor i in range(n):\n    y = 0\n    z = y",
    ),
    "out of the loop": ("for i in range(n):\n    z = w\n    y = z", "for i in range(n):\n    z = w\ny = z"),
    "term in the root": ("y = torch.sqrt(x) + n", "y = torch.sqrt(x + n)"),
    "term beside the root": ("y = torch.sqrt(x + n)", "y = torch.sqrt(x) + n"),
    "one and a term": ("y = x * w", "y = 1 + x * w"),
    "factor that is a sum": ("y = x\nz = w * (1 - n)", "y = x * (1 - n)\nz = w * (1 - n)"),
    "factor that is a call": ("y = x\nz = torch.exp(w)", "y = x * torch.exp(w)\nz = torch.exp(w)"),
    "term with a name that nothing reads": ("m = x.sum()\ny = x", "m = x.sum()\ny = x - w * m"),
    "sum of all parts": ("y = x[-1]", "y = x.sum(0)"),
    "masked value": ("z = mask\ny = tl.sum(x)", "z = mask\ny = tl.sum(tl.where(mask, x, 0.0))"),
    "twin": (
        "m_x = w\nm_y = n\nd_x = w + x\nd_y = n + y * m_y\ny = x",
        "m_x = w\nm_y = n\nd_x = n + x * m_x\nd_y = n + y * m_y\ny = x",
    ),
    "missing twin": (
        "d_x = D\nd_y = d\nm_x = d_x + 1\nm_y = 2\nx = y",
        "d_x = D\nd_y = d\nm_x = d_x + 1\nm_y = d_y + 1\nm_y = 2\nx = y",
    ),
    "product for a difference": ("y = x - w", "y = x * w"),
    "quotient for a sum": ("y = x + w", "y = x / w"),
    "target": ("y = x\ny = w\nz = n\nf(y, z)", "y = x\nz = w\nz = n\nf(y, z)"),
    "target of several": ("m, y = w, x\nz = n", "m, z = w, x\nz = n"),
    "rows and columns": ("a, b = x * n + row, w * n + d", "a, b = x * n + row - D, w * n + d - D"),
    "statements alike": ("a = f(x) * n\nb = f(w) * n", "a = f(x) * x\nb = f(w) * w"),
    "condition of the other axis": ("y = (row < n)\nz = d", "y = (row < n) & (d < n)\nz = d"),
    "where a limit does nothing": (
        "y = tl.minimum(x, n)\nz = f(w)",
        "y = tl.minimum(x, n)\nz = tl.where(x <= n, f(w), 0.0)",
    ),
    "masked value in torch": (
        "z = row < n\ny = (x - w).sum()",
        "z = row < n\ny = torch.where(row < n, x - w, 0.0).sum()",
    ),
    "setting of the context": ("ctx.causal = n\ny = f(x, True)", "ctx.causal = n\ny = f(x, ctx.causal)"),
    "setting by name": ("y = f(x, True)\nz = n", "y = f(x, n)\nz = n"),
    "limit": ("y = min(x, n)", "y = x"),
    "offset taken away": ("x = tl.load(p + n)\nh = row", "x = tl.load(p + n - row)\nh = row"),
    "next element": ("x = tl.load(p + n * row)", "x = tl.load(p + n * row + 1)"),
    "name for an expression": ("y = f(w, n // D)\nz = row", "y = f(w, row)\nz = row"),
    "term that is a power": ("y = x / w\nz = n**2", "y = x / (w + n**2)\nz = n**2"),
    "adding at places that repeat": ("y = w\ny[n] = x", "y = w\ny.index_put_((n,), x, accumulate=True)"),
    "argument like another one": (
        "l_x = 1\nl_y = 2\ny = f(x, tl.load(l_x + row), f(w, n))",
        "l_x = 1\nl_y = 2\ny = f(x, tl.load(l_x + row), f(w, tl.load(l_y + row)))",
    ),
    "same edit in two places": (
        "y = x * (n + 1)\nz = w - (n + 1)",
        "y = x * n\nz = w - n",
    ),
    "dtype throughout": (
        "y = x.to(tl.float16)\nz = w.to(tl.float16)",
        "y = x.to(tl.float32)\nz = w.to(tl.float32)",
    ),
    "change in place": ("y = x.sub_(w)", "y = x.sub(w)"),
    "limit below": ("y = tl.minimum(x, n)", "y = tl.minimum(tl.maximum(x, -n), n)"),
    "neighbours": ("y = x.repeat(1, n)", "y = x.repeat_interleave(n, dim=1)"),
    "factor of a method's tensor": ("y = x.sum(0)\nz = w * (1 + n)", "y = (x * (1 + n)).sum(0)\nz = w * (1 + n)"),
    "attribute of the context": ("ctx.b = x\ny = ctx.a", "ctx.b = x\ny = ctx.b"),
    "groups": ("y = row % D\nz = n // D", "y = row // (n // D)\nz = n // D"),
    "index turned": ("y = x + n - 1 - row", "y = x + row"),
    "name for a part of what it holds": (
        "c = row + tl.arange(0, D)\ny = tl.arange(0, D) == n",
        "c = row + tl.arange(0, D)\ny = c == n",
    ),
    "out of a condition": ("if n:\n    z = w\n    y = z", "if n:\n    z = w\ny = z"),
    "index of the others": ("y = x[n:D] * w", "y = x[n:D] * w[n:D]"),
    "offset and end": ("y = d < D\nz = row + n", "y = row < n\nz = row + n"),
    "axis of a statement": ("y = x.flip(1).cumsum(1)", "y = x.flip(2).cumsum(2)"),
    "every argument contiguous": ("k[n](x, w, d)", "k[n](x.contiguous(), w.contiguous(), d.contiguous())"),
    "number that multiplies elsewhere": ("y = x + w * 1.4427", "y = x * 1.4427 + w * 1.4427"),
    "sum as a column": ("y = x * tl.sum(x * w, axis=1)", "y = x * tl.sum(x * w, axis=1)[:, None]"),
    "maximum as a row": ("y = x - x.amax(0)", "y = x - x.amax(0)[None, :]"),
    "for a name that nothing reads": (
        "a_step, b_step = n, D\na_row += row * a_step\nf(a_row, b_row)",
        "a_step, b_step = n, D\na_row += row * a_step\nb_row += row * b_step\nf(a_row, b_row)",
    ),
    "words exchanged": ("y = left_s * top_d + top_s\nz = left_d", "y = top_s * left_d + left_s\nz = left_d"),
    "other branch": (
        "if n:\n    s = f(n)\n    y += x * s\n    z += x * s\nf(y, z)",
        "if n:\n    s = f(n)\n    y += x * s\n    z += x * s\nelse:\n    y += x\nf(y, z)",
    ),
    "all but the last": ("y = x[1:]", "y = x[:-1]"),
    "the last": ("y = x[:n]", "y = x[-n:]"),
    "atomic": ("tl.store(p + d, x, mask=mask)", "tl.atomic_add(p + d, x, mask=mask)"),
}


def source_of(body):
    lines = "\n".join("    " + line for line in body.splitlines())
    text = f"def f(c, x, w, n, row, p, g_ptr, D, d, mask):\n{lines}\n"
    return SourceFile("kernel.py", "kernel", text.encode())


def texts_of(body, **kinds):
    file = source_of(body)
    edits = EveryEdit([], ())
    edits.functions = [Function(file, file.tree.body[0], kinds=kinds)]
    near = near_edits(edits.functions[0])
    edits = [*edits._everywhere(near), *edits.far()]
    return {edit.applied(file.data).decode() for edit in edits}


def normal(text):
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError:
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_this_kind_undoes_the_fault(kind):
    wrong, right = KINDS[kind]
    assert normal(source_of(right).data.decode()) in {normal(text) for text in texts_of(wrong)}


def test_the_logarithm_of_a_sum_is_an_addend():
    assert any("    y = x + torch.log(w)\n" in t for t in texts_of("y = x\nz = w", x="f[3]", w="f[3]"))


def test_a_tensor_is_made_contiguous_for_the_whole_function():
    wanted = "    x = x.contiguous()\n    y = x\n"
    assert any(text.endswith(wanted) for text in texts_of("y = x", x="f[3,4]"))


def test_a_factor_of_one_axis_is_also_a_column_where_there_are_tiles_of_two():
    column = "y = x * n[:, None]\n"
    assert any(column in t for t in texts_of("y = x\nz = w + n", x="f[4,8]", n="f[4]", w="f[4]"))
    assert not any(column in t for t in texts_of("y = x\nz = w + n", x="f[4]", n="f[4]", w="f[4]"))


def test_what_deletes_a_launch_or_a_clamp_is_refused():
    file = source_of("k[(n,)](x)\ny = x.clamp(min=0)")
    source = CandidateSource({"kernel.py": file}, (), {}, ("kernel", "f", None))
    text = file.data.decode()
    assert refusal(source, {"kernel.py": text.replace("k[(n,)](x)", "pass")}) == "a kernel is no longer launched"
    assert refusal(source, {"kernel.py": text.replace(".clamp(min=0)", "")}) == "it drops clamp"
    assert refusal(source, {"kernel.py": text.replace("min=0", "min=1")}) == ""


def test_a_line_that_a_trace_names_comes_first_and_hints_come_earlier():
    plain, hinted, named = (
        Edit("kernel.py", ((n, n, "x"),), kind, 2.0, line, line, "f")
        for n, (kind, line) in enumerate((("other", 1), ("sign", 1), ("other", 9)))
    )
    queue = EditQueue([plain, hinted, named], first=[("kernel.py", 9, "f")], kinds=inverse_kinds(["sign_flip"]))
    assert next(queue.batches(3)) == [named, hinted, plain]


HINTS = {  # parameters of an edit of the golden -> lines that bring its name or number in or out, and others
    ("factor", "scale"): (["y = x * scale_ptr", "y = x + f(scale[n])", "u = w"], ["y = x * scaled", "u = scale + w"]),
    ("named", "1/(D*n)"): (["y = x / (n * D)"], ["y = x / n", "y = D * x"]),
    ("value", 0.6931472): (["y = x * 1.44269504", "y = .693147181", "v = n"], ["y = x * 1.4", "v = w / 6.931472e-1"]),
}


def fitting(*params):
    return [WhatIf("wrong_factor", "", "y", 1.0, True, row) for row in params]


@pytest.mark.parametrize("hint", HINTS)
def test_edits_that_bring_in_or_out_what_the_golden_edit_names_come_earlier(hint):
    """The same name or number before and after an edit is no hint."""
    data = b"y = x\nu = scale * w\nv = x / 6.931472e-1\n"
    starts = {line[0]: data.decode().index(f"{line[0]} =") for line in ("y", "u", "v")}

    def edit(text):
        start = starts[text[0]]
        return Edit("kernel.py", ((start, data.index(b"\n", start), text),), text, 1.0, 1)

    near, others = ([edit(text) for text in texts] for texts in HINTS[hint])
    named = GoldenHint.of(fitting(dict([hint]), {"value": 1}))
    queue = EditQueue([*others, *near], texts={"kernel.py": data}, named=named)
    assert [edit for batch in queue.batches(9) for edit in batch] == [*near, *others]


def test_named_edits_of_a_place_that_matters_late_come_before_all_others():
    near = [Edit("kernel.py", ((n, n, str(k)),), "number", 1.0 + k / 2, n, n) for n in (1, 2) for k in range(9)]
    named, other = (Edit("kernel.py", ((2, 2, f" * {name}"),), "factor added", 2.0, 2, 2) for name in ("w", "x"))

    def order(params):
        further = [[other, named]]  # each only once
        far = {"far": lambda places: further.pop() if further else [], "named": GoldenHint.of(fitting(*params))}
        queue = EditQueue(near, wrong=["y"], **far)
        edits = []
        for batch in queue.batches(2):
            edits += batch
            for edit in batch:  # the second edit of the place moves the result, not the first
                queue.learn(edit, EditOutcome("wrong", ("y",), moved=edit is near[10]), False)
        return [edits.index(named), edits.index(other)]

    assert order([]) == [19, 18]
    place, last = order([{"factor": "w"}])
    assert place < 8 and last == 19


def test_edits_that_bring_in_expressions_are_made_for_places_that_matter_first():
    """For the line that a trace names at the start, for the place that moves a wrong result next, then for the rest."""
    probes = [Edit("kernel.py", ((n, n, "x"),), "number", 1.0, n, n, "f") for n in (1, 2, 3)]
    asked = []

    def far(places):
        asked.append(None if places is None else {line for _, line in places})
        return [Edit("kernel.py", ((9, 9, "y"),), "addend added", 2.0, 9, 9, "f")]

    queue = EditQueue(probes, wrong=["y"], first=[("kernel.py", 9, "f")], far=far)
    for batch in queue.batches(1):
        for edit in batch:
            queue.learn(edit, EditOutcome("wrong", ("y",), moved=edit.line == 3), False)
    assert asked == [{7, 8, 9, 10, 11}, {3}, None]


def test_lines_that_a_trace_shows_to_be_right_come_last_and_are_not_probed():
    right, other = (Edit("kernel.py", ((n, n, "x"),), "number", cost, n, n) for n, cost in ((1, 1.0), (2, 1.5)))
    queue = EditQueue([right, other], beside={("kernel.py", 1)})
    assert list(queue.batches(2)) == [[other], [right]]


def test_the_loop_around_a_line_that_a_trace_names_comes_before_other_lines():
    file = source_of("m = w\nfor i in range(n):\n    z = x\n    z = w\n    z = x * i\n    y = z")
    edits = EveryEdit([], ())
    edits.functions = [Function(file, file.tree.body[0])]
    around = edits.around([("kernel.py", 7, "f")])
    assert around == {("kernel.py", 3)}
    loop, other = (Edit("kernel.py", ((n, n, "x"),), "number", 1.0, n, n, "f") for n in (3, 2))
    queue = EditQueue([other, loop], first=[("kernel.py", 7, "f")], around=around)
    assert next(queue.batches(2)) == [loop, other]


def test_an_operation_of_the_same_statement_with_another_name_is_a_factor():
    kinds = {"x": "f[4]", "n": "f[]", "w": "f[]"}
    wanted = "y = (y * tl.exp(w - n)) + tl.sum(tl.exp(x - n))\n"
    assert any(wanted in t for t in texts_of("y = y + tl.sum(tl.exp(x - n))", **kinds))


def test_a_condition_of_another_function_is_a_mask_where_its_names_are_known():
    text = "def f(p, d, D):\n    return tl.load(p, mask=p > d + D)\n\n\ndef g(d, D):\n    return d < D, e < D\n"
    file = SourceFile("kernel.py", "kernel", text.encode())
    f, g = (Function(file, node) for node in file.tree.body)
    found = {edit.applied(file.data).decode() for edit in near_edits(f, [g])}
    assert any("mask=d < D" in t for t in found) and not any("mask=e < D" in t for t in found)


def test_an_expression_of_another_function_comes_with_what_its_names_are_bound_to():
    text = "def f(x, w, n, s):\n    y = x\n\n\ndef g(w, n, s):\n    t = slice(n, s)\n    return w[t, None]\n"
    file = SourceFile("kernel.py", "kernel", text.encode())
    edits = EveryEdit([], ())
    edits.functions = [Function(file, node) for node in file.tree.body]
    assert any("y = x * w[slice(n, s), None]" in edit.applied(file.data).decode() for edit in edits.far())


def test_a_call_of_the_function_that_a_trace_names_and_what_its_line_calls_come_early():
    text = "def a(x):\n    return x\n\n\ndef b(x):\n    return a(x)\n\n\ndef c(x):\n    y = x\n    b[(1,)](y)\n"
    file = SourceFile("kernel.py", "kernel", text.encode())
    edits = EveryEdit([], ())
    edits.functions = [Function(file, node) for node in file.tree.body]
    assert edits.around([("kernel.py", 6, "b")]) == {("kernel.py", 2), ("kernel.py", 11)}


def test_what_a_forward_saves_for_the_backward_is_edited_as_early_as_the_backward():
    file = source_of("y = x * w\nctx.save_for_backward(x, n)\nreturn y")
    edits = near_edits(Function(file, file.tree.body[0], penalty=1.5))
    names = [e for e in edits if e.kind == "another name"]
    assert min(e.cost for e in names if e.line == 3) + 1 < min(e.cost for e in names if e.line == 2)


def test_a_table_that_nothing_reads_is_looked_up():
    kinds = {"g_ptr": "p[]", "p": "p[]", "n": "i[]", "row": "i[]"}
    texts = texts_of("y = tl.load(p + row)\nz = n", **kinds)
    assert any("y = tl.load(p + tl.load(g_ptr + row))\n" in t for t in texts)


def test_a_name_that_nothing_reads_is_an_early_factor():
    file = source_of("m = x.sum()\nz = w\ny = x")
    edits = EveryEdit([], ())
    edits.functions = [Function(file, file.tree.body[0])]
    cost = {e.applied(file.data).decode().splitlines()[-1].strip(): e.cost for e in edits.far()}
    assert cost["y = x * m"] < cost["y = x * w"]


def test_an_edit_that_mends_a_part_is_made_elsewhere_as_well_next():
    file = source_of("y = x * n\nz = w * n\nu = w + n\nv = x * D * n")
    edits = EveryEdit([], ())
    edits.functions = [Function(file, file.tree.body[0])]
    near = near_edits(edits.functions[0])
    queue = EditQueue(near, wrong=["y"], texts={"kernel.py": file.data})
    part = next(e for e in near if "y = x / n\n" in e.applied(file.data).decode())
    queue.learn(part, EditOutcome("wrong", ("y",)), True)
    texts = [e.applied(file.data).decode() for e in next(queue.batches(4))]
    assert all("y = x / n\n" in t for t in texts)
    assert "z = w / n\n" in texts[0] and "z = w / n\n" in texts[3] and "v = x / D / n\n" in texts[3]


def test_the_edits_of_a_named_line_let_others_come_before_the_last_of_them():
    file = source_of("y = x + n * w - D\nz = w\nz = w\nfor i in range(n):\n    if i < D:\n        u = x * i")
    edits = EveryEdit([], ())
    function = Function(file, file.tree.body[0])
    edits.functions = [function]
    line = next(n.lineno for n in function.nodes if isinstance(n, ast.BinOp))
    assert {place for _, place in edits.branches} == {line + 3, line + 4}
    named = [e for e in near_edits(function) if e.place == line]
    many = [replace(e, spans=(*e.spans, (0, 0, "\n" * i))) for i in range(20) for e in named]
    others = [e for e in near_edits(function) if e.place != line]
    queue = EditQueue([*many, *others], first=[("kernel.py", line, "f")])
    batches = queue.batches(10)
    first = [e.place for _ in range(11) for e in next(batches)]
    assert {line + 3, line + 4, line + 5}.isdisjoint(first[:100])
    assert {line + 3, line + 4, line + 5} <= set(first)


def test_every_line_of_two_functions_gets_edits_that_bring_in_expressions():
    lines = ["y = w + n", "z = tl.load(p + w)", "u = y * z"]
    text = "".join(f"def {f}(p, w, n):\n" + "".join(f"    {line}\n" for line in lines) for f in "ab")
    file = SourceFile("kernel.py", "kernel", text.encode())
    edits = EveryEdit([], ())
    edits.functions = [Function(file, node) for node in file.tree.body]
    assert {e.place for e in edits.far()} == {2, 3, 4, 6, 7, 8}


def test_a_place_that_moves_right_results_as_well_or_not_all_wrong_ones_comes_later():
    probes = [Edit("kernel.py", ((n, n, "x"),), "number", 1.0, n, n) for n in range(4)]
    rest = [Edit("kernel.py", ((n, n, "y"),), "number", 2.0 + n / 50, n, n) for n in range(4)]
    changed = ("y", "w", "z"), ("y",), ("y", "w"), ()
    queue = EditQueue([*probes, *rest], wrong=["y", "w"])
    assert next(queue.batches(4)) == probes
    for probe, names in zip(probes, changed, strict=True):
        queue.learn(probe, EditOutcome("wrong", ("y", "w"), moved=bool(names), changed=names), False)
    assert [e.place for e in next(queue.batches(4))] == [2, 3, 1, 0]


def test_a_name_that_is_bound_again_before_it_is_read_is_renamed_early():
    def cost(line):
        file = source_of(f"x = w + 1\n{line}\nx = n * 2\nreturn x, w")
        edits = near_edits(Function(file, file.tree.body[0]))
        return min(e.cost for e in edits if e.kind == "another target" and e.line == 4 and e.spans[0][2] == "w")

    assert cost("x = x * 3") == cost("pass") < cost("row = x") - 0.5
