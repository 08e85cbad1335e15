"""What no right result excuses: gradients that autograd mends, exchanged stages, kernels that no compiler takes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from assay.diagnosis.test_patches import SECONDS, TORCH, TRITON, failing
from assay.diagnosis.written_modules import forget, load
from assay.kernels import target
from assay.test_formula_rounding import chunked, recurrence, tokens
from goldsmith import assay
from goldsmith.assay.diagnosis.source import search as searching
from goldsmith.assay.diagnosis.source.acceptance import Acceptance, Accepted
from goldsmith.assay.diagnosis.source.children.comparison import wrong_share
from goldsmith.assay.diagnosis.source.children.counted_work import CountedWork, more_work
from goldsmith.assay.diagnosis.source.children.mutant_process import _PLAIN
from goldsmith.assay.diagnosis.source.children.mutants import Mutants
from goldsmith.assay.diagnosis.source.edits.edits import Edit
from goldsmith.assay.diagnosis.source.patch import Patch
from goldsmith.assay.diagnosis.source.problems import of_examination, of_material, problem
from goldsmith.assay.diagnosis.source.reading.candidate_source import candidate_source
from goldsmith.assay.diagnosis.source.survivors import Survivor, Survivors
from goldsmith.assay.execute.records import RunSettings
from goldsmith.assay.execute.run import execute
from goldsmith.assay.golden.golden_results import GoldenResults
from goldsmith.assay.judge.examination import Examination
from goldsmith.assay.report.results import CERTAIN, FAIL, PASS, Finding


@pytest.fixture(autouse=True)
def _modules():
    yield
    forget()


def judged(folder, text, *changes):
    """Each change of the text: (state, what is wrong, stages that differ, the survivor or None)."""
    module = load(folder, text)
    examination = failing(module.target)[0]
    source = candidate_source(module.target)
    ((path, file),) = source.files.items()
    found = []
    with Mutants(source, [of_examination(examination)]) as mutants:
        acceptance = Acceptance(module.target, source, examination, mutants.original.wrong)
        survivors = Survivors(acceptance, source, mutants, examination, lambda text: None)
        for pairs in changes:
            spans = []
            for old, new in pairs:
                assert file.data.count(old.encode()) == 1
                at = file.data.index(old.encode())
                spans.append((at, at + len(old), new))
            edit = Edit(path, tuple(spans), "change", 1.0, 1)
            ((_, outcome),) = mutants.tried([edit])
            before = len(survivors.accepted)
            if outcome.state == "right":
                survivors.judge(edit, 60.0, outcome.stages)
            found.append((outcome.state, outcome.wrong, outcome.stages, next(iter(survivors.accepted[before:]), None)))
    return found


def test_a_gradient_that_autograd_would_sum_or_cast_is_no_patch(tmp_path):
    wrong = "dw = torch.zeros_like(w)  # and nothing more"
    text = TORCH.replace("            dw += grad[t] * normed[t]\n", "            pass\n").replace(
        "dw = torch.zeros_like(w)", wrong
    )
    rows = "grad * normed"
    shape, dtype, right = judged(
        tmp_path, text, [(wrong, f"dw = {rows}")], [(wrong, f"dw = ({rows}).sum(0).double()")],
        [(wrong, f"dw = ({rows}).sum(0)")],
    )  # fmt: skip
    assert shape[:2] == dtype[:2] == ("wrong", ("shape or dtype of a gradient",))
    assert right[0] == "right" and right[3] is not None


STAGES = """
import torch

from goldsmith import assay


def blend(x, w, v):
    low, high = v, w
    first = assay.stage("first", x * low)
    second = assay.stage("second", x * high)
    third = assay.stage("third", first - second)
    return 2 * third


def golden(x, w, v):
    assay.stage("first", x * w)
    assay.stage("second", x * v)
    return 2 * assay.stage("third", x * (w - v))


@assay.case(T=[3])
def tokens(make, T):
    return {"x": make.normal(T), "w": make.normal(T), "v": make.normal(T)}


