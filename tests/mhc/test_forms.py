"""Independent and gated connections against the modules of transformers, with shared weights."""

import math

import pytest
import torch
from torch import nn

from goldsmith import ShapeError, assay, mhc
from goldsmith.assay.declare.case import Case
from goldsmith.core.autograd import fresh
from goldsmith.mhc.gated_pre import reference as gated_reference
from goldsmith.mhc.independent_pre import reference as independent_reference
from goldsmith.mhc.inject import reference as inject_reference
from mhc.networks import Layer, gradients
from mhc.wrong import check, equal

N, DIM = 3, 5
DTYPES = (torch.float32,)  # in bfloat16 autograd rounds each share of transformers' dx before it adds them


def target(candidate, golden, draw):
    return assay.Target(candidate, golden, cases=[Case("shared_weights", draw)], dtypes=DTYPES)


def installed(module):
    return pytest.importorskip(f"transformers.models.{module}.modeling_{module}")


# -- independent ------------------------------------------------------------------------------------------------------


def draw_independent(make):
    weights = {"fn": make.normal(2 * N, N * DIM, std=0.3, dtype=torch.float32)}
    weights |= {"base": make.normal(2 * N, dtype=torch.float32), "scale": make.normal(2, dtype=torch.float32)}
    return {"x": make.normal(2, 2, N, DIM), "f": make.normal(2, 2, DIM), **weights}


def test_an_independent_connection_computes_what_hy_v4_computes():
    hy = installed("hy_v4")
    config = hy.HYV4Config(hidden_size=DIM, hc_mult=N, hc_magnitude=1.5, hc_eps=1e-2, rms_norm_eps=1e-3)
    module = mhc.HyperConnection(
        DIM, Layer(DIM), **mhc.from_hf({k: torch.zeros(s) for k, s in OWN.items()}, config=config)[1]
    )
    numbers = {name: value for name, value in module.settings.of_independent.items() if name != "backend"}
    assert numbers == {"rms_eps": 1e-3, "pre_eps": 1e-2, "post_mult": 1.5, "post_eps": 1e-2}

    def theirs(x, f, **weights):
        post, collapsed = torch.func.functional_call(hy.HYV4HyperConnection(config), weights, (x,))
        x_next = (post.float().unsqueeze(-1) * f.float().unsqueeze(-2) + x.float()).to(x.dtype)
        return {"h_in": collapsed, "h_post": post, "x_next": x_next}

    def ours(x, f, fn, base, scale):
        h_in, h_post, _, _ = independent_reference.forward(x, fn, scale, base, None, **numbers)
        return {"h_in": h_in, "h_post": h_post, "x_next": inject_reference.forward(x, f, h_post)[0]}

    check(target(theirs, ours, draw_independent))
    names = hy.HYV4HyperConnection(config).state_dict()
    assert {name: tuple(p.shape) for name, p in names.items()} == OWN
    head = mhc.HyperHead(DIM, n=N).state_dict()
    assert head.keys() == hy.HYV4HyperHead(config).state_dict().keys()


OWN = {"fn": (2 * N, N * DIM), "base": (2 * N,), "scale": (2,)}


def independent(**options):
    torch.manual_seed(0)
    module = mhc.HyperConnection(DIM, Layer(DIM), n=N, kind="independent", backend="reference", **options)
    with torch.no_grad():
        module.base.normal_()
        module.scale.fill_(0.7)
    return module


def test_an_independent_connection_equals_its_operators_under_every_way_to_call_it():
    """The joint backward, recomputation, torch.func, a stack and a graph give the gradients of the two operators."""
    x = torch.randn(2, N, DIM)

    class Operators(nn.Module):
        def __init__(self, connection):
            super().__init__()
            self.connection = connection

        def forward(self, x):
            c = self.connection
            h_in, h_post = mhc.independent_pre(x, c.fn, c.scale, c.base, backend="reference")
            return mhc.inject(x, c.layer(h_in), h_post, backend="reference")

    module = independent()
    expected = gradients(Operators(module), x, list(module.parameters()))
    for other in (
        module,
        independent(recompute=True),
        mhc.HyperStack([module]),
        torch.compile(module, backend="aot_eager", fullgraph=True),
    ):
        assert all(equal(a, b) for a, b in zip(expected, gradients(other, x, list(other.parameters())), strict=True))
    with torch.no_grad():
        assert equal(module(x), expected[0])


def test_a_stack_of_both_kinds_equals_its_connections_one_by_one():
    manifold = [mhc.HyperConnection(DIM, Layer(DIM), n=N, backend="reference") for _ in range(2)]
    connections = [manifold[0], independent(), *manifold]
    x = torch.randn(2, N, DIM)
    assert equal(mhc.HyperStack(connections)(x), nn.Sequential(*connections)(x))


