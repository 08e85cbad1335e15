"""ExpertParallel with batches as they come, together with FSDP2, and calls that make no sense."""

import functools

import pytest
import torch

from distributed import models, parallel_layers
from distributed.test_modules import certify
from goldsmith import assay, router


def inputs(tokens, experts=(3, 3), dim=6):
    torch.manual_seed(0)
    values = {"h": torch.randn(tokens, dim), "dy": torch.randn(tokens, dim)}
    values |= {"rx": torch.randn(experts[0], dim), "ry": torch.randn(experts[1], dim)}
    return values | {name: torch.randn(experts[0] * experts[1], dim) for name in ("w_in", "w_out")}


NAMES = ("rx", "ry", "w_in", "w_out")


@pytest.mark.parametrize("world", [2, 4])
def test_rows_of_different_lengths_and_a_rank_without_experts_are_certified(world, pools):
    """9 experts on 4 ranks: 3, 3, 3 and none. 7 tokens: 2, 2, 2 and 1."""
    certify(pools(world), parallel_layers.batches_of_different_lengths, models.plain_experts, inputs(7), NAMES)


def test_experts_over_one_dimension_and_fsdp_over_the_other_are_certified(pools):
    certify(pools(4), parallel_layers.over_two_dimensions, models.plain_experts, inputs(8), NAMES)


@pytest.mark.parametrize("mistake, error, text", [
    ("no_placement", "TypeError", "input_layouts='rows', expected Shard(0)"),
    ("two_dimensions", "ValueError", 'has 2 dimensions, expected one of them, such as mesh["ep"]'),
    ("zeros_in_a_norm", "ValueError", "router_norm_x would count the zeros"),
    ("other_output", "ValueError", "results need output_layouts like input_layouts"),
    ("other_axes", "ValueError", "h has 1 axes on one rank and 2 on another"),
    ("same_ranks", "ValueError", "ignored_params=set(layer.parameters())"),
    ("sparse_fsdp", "ValueError", "OmniMoE has sparse_grad=True, but FSDP2 reduces dense gradients"),
    ("policy", "TypeError", "mp_policy='bfloat16', expected a torch.distributed.fsdp.MixedPrecisionPolicy"),
    ("one_rank_only", "ValueError", "is a DTensor and has a gradient on some ranks only"),
    ("other_parameters", "ValueError", "number 0 is [2] on rank 0, and [3] on rank 1"),
    ("no_mesh", "TypeError", "mesh is of type ProcessGroup, expected a DeviceMesh"),
    ("other_sizes", "ValueError", "number 0 is [3] torch.float32 on rank 0, and [4] torch.float32 on rank 1"),
    ("other_number", "ValueError", "rank 0 has 0 of them, and rank 1 has 1"),
    ("no_tensors", "TypeError", "parameters has a str, expected tensors"),
    ("named_parameters", "TypeError", "parameters has a tuple, expected tensors"),
])  # fmt: skip
def test_a_call_that_makes_no_sense_is_one_sentence_on_every_rank(mistake, error, text, refusals):
    for messages in refusals:
        kind, message = messages[mistake]
        assert kind == error and text in message, message


@pytest.fixture(scope="module")
def refusals(pools):
    return pools(2).run(parallel_layers.refusals, [()] * 2)


def test_a_gradient_that_one_rank_has_counts_as_zeros_on_the_others(pools):
    values, unused = [torch.tensor([2.0, 4.0]), torch.tensor(6.0)], torch.ones(3)
    for means in pools(2).run(parallel_layers.mean_of_used_parameters, [(values, unused)] * 2):
        assert all(torch.equal(mean, value / 2) for mean, value in zip(means, values, strict=True))


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
def test_one_norm_of_all_kinds_of_gradients_is_certified(norm_type, pools):
    torch.manual_seed(0)
    gradients = [torch.randn(5) for _ in range(6)]
    (norm, clipped), other = pools(2).run(parallel_layers.norm_of_all_kinds, [(norm_type, *gradients)] * 2)
    assert torch.equal(norm, other[0]) and all(map(torch.equal, clipped, other[1]))

    def golden(g):
        total = torch.linalg.vector_norm(g, norm_type)
        return {"norm": total, "clipped": g * torch.clamp(1 / (total + 1e-6), max=1.0)}

    def candidate(g):
        return {"norm": norm.float(), "clipped": torch.cat(clipped)}

    assay.check(assay.Target(candidate, golden, cases={"g": torch.cat(gradients)}, backward=None), probes=("values",))


@pytest.mark.parametrize("kind", ["marginal", "joint"])
def test_the_loss_of_dtensors_is_that_of_one_process(kind, pools):
    torch.manual_seed(0)
    values = {"x": torch.randn(7, 5), "y": torch.randn(7, 4)}
    values["indices"] = router.product_topk(*values.values(), 3)[1]

    step, golden = (functools.partial(f, kind) for f in (parallel_layers.loss_of_dtensors, models.plain_loss))
    certify(pools(2), step, golden, values, ("x", "y"))


@pytest.mark.parametrize("style", ["stack", "sequential"])
def test_one_block_is_unsharded_at_a_time(style, pools):
    for most, size, calls, left in pools(2).run(parallel_layers.most_unsharded_at_once, [(style,)] * 2):
        assert calls == 4 and left == 0
        assert most <= size
