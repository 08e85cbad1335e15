"""OmniMoE and PEER: compilation, precision, recomputation, causality and gradients."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from goldsmith import ShapeError, assay, router
from router import formulas
from router.layers import CAUSAL, VARIANTS, D, layer, tied

everyone = pytest.mark.parametrize("name", list(VARIANTS))


def parameters_and_gradients(module, loss):
    names, values = zip(*module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, values, allow_unused=True), strict=True))


@everyone
def test_a_layer_agrees_with_its_formula(name):
    module = layer(name)
    with torch.no_grad():  # initially norms multiply by 1 and add 0
        for norm in (getattr(module, "pre_norm", None), getattr(module, "norm", None)):
            for p in () if norm is None else norm.parameters():
                p.normal_(1.0)
    formulas.check(formulas.target(module, formulas.inputs(module, 11)))


@everyone
def test_a_layer_selects_the_experts_of_a_full_sort(name):
    module, h = layer(name), torch.randn(11, D)
    _, routed = module(h, return_router=True)
    wanted = formulas.best(routed.x, routed.y, module.k)[1]
    assert torch.equal(routed.indices.long().view(wanted.shape) % 49, wanted % 49)


@everyone
def test_compiles_as_one_graph_without_recompiling_for_another_routing(name):
    torch._dynamo.reset()
    module = layer(name)
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counted)
    for seed in range(3):
        inputs = formulas.inputs(module, 14) | {"h": torch.randn(14, D, generator=torch.Generator().manual_seed(seed))}
        dout = torch.randn(14, D)
        formulas.check(formulas.precomputed_target(formulas.precomputed(compiled, inputs, dout), module, inputs, dout))
    assert counted.frame_count == 1


@everyone
def test_under_autocast_projections_are_16_bit_and_the_routing_is_float32(name):
    module, h = layer(name), torch.randn(9, D)
    with torch.autocast("cpu", torch.bfloat16):
        y, routed = module(h, return_router=True)
    assert routed.x.dtype == routed.y.dtype == routed.weights.dtype == torch.float32
    plain = module(h, return_router=True)[1]
    assert not torch.equal(routed.x, plain.x), "the projection was not in bfloat16"
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


@everyone
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_runs_in_every_dtype(name, dtype):
    module, h = layer(name).to(dtype), torch.randn(9, D, dtype=dtype)
    y, routed = module(h, return_router=True)
    assert y.dtype == dtype
    assert routed.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for buffer in module.buffers():
        assert not buffer.is_floating_point() or buffer.element_size() >= 4, "statistics stay in float32"
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@everyone
def test_recomputation_selects_the_same_experts_despite_ties(name):
    module = layer(name)
    with torch.no_grad():  # groups of two and three experts with equal logits
        if "omnimoe" in name:
            for linear in (module.router_x, module.router_y):
                linear.weight.copy_(linear.weight[torch.arange(len(linear.weight)) // 3])
        else:
            module.keys.copy_(module.keys[:, :, torch.arange(7) // 2])
    h = tied(2, 40, D).requires_grad_()
    seen = []
    run = module.forward

    def spied(h):
        y, routed = run(h, return_router=True)
        seen.append(routed.indices)
        return y

    plain = spied(h)
    scores = router.product_topk(*(module(h, return_router=True)[1])[:2], 9, backend="reference")[0]
    ties = (scores[..., 1:] == scores[..., :-1]).double().mean()
    assert ties > 0.1
    dy = torch.randn_like(plain)
    wanted = torch.autograd.grad(plain, [h, *module.parameters()], dy)
    with set_checkpoint_early_stop(False):
        again = checkpoint(spied, h, use_reentrant=False)
        gradients = torch.autograd.grad(again, [h, *module.parameters()], dy)
    assert len(seen) == 3 and torch.equal(seen[1], seen[2]), "the backward recomputed the layer"
    assert all(torch.equal(a, b) for a, b in zip(wanted, gradients, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["omnimoe_paper", "peer_memory"])
def test_running_statistics_move_once_per_step_under_checkpointing(name, reentrant):
    plain, again = layer(name), layer(name)
    h = torch.randn(2, 9, D)
    for call in (plain, partial(checkpoint, again, use_reentrant=reentrant)):
        call(h.requires_grad_()).square().sum().backward()
    for (buffer, one), (_, other) in zip(plain.named_buffers(), again.named_buffers(), strict=True):
        assert torch.equal(one, other), buffer
    for (parameter, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), parameter


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_changing_a_token_changes_no_bit_of_another(name, train):
    module, h = layer(name).train(train), torch.randn(2, 13, D)
    before = module(h)
    for t in (0, 6, 12):
        changed = h.clone()
        changed[:, t] = 100 * torch.randn(2, D)
        after = module(changed)
        others = torch.arange(13) != t
        assert torch.equal(before[:, others], after[:, others]) and not torch.equal(before[:, t], after[:, t])


def test_the_batch_norm_is_not_causal_in_training_and_the_docstring_says_so():
    module, h = layer("omnimoe_paper"), torch.randn(1, 8, D)
    changed = h.clone()
    changed[:, -1] = 100.0
    assert not torch.equal(module(h)[:, 0], module(changed)[:, 0])
    module.eval()
    assert torch.equal(module(h)[:, 0], module(changed)[:, 0])
    for owner in (router.OmniMoE, router.OmniMoE.paper, router.PEER):
        assert "not\ncausal in training" in owner.__doc__.lower().replace("    ", "") or (
            "not causal in training" in " ".join(owner.__doc__.lower().split())
        )
    message = (
        "router.OmniMoE: router_norm='batch': a BatchNorm over the tokens needs at least 2 of them in training, got 1"
    )
    with pytest.raises(ValueError, match=message):
        layer("omnimoe_paper")(torch.randn(1, D))


@everyone
def test_meta_device_deepcopy_and_state_dict(name):
    module, h = layer(name, seed=1).eval(), torch.randn(5, D)
    same = copy.deepcopy(module)
    hollow = layer(name, device="meta")
    assert all(p.is_meta for p in hollow.parameters())
    hollow.load_state_dict(module.state_dict(), assign=True)
    other = layer(name, seed=2).eval()
    assert not torch.equal(other(h), module(h))
    other.load_state_dict(module.state_dict())
    for each in (same, hollow.eval(), other):
        assert torch.equal(each(h), module(h))


@everyone
def test_a_seeded_initialisation_repeats(name):
    first, second = layer(name, seed=3), layer(name, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    torch.manual_seed(3)
    first.reset_parameters()
    torch.manual_seed(3)
    second.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def routed_over_shared(k, **options):
    """RMS of the routed branch divided by that of the shared one, for h of RMS 1."""
    torch.manual_seed(0)
    module = router.OmniMoE(256, 4096, k, intermediate_size=512, strategy="gather", backend="reference", **options)
    h = torch.randn(100, 256)
    h = h / h.square().mean(-1, keepdim=True).sqrt()
    shared = module.shared_down(functional.silu(module.shared_gate(h)) * module.shared_up(h))
    return ((module(h) - shared).square().mean() / shared.square().mean()).sqrt().item()


def test_at_initialisation_the_routed_branch_is_a_tenth_to_ten_times_as_large_as_the_shared_one():
    ratios = [routed_over_shared(k) for k in (1, 4, 32, 256, 1024)]
    assert all(0.1 < ratio < 10 for ratio in ratios), ratios
    assert max(ratios) / min(ratios) < math.e, "sum of squared weights is between 1 / k and e^2 / k"


def test_experts_of_the_papers_form_are_initialised_like_embeddings_of_torch(seed):
    for k in (1, 256):
        module = router.OmniMoE.paper(8, 4096, k, intermediate_size=4)
        torch.manual_seed(seed)
        module.reset_parameters()
        assert abs(module.w_out.std().item() - 1) < 4 / math.sqrt(2 * module.w_out.numel())  # 4 sigma


@pytest.mark.parametrize("s, k, total", [(64, 16, 0.094), (256, 32, 0.027), (1024, 32, 0.0043)])
def test_weights_of_the_papers_form_are_initially_as_small_as_documented(s, k, total):
    torch.manual_seed(0)
    x, y = torch.randn(400, s), torch.randn(400, s)
    weights, _ = router.product_topk(x, y, k, log_softmax=True, weights="exp", backend="reference")
    sums = weights.sum(-1)
    last_digit = 10.0 ** -len(str(total).partition(".")[2])
    assert abs(sums.mean() - total) < last_digit / 2 + 4 * sums.std() / len(sums) ** 0.5


@everyone
def test_gradients_of_the_router_agree_with_finite_differences(name):
    """The gradients come through the weights; the steps are too small to change the selection."""
    module, h = layer(name, dtype=torch.float64), torch.randn(4, D, dtype=torch.float64)
    routers = ["router_x.weight", "router_y.weight"] if "omnimoe" in name else ["query.weight", "keys"]
    weights = [module.get_parameter(name).detach().requires_grad_() for name in routers]
    layer_of = lambda *p: functional_call(module, dict(zip(routers, p, strict=True)), (h,))  # noqa: E731
    assert torch.autograd.gradcheck(layer_of, weights, fast_mode=True)


def test_dropout_drops_hidden_values_only_in_training():
    module = layer("peer", dropout=0.5, heads=64)
    inputs = formulas.inputs(module, 40)
    torch.manual_seed(7)
    kept = functional.dropout(torch.ones(40, 64, 3), 0.5).flatten(1)
    assert 0 < kept.count_nonzero() < kept.numel()

    def candidate(h, kept, **p):
        torch.manual_seed(7)
        return functional_call(module, formulas.parameters(p), (h,))

    def golden(h, kept, **p):
        return formulas.peer(module, formulas.parameters(p), h, kept)["out"]

    grads = [name for name in inputs if name != "kept"]
    formulas.check(assay.Target(candidate, golden, cases={**inputs, "kept": kept}, grads=grads))
    module.eval()
    formulas.check(assay.Target(candidate, golden, cases={**inputs, "kept": torch.ones_like(kept)}, grads=grads))


@pytest.mark.parametrize("name", ["omnimoe", "peer_relu"])
def test_sparse_gradients_train_the_tables(name):
    module, h = layer(name, sparse_grad=True), torch.randn(3, D)
    module(h).square().sum().backward()
    dense = layer(name)
    dense(h).square().sum().backward()
    for table in ("w_in", "w_out"):
        grad = getattr(module, table).grad
        assert grad.is_sparse and torch.equal(grad.to_dense(), getattr(dense, table).grad)


@pytest.mark.parametrize("batch", [(), (0,), (2, 3, 4)], ids=str)
def test_any_leading_dimensions_are_accepted(batch):
    for name in CAUSAL:
        module, h = layer(name), torch.randn(*batch, D)
        assert module(h).shape == h.shape
        assert torch.equal(module(h), module(h.reshape(-1, D)).view(h.shape))


@pytest.mark.parametrize(
    "error, text, call",
    [
        (ValueError, "router.OmniMoE: num_experts=50 .* use 49 or 64, or pass a pair",
         lambda: layer("omnimoe", num_experts=50)),
        (ValueError, r"num_experts=\(2, 3, 4\), expected two sizes", lambda: layer("omnimoe", num_experts=(2, 3, 4))),
        (ValueError, r"router.PEER: num_experts=\(4, 5\), expected a sq", lambda: layer("peer", num_experts=(4, 5))),
        (TypeError, "num_experts=True", lambda: layer("omnimoe", num_experts=True)),
        (ValueError, r"k=50, but there are only 7 \* 7 experts", lambda: layer("omnimoe", k=50)),
        (ValueError, "router_norm='rms' is unknown; choose one of: 'layer', 'none', 'batch'",
         lambda: layer("omnimoe", router_norm="rms")),
        (ValueError, "weights='exp' is unknown; choose one of: 'softmax'", lambda: layer("peer", weights="exp")),
        (ValueError, "activation='swish' is unknown", lambda: layer("peer", activation="swish")),
        (ValueError, "strategy='best' is unknown; choose one of: 'auto'", lambda: layer("peer", strategy="best")),
        (ValueError, "backend='cuda' is unknown; choose one of: 'auto'", lambda: layer("omnimoe", backend="cuda")),
        (ValueError, "dropout=1.0, expected 0 <= dropout < 1", lambda: layer("peer", dropout=1.0)),
        (TypeError, "router.PEER: dropout='0.1' is of type str, expected a number 0 <= dropout < 1",
         lambda: layer("peer", dropout="0.1")),
        (TypeError, "dropout=None is of type NoneType, expected a number", lambda: layer("peer", dropout=None)),
        (TypeError, "intermediate_size=False is of type bool, expected a whole number, or 0 for no shared expert",
         lambda: router.OmniMoE(8, 49, 3, intermediate_size=False)),
        (TypeError, "intermediate_size=0.0 is of type float", lambda: router.OmniMoE(8, 49, 3, intermediate_size=0.0)),
        (TypeError, "router.OmniMoE: dtype=torch.int32, expected None or one of: bfloat16, float16, float32, float64",
         lambda: layer("omnimoe", dtype=torch.int32)),
        (TypeError, "router.PEER: dtype=torch.float8_e5m2, expected None or one of: bfloat16",
         lambda: layer("peer", dtype=torch.float8_e5m2)),
        (ValueError, r"router.OmniMoE: num_experts=65536 \* 32768, expected at most 2\^31 - 1 in all: indices are",
         lambda: layer("omnimoe", num_experts=(65536, 32768), device="meta")),
        (TypeError, r"k=.*3.* is of type int64, expected a whole number; use int\(k\)",
         lambda: layer("omnimoe", k=np.int64(3))),
        (TypeError, r"router.OmniMoE: h is bfloat16, but the layer is float32; convert one \(h.to\(torch.float32\)\)",
         lambda: layer("omnimoe")(torch.ones(3, D, dtype=torch.bfloat16))),
        (TypeError, "router.PEER: h is float64, but the layer is float32; convert one",
         lambda: layer("peer")(torch.ones(3, D, dtype=torch.float64))),
        (ValueError, "router.OmniMoE: device='gpu' .* expected one such as 'cpu' or 'cuda'",
         lambda: layer("omnimoe", device="gpu")),
        (TypeError, "router.PEER: device=1.0 is of type float, expected a torch.device",
         lambda: layer("peer", device=1.0)),
        (TypeError, "router.OmniMoE: return_router='no' is of type str, expected True or False",
         lambda: layer("omnimoe")(torch.ones(3, D), return_router="no")),
        (TypeError, "router.PEER: return_router=1 is of type int",
         lambda: layer("peer")(torch.ones(3, D), return_router=1)),
        (ValueError, "router.PEER: query_norm='batch': a BatchNorm .* got 0; use query_norm='layer', or .eval",
         lambda: layer("peer_memory")(torch.ones(0, D))),
        (ShapeError, r"OmniMoE: h is \[3, 7\], expected \[\*batch, 24\]", lambda: layer("omnimoe")(torch.ones(3, 7))),
        (TypeError, "router.PEER: h is a list, expected a torch.Tensor", lambda: layer("peer")([1.0])),
    ],
)  # fmt: skip
def test_bad_input_is_refused_in_words(error, text, call):
    with pytest.raises(error, match=text):
        call()