target = assay.Target(blend, golden, cases=tokens, backward=None)
"""


def test_exchanged_stages_are_no_patch(tmp_path):
    exchanged, right = judged(tmp_path, STAGES, [("first - second", "second - first")], [("= v, w", "= w, v")])
    assert exchanged[:2] == ("wrong", ("names of stages",))
    assert right[:3] == ("right", (), ()) and right[3] is not None


def test_a_patch_behind_the_wrong_stage_comes_after_one_in_it(tmp_path):
    text = STAGES.replace("= v, w", "= w, v").replace('"third", first - second', '"third", first')
    behind, within = judged(
        tmp_path, text, [("2 * third\n", "2 * (third - second)\n")], [('"third", first', '"third", first - second')]
    )
    assert behind[2] == behind[3].stages == ("third",)
    assert within[0] == "right" and within[3].stages == () and within[3].rank < behind[3].rank


ADDED = """    acc = tl.zeros([BLOCK], tl.float16)
    for _ in range(0, 1):
        acc += (x - tl.max(x, axis=0)).to(tl.float16)
    e = tl.exp(acc.to(tl.float32))
"""
LOOP = TRITON.replace("    e = tl.exp(x - tl.max(x, axis=0))\n", ADDED)


def test_a_kernel_that_only_the_interpreter_takes_is_no_patch(tmp_path):
    """An accumulator must not change its type in a loop."""
    refused, right = judged(
        tmp_path, LOOP, [(".to(tl.float16)\n", "\n")],
        [(".to(tl.float16)\n", "\n"), ("[BLOCK], tl.float16", "[BLOCK], tl.float32")],
    )  # fmt: skip
    assert refused[0] == "right" and refused[3] is None
    assert right[0] == "right" and right[3].compiled


def test_what_no_compiler_has_seen_is_said():
    patch = Patch("k.py", 3, "dtype", "", 2, compiled=False, stages=("s",))
    assert patch.sentence.endswith(
        "; not compiled: its Triton kernels ran in the interpreter only; s still differs from the golden"
    )


def test_only_the_work_of_the_candidate_is_counted():
    def double(x):
        return 2 * x

    @assay.case(T=[39])
    def rows(make, T):
        return {"x": make.normal(T)}

    target = assay.Target(double, double, cases=rows)
    material = Examination(target, rows[0], None, torch.device("cpu"), 0, frozenset(("values",)), "rows").material
    with CountedWork(target) as work:
        execute(material, _PLAIN)
    assert work.counts == (4 * 39, 0, 0)  # one number read and one written, in both directions


def test_a_larger_block_of_masked_elements_is_more_work(tmp_path):
    wrong = TRITON.replace("mask = d < D", "mask = d < D - 1")
    right, large = judged(
        tmp_path, wrong, [("d < D - 1", "d < D")], [("d < D - 1", "d < D"), ("BLOCK=8", "BLOCK=64")]
    )  # fmt: skip
    assert right[3].work == 1.0 and large[3].work == 8.0 and large[3].doubtful and not large[3].block
    assert more_work((0, 8, 8), (0, 16, 16)) == more_work((0, 8, 8), (0, 8, 2)) == 1.0  # a longer loop; a mask


BLOCKS = """
import torch
import triton
import triton.language as tl

from goldsmith import assay


