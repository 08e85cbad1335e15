"""What peers compute is what the operator means, and what is timed is the whole operator."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from benchmarks.peers import embedding_bag, gather, topk, topk_compiled
from goldsmith import assay
from goldsmith.cli.bench.subject import OURS, Subject
from goldsmith.cli.bench.verifier import relative_error
from goldsmith.core.op import Op

EXPERTS = Op.get("router.atomic_experts")
SMALL = {c.name: c for c in EXPERTS.cases if "large" not in c.tags}


def subject(case):
    """The benchmark's entry at the size of a case."""
    return Subject(EXPERTS, replace(EXPERTS.bench[0], build=SMALL[case].build, dtype=torch.float32), "cpu")


@pytest.mark.parametrize("case", ["gelu", "gelu_tanh", "relu", "relu2", "identity", "leading_dimensions", "memory"])
@pytest.mark.parametrize("peer", [embedding_bag, gather], ids=lambda peer: peer.NAME)
def test_peers_compute_tiny_experts(peer, case, monkeypatch):
    monkeypatch.setattr(gather, "CHUNK_BYTES", 3 * 3 * 6 * 4)  # two tokens, or a few more, at a time

    def golden(h, w_in=None, *, w_out, weights, indices, activation):
        return EXPERTS.reference.forward(
            h, w_in, w_out, weights, indices, activation=activation, strategy="gather", sparse_grad=False
        )[0]

    def candidate(h, w_in=None, *, w_out, weights, indices, activation):
        return peer.lookup(h, w_in, w_out, weights, indices, activation)

    inputs = {name: value for name, value in SMALL[case].build().items() if value is not None}
    inputs = {name: value for name, value in inputs.items() if name not in ("strategy", "sparse_grad")}
    assay.check(assay.Target(candidate, golden, cases=inputs), probes=("values", "ensemble"))


def test_the_timed_cases_have_both_tables():
    timed = subject("gelu")
    assert timed.tensors["w_in"] is not None
    for variant in (timed.ours("reference"), embedding_bag.prepare(timed), gather.prepare(timed)):
        (y,) = variant.results()
        assert y.shape == timed.tensors["h"].shape and len(variant.leaves) == 4
        assert all(g is not None for g in variant.backward()())
    assert timed.ours("reference").peer == OURS


@pytest.mark.parametrize("peer", [embedding_bag, gather], ids=lambda peer: peer.NAME)
def test_peers_do_not_offer_lists_with_holes_nor_other_operators(peer):
    assert peer.prepare(subject("holes")) is None
    post = Op.get("mhc.post")
    assert peer.prepare(Subject(post, replace(post.bench[0], build=post.cases[1].build), "cpu")) is None


def test_topk_compiled_is_topk(monkeypatch):
    """But for what the compiler makes of it, which takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    op = Op.get("router.product_topk")
    case = next(c for c in op.cases if c.name == "published")
    entry = replace(op.bench[0], build=case.build, sizes=case.sizes, dtype=torch.float32)
    timed = Subject(op, entry, "cpu")
    eager, compiled = (peer.prepare(timed) for peer in (topk, topk_compiled))
    assert torch.equal(eager.results()[1], compiled.results()[1])
    assert relative_error(timed.golden(), compiled) < 2 * relative_error(timed.golden(), eager)
    assert compiled.peer == "topk-compile" and all(g is not None for g in compiled.backward()())
