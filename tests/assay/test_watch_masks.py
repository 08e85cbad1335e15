"""watch: an infinity that the program writes down is no event; one that an operator makes of finite numbers is."""

import math

import pytest
import torch

from goldsmith import assay

both = pytest.mark.parametrize("sync", [True, False], ids=["sync", "flags"])
UPPER = torch.ones(4, 4, dtype=torch.bool).triu(1)


def by_place():
    mask = torch.zeros(4, 4)
    mask[0, 1] = -math.inf
    return mask


def by_slice():
    mask = torch.zeros(4, 4)
    mask[:, 2:] = -math.inf
    mask[:, 3:].zero_()  # a part is written again; the rest is still the program's own
    return mask


def by_condition():
    mask = torch.zeros(4, 4)
    mask[UPPER] = -math.inf
    return mask


def by_index():
    mask = torch.zeros(4, 4)
    mask[:, [1, 2]] = torch.tensor(-math.inf)
    return mask


def by_copy():
    mask = torch.zeros(4, 4)
    mask[1:, 2:].copy_(torch.tensor(-math.inf))
    return mask


def into_empty():
    mask = torch.empty(4, 4)
    mask[:, :2] = 0
    mask[:, 2:] = -math.inf
    return mask


def chosen():
    return torch.where(UPPER, torch.tensor(-math.inf), torch.zeros(4, 4))


def joined():
    row = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    return torch.cat([torch.stack([row, row]), row.expand(2, 4)])


def from_list():
    return torch.tensor([[0.0, 0.0, -math.inf, 1.0]] * 4)


WRITTEN = [by_place, by_slice, by_condition, by_index, by_copy, into_empty, chosen, joined, from_list]


@both
@pytest.mark.parametrize("make", WRITTEN, ids=lambda make: make.__name__)
def test_a_written_mask_is_no_event_in_any_form(make, sync):
    scores = torch.randn(2, 4, 4)
    with assay.watch(sync=sync, stop=True) as w:
        masked = scores + make()
        (masked * 0.5).to(torch.bfloat16).softmax(-1) @ torch.randn(2, 4, 3).bfloat16()
        masked -= masked.amax(-1, keepdim=True)
        masked.exp_()
    assert w.first is None


@both
@pytest.mark.parametrize("make", WRITTEN, ids=lambda make: make.__name__)
def test_a_nan_that_is_made_of_a_mask_is_an_event(make, sync):
    with assay.watch(sync=sync) as w:
        mask = make()
        mask - mask
    assert [(e.kind, e.op, e.born) for e in w.events] == [("nan", "aten::sub", True)]


@both
def test_a_sampler_that_writes_into_its_scores_ends_no_run(sync):
    with assay.watch(sync=sync, stop=True) as w:
        scores = torch.randn(2, 9)
        scores[scores < scores.topk(3).values[:, -1:]] = -math.inf
        scores.softmax(-1)
    assert w.first is None


@both
def test_a_row_that_is_masked_whole_by_index_is_an_event(sync):
    with assay.watch(sync=sync) as w:
        mask = torch.zeros(3, 3)
        mask[1] = -math.inf
        (torch.randn(3, 3) + mask).softmax(-1)
    assert [(e.kind, e.op, e.born) for e in w.events] == [("nan", "aten::_softmax", True)]


@both
def test_an_existing_mask_is_no_event_as_a_buffer_or_an_input(sync):
    model = torch.nn.Linear(4, 4)
    model.register_buffer("mask", torch.zeros(4, 4).masked_fill(UPPER, -math.inf))
    rows, one = model.mask[:3].clone(), torch.tensor(-math.inf)
    with assay.watch(model, sync=sync, stop=True) as w:
        scores = model(torch.randn(4, 4))
        (scores + model.mask).softmax(-1)
        (scores[:3] + rows).softmax(-1)
        torch.where(UPPER, one, scores).softmax(-1)
    assert w.first is None


@both
def test_an_unwritten_infinity_is_attributed_to_its_entry(sync):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(-math.inf)  # a mask's value, but in a parameter
    batch, numpy = torch.tensor([[1.0, -math.inf]]), torch.tensor([1.0, math.inf]).numpy()
    with assay.watch(model, sync=sync) as w:
        model.weight * 2
        torch.gt(batch, 0)  # its result is no number, so no event may be reported or forgotten here
        batch * 2
        torch.from_numpy(numpy) * 2
    assert [(e.kind, e.born, e.source) for e in w.events] == [
        ("inf", False, "weight"), ("inf", False, "input"), ("inf", False, "input")
    ]  # fmt: skip


@both
def test_another_infinity_stays_an_event_next_to_a_mask(sync):
    batch = torch.tensor([1.0, math.inf, 2.0])
    with assay.watch(sync=sync) as w:
        mask = torch.zeros(3)
        mask[0] = -math.inf
        batch + mask
    assert [(e.op, e.born, e.source) for e in w.events] == [("aten::add", False, "input")]


@both
def test_a_partial_write_keeps_the_event_of_the_rest(sync):
    with assay.watch(sync=sync) as w:
        whole = torch.zeros(4) / torch.zeros(4)
        whole[:2] = 1.0
        whole * 2
    assert [(e.op, e.kind) for e in w.events] == [("aten::div", "nan")]


def test_an_overflow_next_to_a_mask_is_an_event():
    with assay.watch() as w:
        scores = torch.tensor([[3e38, 1.0], [1.0, 1.0]]).masked_fill(UPPER[:2, :2], -math.inf)
        scores * 4
    assert (w.first.op, w.first.born, w.first.count, w.first.index) == ("aten::mul", True, 1, (0, 0))


@both
def test_a_nan_that_is_written_down_is_an_event(sync):
    with assay.watch(sync=sync) as w:
        row = torch.zeros(3)
        row[1] = math.nan
    assert [(e.kind, e.source) for e in w.events] == [("nan", "a constant")]


@both
def test_a_watch_within_a_watch_is_not_watched(sync):
    def run():
        x = torch.zeros(2, requires_grad=True)
        (x.sqrt() / x).sum().backward()
        y = torch.zeros(2, dtype=torch.float16)
        y[0] = -math.inf
        (y + 6e4) * 6e4

    def seen(watch):
        return [(e.kind, e.phase, e.op, e.tensor) for e in watch.events]

    with assay.watch(sync=sync) as alone:
        run()
    for inside in (True, False):
        with assay.watch(sync=sync) as outer, assay.watch(sync=inside) as inner:
            run()
        assert seen(outer) == seen(alone)
        assert [e[2] for e in seen(inner)][:1] == [e[2] for e in seen(alone)][:1]