@triton.jit
def _double(x_ptr, y_ptr, D, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for start in range(0, D, BLOCK):
        d = start + column
        x = tl.load(x_ptr + column, d < D)
        tl.store(y_ptr + d, 2 * x, d < D)


def double(x):
    y = torch.empty_like(x)
    _double[(1,)](x.contiguous(), y, x.numel(), BLOCK=8)
    return y


def golden(x):
    return 2 * x


@assay.case()
def short(make):
    return {"x": make.normal(16)}


target = assay.Target(double, golden, cases=short, backward=None)
"""


def test_a_block_that_holds_the_declared_sizes_is_in_doubt(tmp_path):
    """No larger size can be drawn here, and no element of the larger block is masked."""
    larger, right = judged(tmp_path, BLOCKS, [("BLOCK=8", "BLOCK=16")], [("x_ptr + column", "x_ptr + d")])
    assert larger[0] == "right" and larger[3].block and larger[3].doubtful and larger[3].work == 1.0
    assert right[3] is not None and not right[3].doubtful and right[3].rank < larger[3].rank
    patch = Patch("k.py", 3, "number", "", 2, block=True)
    assert patch.doubtful and "another size, on which no result should depend" in patch.sentence


BANDED = """
import torch

from goldsmith import assay


def double(x):
    return 2 * x if torch.empty(64).isnan().all() else 3 * x


def golden(x):
    return 2 * x


@assay.case(T=[3])
def tokens(make, T):
    return {"x": make.normal(T)}


target = assay.Target(double, golden, cases=tokens, backward=None)
"""


def test_edits_of_a_kernel_that_writes_past_its_buffers_always_have_guard_bands(tmp_path):
    """Its memory is poisoned between these bands. Without them a store that is too wide hits the process itself."""
    module = load(tmp_path, BANDED)
    material = Examination(
        module.target, module.tokens[0], None, torch.device("cpu"), 0, frozenset(("values",)), "t"
    ).material
    source, plain = candidate_source(module.target), of_material(material)
    states = []
    for each in (plain, {**plain, "banded": True}):
        with Mutants(source, [each]) as mutants:
            states.append(mutants.original.state)
    assert states == ["wrong", "right"]


def test_an_edit_may_round_like_another_formula_as_in_a_check():
    """The gradient of the decays is a difference of sums in the chunked kernel, and 0 at the first element."""
    chunks = target(chunked, recurrence, tokens)
    material = Examination(chunks, tokens[0], None, torch.device("cpu"), 0, frozenset(("values",)), "tokens").material
    run = execute(material, RunSettings())
    exact = GoldenResults(material, run)
    bounded = exact.reference("a.grad", "grad", noise=False).bounded
    assert wrong_share(run.grads["a.grad"], bounded.value, bounded.bound)
    known = problem(material, run, exact)["golden"]
    assert not any(wrong_share(tensor, *known[name]) for name, _, tensor in run.results())


@pytest.mark.parametrize("another", [False, True])
def test_a_probe_that_finds_another_formula_s_rounding_alone_accepts_an_edit(tmp_path, monkeypatch, another):
    module = load(tmp_path, TORCH.replace("return x * rstd * w", "return x * rstd"))
    examination, source = failing(module.target)[0], candidate_source(module.target)
    values = {"another_formula": True} if another else {}
    finding = Finding(CERTAIN, "layouts", "y", None, 2.0, 1.0, "y differs", values=values)
    reports = [SimpleNamespace(verdict=PASS), SimpleNamespace(verdict=FAIL, findings=[finding], cases=[])]
    monkeypatch.setattr(Acceptance, "_process", lambda self, edited: SimpleNamespace(seen=(), close=lambda: None))
    monkeypatch.setattr(Acceptance, "_report", lambda self, *args, **named: reports.pop(0) if reports else None)
    answer = Acceptance(module.target, source, examination, ("y",)).of({}, 20.0)
    assert answer.remaining == ("y differs",) and isinstance(answer, Accepted) is another


def test_among_equal_edits_comes_first_what_turns_no_branch_off_and_does_no_more_work():
    texts = {"k.py": "if k == 0:\n    y = x[:]\n    y = x[-1:]\n"}
    branch, all_of_it, last = (
        Survivor(Edit("k.py", ((0, 0, text),), "number", 1.0, line), texts, 2, work=work)
        for text, line, work in (("", 1, 1.0), ("x", 2, 1.2), ("long", 3, 0.9))
    )
    assert sorted([branch, all_of_it, last], key=lambda s: s.rank) == [last, all_of_it, branch]


def test_a_number_of_the_case_in_the_source_mends_no_other_case(tmp_path):
    """It is no patch; another edit that holds for the numbers of the cases only is in doubt."""
    wrong = TORCH.replace("(mean + eps)", "(mean)")
    named, number, size = (
        [("(mean)", text)] for text in ("(mean + eps)", "(mean + 0.25)", "(mean + 1 / (eps.as_integer_ratio()[1]))")
    )
    assert judged(tmp_path, wrong, number)[0][3] is None
    assert judged(tmp_path, wrong, size)[0][3].narrow
    assert not judged(tmp_path, wrong, named)[0][3].doubtful


def test_an_edit_that_leaves_other_layouts_wrong_gets_a_copy_beside_it(tmp_path, monkeypatch):
    """The first picture of the README."""
    pytest.importorskip("triton")
    monkeypatch.setattr(searching, "_EQUALS", 0.0)  # the first edit's equals have no time, and a second one has its own
    target = load(tmp_path, (Path(__file__).parents[3] / "examples" / "wrong_softmax.py").read_text()).target
    search = searching.find_patch(target, failing(target), SECONDS)
    assert search.patch is not None, search.reason
    assert search.patch.joins == ("value of masked elements", "made contiguous")
    assert not search.patch.remaining
