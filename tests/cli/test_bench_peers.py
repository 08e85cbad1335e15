"""What peers compute is what the operator means, and what is timed is the whole operator."""

from dataclasses import replace

import pytest
import torch

from goldsmith import assay
from goldsmith.cli.bench.peers import embedding_bag
from goldsmith.cli.bench.subject import OURS, Subject
from goldsmith.core.op import Op

EXPERTS = Op.get("router.atomic_experts")
SMALL = {c.name: c for c in EXPERTS.cases if "large" not in c.tags}


def subject(case):
    """The benchmark's entry at the size of a case."""
    return Subject(EXPERTS, replace(EXPERTS.bench[0], build=SMALL[case].build, dtype=torch.float32), "cpu")


@pytest.mark.parametrize("case", ["gelu", "gelu_tanh", "relu", "relu2", "identity", "leading_dimensions", "memory"])
def test_embedding_bag_computes_tiny_experts(case):
    def golden(h, w_in=None, *, w_out, weights, indices, activation):
        return EXPERTS.reference.forward(
            h, w_in, w_out, weights, indices, activation=activation, strategy="gather", sparse_grad=False
        )[0]

    def candidate(h, w_in=None, *, w_out, weights, indices, activation):
        return embedding_bag.lookup(h, w_in, w_out, weights, indices, activation)

    given = {name: value for name, value in SMALL[case].build().items() if value is not None}
    given = {name: value for name, value in given.items() if name not in ("strategy", "sparse_grad")}
    assay.check(assay.Target(candidate, golden, cases=given), probes=("values", "ensemble"))


def test_what_is_timed_has_both_tables():
    timed = subject("gelu")
    assert timed.tensors["w_in"] is not None
    for variant in (timed.ours("reference"), embedding_bag.prepare(timed)):
        (y,) = variant.results()
        assert y.shape == timed.tensors["h"].shape and len(variant.leaves) == 4
        assert all(g is not None for g in variant.backward()())
    assert timed.ours("reference").peer == OURS


def test_embedding_bag_does_not_offer_lists_with_holes_nor_other_operators():
    assert embedding_bag.prepare(subject("holes")) is None
    post = Op.get("mhc.post")
    assert embedding_bag.prepare(Subject(post, replace(post.bench[0], build=post.cases[1].build), "cpu")) is None
