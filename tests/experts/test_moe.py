"""Properties of experts.moe besides its values: what it saves, which gradients it computes, how far a NaN spreads."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from goldsmith import Op, experts

E, H, I, T, K = 4, 24, 16, 9, 2
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


def plain(dtype=torch.float32, bias=False):
    base = torch.randn(E, 2 * I, H, dtype=dtype) / H**0.5, torch.randn(E, H, I, dtype=dtype) / I**0.5
    return (*base, torch.randn(E, 2 * I, dtype=dtype), torch.randn(E, H, dtype=dtype)) if bias else base


def filled(**options):
    """A LoRA with random B instead of 0."""
    lora = experts.LoRA(E, H, I, rank=3, **options)
    with torch.no_grad():
        for p in lora.parameters():
            p.normal_()
    return lora


def routes(tokens=T, k=K, dtype=torch.float32):
    x = torch.randn(tokens, H, dtype=dtype)
    ids = torch.rand(tokens, E).topk(k).indices
    return x, ids, torch.rand(tokens, k, dtype=dtype)


def gradients(y, inputs, grad=None):
    return torch.autograd.grad(y, inputs, torch.ones_like(y) if grad is None else grad)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def _seeded(request):
    torch.manual_seed(sum(map(ord, request.node.name)))


CURVES = [("silu", None), ("silu", 0.6), ("gelu", None), ("gelu_tanh", None), ("relu2", 0.9), ("swiglu_oai", 0.6)]


@pytest.mark.parametrize("activation, limit", CURVES)
def test_gradients_of_the_reference_are_derivatives(activation, limit):
    x, ids, w = routes(tokens=3, dtype=torch.float64)
    ids[0, 1] = -1
    base = plain(torch.float64, bias=True)
    lora = filled(dtype=torch.float64)
    inputs = [t.detach().clone().requires_grad_() for t in (x, w, *base, *lora.parameters())]

    def function(x, w, gate_up, down, gate_up_bias, down_bias, *factors):
        named = {t: (a, b) for t, a, b in zip(("gate", "up", "down"), factors[::2], factors[1::2], strict=True)}
        return experts.moe(
            x, ids, w, (gate_up, down, gate_up_bias, down_bias), lora=named, lora_scaling=0.5, activation=activation,
            limit=limit, backend="reference",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_nothing_is_saved_when_no_gradient_is_requested():
    kept = []
    x, ids, w = routes()
    base, lora = plain(), filled()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts.moe(x, ids, w, base)
        with torch.no_grad():
            experts.moe(x, ids, w, base, lora=lora)
    assert not kept


def test_the_forward_saves_its_arguments_and_two_rows_per_route():
    kept = []
    x, ids, w = routes(dtype=torch.bfloat16)
    base, lora = plain(torch.bfloat16), filled()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        experts.moe(x, ids, w, base, lora=lora)
    arguments = {t.data_ptr() for t in (x, ids, w, *base, *lora.parameters())}
    own = [t for t in kept if t.data_ptr() not in arguments]
    assert [(tuple(t.shape), t.dtype) for t in own] == [((T * K, I), torch.bfloat16)] * 2


def test_the_backward_recomputes_what_was_not_saved():
    op, (x, ids, w), base = Op.get("experts.moe"), routes(), plain()
    grads = []
    for save in (True, False):
        leaf = x.clone().requires_grad_()
        options = dict(
            layout="", gate_scale=1.0, up_scale=1.0, down_scale=1.0, dropout=0.0, activation="silu", alpha=1.0,
            limit=None, save=save,
        )  # fmt: skip
        grads += gradients(op(leaf, ids, w, *base, *[None] * 9, **options), leaf)
    assert torch.equal(*grads)


@pytest.mark.parametrize("partitions", [None, 1, 3])
def test_the_next_call_uses_parameters_changed_in_place(partitions):
    x, ids, w = routes()
    base = plain()
    base = base if partitions is None else experts.pack(*base, format="bf16", partitions=partitions)
    lora = filled()
    before = experts.moe(x, ids, w, base, lora=lora)
    for name in FACTORS:
        with torch.no_grad():
            getattr(lora, name).add_(1.0)
        after = experts.moe(x, ids, w, base, lora=lora)
        fresh = experts.moe(x, ids, w, base, lora=copy.deepcopy(lora))
        assert not torch.equal(before, after) and torch.equal(after, fresh), name
        before = after


def test_a_hundred_forwards_may_run_before_their_backwards():
    base, lora = plain(), filled()
    rows = [routes(tokens=3) for _ in range(100)]
    waiting = [experts.moe(*r, base, lora=lora) for r in rows]
    deferred = [gradients(y, list(lora.parameters())) for y in waiting]
    at_once = [gradients(experts.moe(*r, base, lora=lora), list(lora.parameters())) for r in rows]
    assert all(same(a, b) for a, b in zip(deferred, at_once, strict=True))


def test_the_base_object_may_be_deleted_before_the_backward():
    x, ids, w = routes()
    lora = filled()
    base = experts.pack(*plain(), format="int4", group_size=8)
    gone = weakref.ref(base)
    kept = gradients(experts.moe(x, ids, w, base, lora=lora), list(lora.parameters()))
    y = experts.moe(x, ids, w, base, lora=lora)
    del base
    gc.collect()
    assert gone() is None
    assert same(gradients(y, list(lora.parameters())), kept)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_checkpointing_gives_the_same_bits(dropout):
    x, ids, w = routes()
    base, lora = plain(), filled(dropout=dropout)
    results = []
    for through in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)):
        torch.manual_seed(7)
        leaf = x.clone().requires_grad_()
        y = through(lambda v: experts.moe(v, ids, w, base, lora=lora), leaf)
        results.append([y, *gradients(y, [leaf, *lora.parameters()])])
    assert same(*results)


def test_gradients_accumulate():
    base, lora = plain(), filled()
    first, second = routes(), routes()
    wanted = [gradients(experts.moe(*r, base, lora=lora), list(lora.parameters())) for r in (first, second)]
    for r in (first, second):
        experts.moe(*r, base, lora=lora).sum().backward()
    assert same([p.grad for p in lora.parameters()], [a + b for a, b in zip(*wanted, strict=True)])


@pytest.mark.parametrize("alone", ["x", "w", "gate_up", "down", "gate_up_bias", "down_bias", *FACTORS])
def test_the_bits_of_a_gradient_do_not_depend_on_the_other_requested_gradients(alone):
    x, ids, w = routes()
    gate_up, down, gate_up_bias, down_bias = plain(bias=True)
    named = dict(x=x, w=w, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias)
    named |= {name: p.detach() for name, p in filled().named_parameters()}
    results = []
    for wanted in (list(named), [alone]):
        t = {n: v.clone().requires_grad_(n in wanted) for n, v in named.items()}
        base = (t["gate_up"], t["down"], t["gate_up_bias"], t["down_bias"])
        lora = {p: (t[f"{p}_a"], t[f"{p}_b"]) for p in ("gate", "up", "down")}
        y = experts.moe(t["x"], ids, t["w"], base, lora=lora)
        results.append([y, *gradients(y, t[alone])])
    assert same(*results)


def test_a_shared_a_gets_the_sum_of_both_gradients():
    (x, ids, w), base = routes(), plain()
    a, gate_b, up_b = torch.randn(E, 3, H), torch.randn(E, I, 3), torch.randn(E, I, 3)
    one, two, shared = (a.clone().requires_grad_() for _ in range(3))
    apart = gradients(experts.moe(x, ids, w, base, lora={"gate": (one, gate_b), "up": (two, up_b)}), [one, two])
    together = experts.moe(x, ids, w, base, lora={"gate": (shared, gate_b), "up": (shared, up_b)})
    assert torch.equal(*gradients(together, shared), apart[0] + apart[1])


def test_ids_in_int32_give_the_same_bits():
    (x, ids, w), base = routes(), plain()
    assert torch.equal(experts.moe(x, ids, w, base), experts.moe(x, ids.int(), w, base))


def test_an_optimizer_step_on_plain_weights_reduces_the_loss():
    (x, ids, w), base = routes(), [torch.nn.Parameter(t) for t in plain()]
    optimizer = torch.optim.SGD(base, lr=1e-4)
    loss = experts.moe(x, ids, w, base).square().sum()
    loss.backward()
    optimizer.step()
    assert experts.moe(x, ids, w, base).square().sum() < loss


def test_lora_in_bfloat16_has_bfloat16_gradients():
    (x, ids, w), base, lora = routes(dtype=torch.bfloat16), plain(torch.bfloat16), filled(dtype=torch.bfloat16)
    y = experts.moe(x, ids, w, base, lora=lora)
    assert y.dtype == torch.bfloat16
    assert all(g.dtype == torch.bfloat16 for g in gradients(y, list(lora.parameters())))


# -- NaN and Inf ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nonfinite_token_does_not_affect_other_tokens(value):
    (x, ids, w), base, lora = routes(), plain(), filled()
    results = []
    for spoiled in (False, True):
        v = x.clone()
        if spoiled:
            v[3, 5] = value
        v.requires_grad_()
        y = experts.moe(v, ids, w, base, lora=lora)
        results.append([y, *gradients(y, [v, *lora.parameters()])])
    (y0, dx0, *g0), (y1, dx1, *g1) = results
    others, visited = torch.arange(T) != 3, ids[3]
    assert not y1[3].isfinite().any() and torch.equal(y1[others], y0[others])
    assert torch.equal(dx1[others], dx0[others])
    unvisited = [e for e in range(E) if e not in visited]
    for before, after in zip(g0, g1, strict=True):
        assert torch.equal(before[unvisited], after[unvisited])


def test_nan_in_the_weight_of_a_skipped_slot_is_not_read():
    (x, ids, w), base, lora = routes(), plain(), filled()
    ids[2, 1] = -1
    results = []
    for weight in (0.5, torch.nan):
        spoiled = w.clone()
        spoiled[2, 1] = weight
        spoiled.requires_grad_()
        y = experts.moe(x, ids, spoiled, base, lora=lora)
        results.append([y, *gradients(y, [spoiled, *lora.parameters()])])
    assert same(*results) and results[0][1][2, 1] == 0


def test_nan_in_an_expert_reaches_only_the_tokens_that_visit_it():
    (x, ids, w), (gate_up, down) = routes(), plain()
    clean = experts.moe(x, ids, w, (gate_up, down))
    gate_up[1] = torch.nan
    spoiled = experts.moe(x, ids, w, (gate_up, down))
    visits = (ids == 1).any(-1)
    assert spoiled[visits].isnan().all() and torch.equal(spoiled[~visits], clean[~visits])


def test_meta_tensors_give_shapes_forward_and_backward():
    x, ids, w = (t.to("meta") for t in routes())
    base = tuple(t.to("meta") for t in plain())
    y = experts.moe(x.requires_grad_(), ids, w, base)
    assert (y.shape, y.dtype, y.device.type) == ((T, H), torch.float32, "meta")
    assert gradients(y, [x])[0].shape == x.shape
    with torch.no_grad():
        assert experts.moe(x, ids, w, base).is_meta and experts.slots(x, ids, base).shape == (T, K, H)
