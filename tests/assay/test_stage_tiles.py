"""Stages that a loop makes chunk by chunk or tile by tile are judged as one stage."""

import pytest
import torch

from goldsmith import assay


@assay.case(N=[7], V=[5])
def rows(make, N, V):
    return {"x": make.normal(N, V)}


def golden(x):
    return torch.log_softmax(assay.stage("capped", 3 * torch.tanh(x / 3)), -1)


def in_chunks(factor):
    def forward(x):
        return torch.cat([torch.log_softmax(assay.stage("capped", factor * torch.tanh(p / 3)), -1) for p in x.split(3)])

    return forward


def in_tiles(factor):
    def forward(x):
        y = torch.empty_like(x)
        for r in range(0, len(x), 3):
            for c in range(0, x.shape[1], 2):
                tile = x[r : r + 3, c : c + 2]
                y[r : r + 3, c : c + 2] = assay.stage(
                    "capped", factor * torch.tanh(tile / 3), at=(slice(r, r + 3), slice(c, c + 2))
                )
        return torch.log_softmax(y, -1)

    return forward


@pytest.mark.parametrize("make", [in_chunks, in_tiles])
def test_pieces_of_a_right_stage_are_no_note(make):
    report = assay.check(assay.Target(make(3), golden, cases=rows, name="pieces"), raises=False)
    assert report.verdict == "pass"
    assert not [n for n in report.notes if n.id in ("unknown_stage", "stage_differs")]


@pytest.mark.parametrize("make", [in_chunks, in_tiles])
def test_a_wrong_stage_of_pieces_is_the_first_wrong_one(make):
    diagnosis = assay.diagnose(assay.Target(make(2), golden, cases=rows, name="pieces"), budget_s=10)
    assert diagnosis.first_wrong_stage == "capped"
    assert all(s.propagated is None or s.propagated < float("inf") for s in diagnosis.stages)


def test_a_tile_without_its_place_is_refused():
    def forward(x):
        return torch.log_softmax(assay.stage("capped", 3 * torch.tanh(x / 3), at=(slice(0, 7), torch.arange(3))), -1)

    with pytest.raises(assay.TargetError, match="3 indices for 5 places"):
        assay.check(assay.Target(forward, golden, cases=rows, name="pieces"))
