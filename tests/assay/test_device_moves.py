"""A judge on the CPU and a candidate on a GPU: what is moved, and that verdicts are those of a judge on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from goldsmith.assay.execute import device_moves
from goldsmith.assay.execute.device_moves import MOST, moved, placed
from goldsmith.assay.execute.records import Material
from goldsmith.assay.support import device_flags

gpu = pytest.mark.gpu
META = torch.device("meta")


def draw(make, rows=5, columns=7):
    return {"x": make.normal(rows, columns), "w": make.normal(columns), "eps": 1e-3}


CASES = [Case("small", draw, {"rows": 5, "columns": 7}), Case("more rows", draw, {"rows": 40, "columns": 33})]


def golden(x, w, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w


def target(candidate, reference=golden):
    return assay.Target(candidate, reference, cases=CASES, name="norm", dtypes=(torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class Nested:
    tensors: list = field(default_factory=list)
    named: dict = field(default_factory=dict)


def test_moved_keeps_strides_shapes_and_identity():
    dense = torch.arange(24.0).reshape(4, 6).t()
    expanded = torch.arange(3.0).expand(5, 3)
    sliced = torch.zeros(400, 400)[::7, ::9]
    there = moved(Nested([dense, dense], {"e": expanded, "s": sliced, "n": None, "empty": torch.empty(0, 3)}), META)
    assert there.tensors[0] is there.tensors[1]
    for before, after in ((dense, there.tensors[0]), (expanded, there.named["e"]), (sliced, there.named["s"])):
        assert (after.device, after.shape, after.stride()) == (META, before.shape, before.stride())
    assert there.named["n"] is None and there.named["empty"].shape == (0, 3)


def test_tensors_are_copied_together_with_their_strides():
    numbers = torch.arange(24.0)
    given = [
        numbers.to(torch.bfloat16)[3:7], numbers.view(4, 6).t(), numbers[:3].expand(5, 3), numbers[::2] > 6.0,
        torch.tensor(5), numbers.to(torch.complex64), numbers.double(),
    ]  # fmt: skip
    copies = device_moves._together(dict(enumerate(given)), torch.device("cpu"))
    for number, tensor in enumerate(given):
        copy = copies[number]
        assert torch.equal(copy, tensor) and (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
        assert copy.data_ptr() != tensor.data_ptr()


def test_flags_are_read_together():
    flags, nan = device_flags.DeviceFlags(), torch.tensor([1.0, float("nan")])
    flags.add("known", True)
    flags.add("computed", (nan == nan).all())
    flags.add("same", device_flags.same_numbers(nan, nan.clone()))
    flags.add("other shape", device_flags.same_numbers(nan, nan[:1]))
    assert flags.read() == {"known": True, "computed": False, "same": True, "other shape": False}


def material(inputs, **scalars):
    return Material(target(golden), "small", {}, inputs, scalars, 0)


@pytest.mark.parametrize(
    ("inputs", "scalars"),
    [
        ({"x": torch.ones(2, device=META)}, {}),
        ({}, {}),
        ({"x": torch.ones(2)}, {"plan": object()}),
        ({"x": torch.ones(2)}, {"plan": [1, (torch.ones(1),)]}),
    ],
    ids=["drawn elsewhere", "no tensor", "a scalar that may hold tensors", "a scalar with a tensor"],
)
def test_what_cannot_move(inputs, scalars):
    assert placed(material(inputs, **scalars), META) is None


def test_a_small_case_stays_and_a_large_one_moves():
    small, large = (material({"x": torch.ones(n)}, eps=1.0, shape=(1, [2])) for n in (MOST, MOST + 1))
    assert placed(small, META).device.type == "cpu" and placed(small, META).candidate_device == META
    assert placed(large, META).device == META and placed(large, META).runs_on is None


@gpu
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_verdict_is_that_of_a_judge_on_the_gpu(monkeypatch, factor):
    def candidate(x, w, eps):
        return (golden(x.float(), w.float(), eps) * factor).to(x.dtype)

    here = assay.check(target(candidate), device="cuda", raises=False)
    monkeypatch.setattr(device_moves, "MOST", -1)
    there = assay.check(target(candidate), device="cuda", raises=False)
    assert here.verdict == there.verdict == ("pass" if factor == 1.0 else "fail")
    kinds = [{(f.rung, f.probe, f.tensor, f.case) for f in r.findings if f.rung == "CERTAIN"} for r in (here, there)]
    assert kinds[0] == kinds[1]
    assert here.cases == there.cases


@gpu
def test_golden_with_a_tensor_on_the_gpu():
    own = torch.ones(7, device="cuda", dtype=torch.float64)

    def reference(x, w, eps):
        return golden(x, w, eps) * own[: x.shape[-1]]

    assay.check(target(golden, reference), case="small", dtype=torch.float32, device="cuda")