def test_parameters_and_errors_of_an_independent_connection():
    module = mhc.HyperConnection(DIM, Layer(DIM), n=N, kind="independent", init="hy_v4")
    assert {name: tuple(p.shape) for name, p in module.named_parameters() if "." not in name} == OWN
    assert torch.equal(module.base, torch.tensor([-math.log(2)] * N + [0.0] * N))
    assert (module.scale == 0.01).all() and "kind='independent'" in repr(module)
    with pytest.raises(ValueError, match="magnitude=2.0, post_eps=None need kind='independent'"):
        mhc.HyperConnection(DIM, Layer(DIM), magnitude=2.0)
    with pytest.raises(ValueError, match="kind='other' is unknown; choose one of: 'manifold', 'independent'"):
        mhc.HyperConnection(DIM, Layer(DIM), kind="other")
    with pytest.raises(ShapeError, match="an independent connection has 6 mixes, pre and post of each stream"):
        mhc.independent_pre(torch.randn(2, N, DIM), torch.randn(15, N * DIM), torch.ones(2), torch.zeros(6))


# -- gated ------------------------------------------------------------------------------------------------------------

RANK = 4


def draw_gated(make):
    return {
        "x": make.normal(2, 2, N, DIM),
        "f": make.normal(2, 2, DIM),
        "norm": make.normal(N * DIM, std=0.3),
        "down": make.normal(RANK, N * DIM),
        "up": make.normal(N * DIM, RANK),
        "inject": make.normal(N, N * DIM),
    }


@pytest.mark.parametrize("mixer", [False, True], ids=["connection", "mixer"])
def test_a_gated_connection_computes_what_qwen4_computes(mixer):
    qwen = installed("qwen4_exp")
    config = qwen.Qwen4ExpTextConfig(hidden_size=DIM, hc_count=N, hc_lowrank=RANK, rms_norm_eps=1e-3)
    names = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}
    names |= {} if mixer else {"inject": "block_inject_weight"}

    def theirs(x, f, **weights):
        module = qwen.Qwen4ExpTextGatedResidual(config, use_combine=not mixer)
        state = {f"{name}.weight": weights[ours] for ours, name in names.items()}
        results = torch.func.functional_call(module, state, (x.flatten(-2),))
        if mixer:
            return {"h_in": results}
        h_in, streams, h_post = results
        x_next = streams + (f.unsqueeze(-2) * h_post.unsqueeze(-1)).flatten(-2)
        return {"h_in": h_in, "h_post": h_post, "x_next": x_next.unflatten(-1, (N, DIM))}

    def ours(x, f, norm, down, up, inject):
        gamma, inject = 1 + norm.to(x.dtype), None if mixer else inject
        h_in, h_post, _, _ = gated_reference.forward(x, gamma, down, up, inject, rms_eps=1e-3, post_mult=2.0)
        if mixer:
            return {"h_in": h_in}
        return {"h_in": h_in, "h_post": h_post, "x_next": inject_reference.forward(x, f, h_post)[0]}

    check(target(theirs, ours, draw_gated))


@pytest.mark.parametrize("cls", [mhc.GatedConnection, mhc.GatedHead])
def test_gated_modules_call_the_operators(cls):
    torch.manual_seed(0)
    layer = () if cls is mhc.GatedHead else (Layer(DIM),)
    module = cls(DIM, *layer, n=N, rank=RANK, backend="reference")
    assert not module.norm_weight.any() and 0.01 < module.down.std() < 0.03
    nn.init.normal_(module.norm_weight, std=0.3)
    x = torch.randn(2, N, DIM)
    weights = (1 + module.norm_weight, module.down, module.up)
    if layer:
        h_in, h_post = mhc.gated_pre(x, *weights, module.inject, backend="reference")
        assert equal(module(x), mhc.inject(x, layer[0](h_in), h_post, backend="reference"))
    else:
        assert equal(module(x), mhc.gated_pre(x, *weights, backend="reference"))
    assert all(g.isfinite().all() and g.any() for g in gradients(module, x, list(module.parameters())))
    assert module.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ShapeError, match="expected"):
        mhc.gated_pre(x, *weights[:2], module.down)
    with pytest.raises(ValueError, match="rank=0, expected a whole number of at least 1"):
        cls(DIM, *layer, n=N, rank=0)


def test_results_that_are_parts_of_one_tensor_get_their_own_memory():
    """Below autograd, where the dispatcher runs an operator, parts of a tensor do not count as views."""
    whole = torch.randn(6, 2)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        parts = fresh((whole[:2], whole[2:]), ())
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 2
    assert equal(torch.cat(parts), whole)


def test_an_empty_result_is_not_the_input_itself():
    x = torch.empty(0, 4)
    (result,) = fresh((x,), (x,))
    assert result.shape == x.shape and result.untyped_storage()._cdata != x.untyped_storage()._cdata
