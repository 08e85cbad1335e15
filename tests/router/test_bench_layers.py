"""The layers that are timed are router.PEER, and what stands beside them computes the same."""

from dataclasses import replace

import pytest
import torch

from benchmarks.modules.product_key_layers import PeerLayer, ProductKeyMemory, formula
from benchmarks.peers import published, topk
from goldsmith import Op, assay, router
from goldsmith.cli.bench.subject import Subject

SIZES = {"T": 512, "D": 32, "s": 16, "heads": 4, "k": 6, "key_dim": 24}


def relative_error(golden, variant):
    return (variant.results()[0][: len(golden)] - golden).norm() / golden.norm()


@pytest.fixture(params=[PeerLayer, ProductKeyMemory], ids=lambda subject: subject.kind)
def subject(request):
    layer = request.param
    entry = layer.entries()[0]
    small = assay.case(**{name: [size] for name, size in SIZES.items()})(layer.draw)[0]
    return layer(replace(entry, build=small.build), "cpu")


def test_the_formula_is_the_golden_of_the_module(subject):
    assay.check(subject.target("reference"), dtype=torch.float32, probes=("values", "ensemble", "second_call"))


def test_published_layers_select_and_give_the_same(subject):
    golden = subject.golden()
    ours = subject.ours("reference")
    leaves = {tuple(leaf.shape) for leaf in ours.leaves}
    assert relative_error(golden, ours) < relative_error(golden.flip(-1), ours) / 1e5
    peers = [peer for peer in published.PEERS if peer.missing() is None]
    for variant in filter(None, (peer.prepare(subject) for peer in peers)):
        assert variant.note.startswith("0 of its selections")
        assert relative_error(golden, variant) < 2 * relative_error(golden, ours)
        assert len(variant.leaves) == len(ours.leaves) and len(leaves & {tuple(t.shape) for t in variant.leaves}) > 1


def test_every_parameter_gets_a_gradient(subject):
    tensors = {name: t.double().requires_grad_() for name, t in subject.tensors.items()}
    formula(**tensors, **subject.options).sum().backward()
    assert all(t.grad.any() for t in tensors.values())
    assert all(gradient is not None for gradient in subject.ours("reference").backward()())


@pytest.mark.parametrize("weights", ["none", "exp", "softmax"])
@pytest.mark.parametrize("log_softmax", [False, True])
def test_topk_of_topk_computes_product_topk_where_nothing_ties(weights, log_softmax):
    x, y = torch.randn(40, 30), torch.randn(40, 20)
    theirs = topk.route(x, y, 7, log_softmax, weights)
    ours = router.product_topk(x, y, 7, log_softmax=log_softmax, weights=weights, backend="reference")
    assert torch.equal(theirs[1].sort(-1).values, ours[1].sort(-1).values.long())
    places = ours[1].long()

    def golden(x, y, places):
        sums = (x[:, :, None] + y[:, None, :]).flatten(1)
        if log_softmax and weights != "softmax":
            sums = sums - (x.logsumexp(-1, True) + y.logsumexp(-1, True))
        scores = sums.gather(-1, places)
        return {"none": lambda: scores, "exp": scores.exp, "softmax": lambda: scores.softmax(-1)}[weights]()

    result = assay.Target(
        lambda x, y, places: theirs[0], golden, cases={"x": x, "y": y, "places": places}, backward=None
    )
    assay.check(result, probes=("values", "ensemble"))
    op = Op.get("router.product_topk")
    draw = {"T": 9, "sx": 30, "sy": 20, "k": 7, "weights": weights, "log_softmax": log_softmax}
    entry = replace(op.bench[0], dtype=torch.float32, sizes=draw, build=replace(op.cases[0], sizes=draw).build)
    variant = topk.prepare(Subject(op, entry, "cpu"))
    assert "0 of its selections" in variant.note and all(g is not None for g in variant.backward()())
