"""HyperConnection and HyperHead as modules: parameters, dtypes, initialisation, arguments of the layer."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from goldsmith import BackendUnavailable, mhc
from mhc.networks import DIM, connection, gradients, precisions, target_against_formulas
from mhc.wrong import check

pytestmark = pytest.mark.sweep(2)

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
OWN = {"fn": (24, 4 * DIM), "base": (24,), "scale": (3,), "norm_weight": (4 * DIM,)}


def x_of(*tokens, n=4, dtype=torch.float32):
    return torch.randn(*tokens, n, DIM, dtype=dtype)


# -- parameters -------------------------------------------------------------------------------------------------------


def test_state_dict_keys_and_shapes_are_those_of_deepseek():
    module = mhc.HyperConnection(DIM, nn.Identity(), gamma=True)
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == OWN
    assert "norm_weight" not in mhc.HyperConnection(DIM, nn.Identity()).state_dict()
    keys = mhc.HyperConnection(DIM, nn.Linear(DIM, DIM, bias=False), norm=nn.RMSNorm(DIM)).state_dict().keys()
    assert keys == {"fn", "base", "scale", "layer.weight", "norm.weight"}
    head = mhc.HyperHead(DIM, n=2).state_dict()
    assert {name: tuple(p.shape) for name, p in head.items()} == {
        "hc_fn": (2, 2 * DIM),
        "hc_base": (2,),
        "hc_scale": (1,),
    }


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double().bfloat16(),
                                  lambda m: m.to("cpu", torch.float16)])  # fmt: skip
def test_a_model_in_16_bit_keeps_these_parameters_in_float32(move):
    model = nn.Sequential(connection(gamma=True), mhc.HyperHead(DIM))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moved = move(model)
    for name, parameter in moved.named_parameters():
        own = name.rpartition(".")[2] in {*OWN, "hc_fn", "hc_base", "hc_scale"} and "norm.weight" not in name
        assert (parameter.dtype == torch.float32) == own, name
        if own:
            assert torch.equal(parameter, before[name]), name
    y = moved(x_of(3, dtype=next(p.dtype for n, p in moved.named_parameters() if n.endswith("layer.weight"))))
    assert y.dtype in (torch.bfloat16, torch.float16) and y.isfinite().all()


def test_a_model_in_float64_computes_in_float64():
    module = connection(gamma=True).double()
    assert module.fn.dtype == torch.float64 and module(x_of(3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_bfloat16_loads_into_float32(assign):
    module = mhc.HyperConnection(DIM, nn.Identity(), gamma=True)
    saved = {
        name: value.bfloat16()
        for name, value in mhc.HyperConnection(DIM, nn.Identity(), gamma=True).state_dict().items()
    }
    module.load_state_dict(saved, assign=assign)
    assert all(
        p.dtype == torch.float32 and torch.equal(p, saved[name].float()) for name, p in module.named_parameters()
    )
    assert all(value.dtype == torch.bfloat16 for value in saved.values()), "the caller's dict is the caller's"


@pytest.mark.parametrize("init, scale", [("deepseek", 1.0), ("small", 0.01), ("identity", 0.01)])
def test_initialisations(init, scale):
    module, head = (
        cls(256, *layer, init=init) for cls, layer in ((mhc.HyperConnection, (nn.Identity(),)), (mhc.HyperHead, ()))
    )
    for fn in (module.fn, head.hc_fn):
        count = fn.numel()  # N(0, 0.02^2): mean and variance within five standard errors
        assert fn.mean().abs() < 5 * 0.02 / count**0.5
        assert (fn.std() / 0.02 - 1).abs() < 5 / (2 * count) ** 0.5
    assert (module.scale == scale).all() and (head.hc_scale == scale).all() and not head.hc_base.any()
    assert not module.base[:8].any()
    assert torch.equal(module.base[8:].reshape(4, 4), (8.0 if init == "identity" else 0.0) * torch.eye(4))
    module.reset_parameters()
    assert (module.scale == scale).all()


def test_with_init_identity_streams_start_almost_separate():
    module = mhc.HyperConnection(DIM, nn.Identity(), init="identity")
    h_res = mhc.pre(x_of(50), *module.mixing[:3], backend="reference")[2]
    # softmax puts e^8 / (e^8 + 3) on the diagonal, up to mixes with a standard deviation of 0.01 * 0.02 * sqrt(K)
    assert (h_res.diagonal(dim1=-2, dim2=-1) > 0.998).all()


def test_a_connection_can_be_copied_pickled_and_printed():
    module = connection(gamma=True, recompute=True, orientation="out_in", iterations=3)
    x = x_of(2)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), module(x))
    assert "dim=6, n=4, init='deepseek', recompute=True, iterations=3, orientation='out_in'" in repr(module)


def test_a_connection_is_created_on_the_given_device():
    with torch.device("meta"):
        module = mhc.HyperConnection(DIM, nn.Identity())
    assert module.fn.is_meta and mhc.HyperConnection(DIM, nn.Identity(), device="meta").base.is_meta


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_connection_and_all_its_gradients_agree_with_the_formulas(backend, recompute):
    tokens, iterations = ((2, 3), 20) if backend == "reference" else ((2,), 3)
    module = connection(backend=backend, recompute=recompute, iterations=iterations)
    for precision in precisions(backend):
        check(target_against_formulas(module, [""], tokens=tokens, iterations=iterations, **precision), device=DEVICE)


@pytest.mark.parametrize("gamma", [False, True])
@pytest.mark.parametrize("orientation", ["in_out", "out_in"])
def test_a_connection_equals_pre_layer_and_post_bit_for_bit(orientation, gamma):
    module = connection(orientation=orientation, gamma=gamma)
    x = x_of(2, 3, dtype=torch.bfloat16)
    phi, alpha, bias, weight = module.mixing
    h_in, h_post, h_res = mhc.pre(x, phi, alpha, bias, gamma=weight, backend="reference")
    f = module.layer(module.norm(h_in))
    assert torch.equal(module(x), mhc.post(x, f, h_post, h_res, orientation=orientation, backend="reference"))


def test_coefficient_dtype_rounds_coefficients_as_the_decoder_of_transformers_does():
    module = connection(coefficient_dtype=torch.bfloat16)
    x = x_of(2, 3, dtype=torch.bfloat16)
    h_in, h_post, h_res = mhc.pre(x, *module.mixing[:3], backend="reference")
    h_post, h_res = h_post.bfloat16(), h_res.bfloat16()
    f = module.layer(module.norm(h_in))
    ours = module(x)
    assert torch.equal(ours, mhc.post(x, f, h_post.float(), h_res.float(), backend="reference"))
    theirs = h_post.unsqueeze(-1) * f.unsqueeze(-2) + torch.matmul(h_res.transpose(-1, -2), x)
    # theirs rounds the product, the matrix product and their sum, ours only the sum: half of 2^-8 each
    size = (h_post.unsqueeze(-1) * f.unsqueeze(-2)).abs().float() + h_res.transpose(-1, -2).float() @ x.abs().float()
    assert ((ours.float() - theirs.float()).abs() <= 2 * 2.0**-8 * size).all()


@pytest.mark.parametrize("orientation", ["in_out", "out_in"])
def test_gradients_go_through_the_rounded_coefficients(orientation):
    """The joint backward adds the same four terms of dx as the separate operators; float64 does not round them."""
    module = connection(coefficient_dtype=torch.bfloat16, orientation=orientation).double()

    def apart(x):
        h_in, h_post, h_res = mhc.pre(x, *module.mixing[:3], backend="reference")
        h_post, h_res = (h.bfloat16().double() for h in (h_post, h_res))
        return mhc.post(x, module.layer(module.norm(h_in)), h_post, h_res, orientation=orientation, backend="reference")

    x, parameters = x_of(2, 3, dtype=torch.float64), list(module.parameters())
    for joint, separate in zip(gradients(module, x, parameters), gradients(apart, x, parameters), strict=True):
        assert torch.equal(joint, separate)


def test_extra_arguments_and_results_of_the_layer_are_passed_through():
    def layer(h, scale, *, cache=None):
        return h * scale, cache, "more"

    module = mhc.HyperConnection(DIM, layer, backend="reference")
    x = x_of(2)
    y, cache, more = module(x, 2.0, cache="kept")
    assert (cache, more) == ("kept", "more")
    alone = mhc.HyperConnection(DIM, lambda h: (h * 2.0,), backend="reference")
    alone.load_state_dict(module.state_dict())
    assert torch.equal(alone(x), y)


def test_frozen_parameters_and_frozen_streams_get_no_gradient():
    module = connection()
    module.fn.requires_grad_(False)
    y = module(x_of(2))
    y.sum().backward()
    assert module.fn.grad is None and module.base.grad is not None and module.layer.weight.grad is not None
    frozen = connection().requires_grad_(False)
    x = x_of(2).requires_grad_()
    assert not frozen(x.detach()).requires_grad
    frozen(x).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad is None for p in frozen.parameters())


@pytest.mark.parametrize("gradient", ["x_next", "h_in"])
def test_parameters_that_the_loss_does_not_depend_on_get_zero_gradients(gradient):
    """The loss may depend only on the layer's output, or the layer may return a constant."""
    kept = {}

    def layer(h):
        kept["h"] = h
        return torch.zeros_like(h)

    module = mhc.HyperConnection(DIM, layer, backend="reference")
    x = x_of(2).requires_grad_()
    y = module(x)
    (y if gradient == "x_next" else kept["h"]).sum().backward()
    plain = x.detach().clone().requires_grad_()
    h_in, h_post, h_res = mhc.pre(plain, *(p.detach() for p in module.mixing[:3]), backend="reference")
    zeros = torch.zeros_like(h_in)
    (mhc.post(plain, zeros, h_post, h_res, backend="reference") if gradient == "x_next" else h_in).sum().backward()
    assert torch.equal(x.grad, plain.grad)


def test_autocast_applies_to_the_layer_but_not_to_the_coefficients():
    seen = {}

    def layer(h):
        seen["h"], seen["f"] = h.dtype, nn.functional.linear(h, torch.eye(DIM)).dtype
        return nn.functional.linear(h, torch.eye(DIM))

    module = mhc.HyperConnection(DIM, layer, backend="reference")
    x = x_of(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert seen == {"h": torch.float32, "f": torch.bfloat16} and y.dtype == torch.float32
    h_in, h_post, h_res = mhc.pre(x, *module.mixing[:3], backend="reference")
    assert torch.equal(y, mhc.post(x, h_in.bfloat16(), h_post, h_res, backend="reference"))


# -- compiled, checkpointed, without gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_compiles_as_one_graph_with_the_same_results_and_gradients(recompute):
    torch._dynamo.reset()
    module = connection(gamma=True, recompute=recompute)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x, parameters = x_of(2, 3), list(module.parameters())
    for eager, traced in zip(gradients(module, x, parameters), gradients(compiled, x, parameters), strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_checkpoint_gives_the_same_gradients_bit_for_bit(backend):
    module = connection(backend=backend, iterations=3).to(DEVICE)
    x, parameters = x_of(2).to(DEVICE), list(module.parameters())
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=False), x, parameters)
    for plain, checkpointed in zip(gradients(module, x, parameters), again, strict=True):
        assert torch.equal(plain, checkpointed)


def test_decoding_bypasses_the_dispatcher_and_saves_nothing():
    module, head = connection(), mhc.HyperHead(DIM, backend="reference")
    x = x_of(1)
    operators = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            operators.append(function.namespace)
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Spy():
        y = head(module(x))
    assert not y.requires_grad and "goldsmith" not in operators
    with Spy():
        head(module(x))
    assert "goldsmith" in operators, "the spy would have seen the operators"


def tangent(function, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        return torch.autograd.forward_ad.unpack_dual(function(dual)).tangent


def derivative(function):
    return torch.func.grad(lambda x: function(x).square().sum())


def directional(function):
    return lambda x: torch.func.jvp(function, (x,), (x,))[1]


TRANSFORMS = {  # a function of the module, and the same of the formulas
    "vmap": (torch.func.vmap, None),
    "grad": (derivative, derivative),
    "jvp": (directional, directional),
    "forward_ad": (lambda function: lambda x: tangent(function, x), directional),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", ["connection", "recomputing", "stack"])
def test_transforms_of_torch_func_use_plain_torch(name, kind):
    module = connection(backend="auto", iterations=3, recompute=kind == "recomputing")
    module = mhc.HyperStack([module]) if kind == "stack" else module
    prefix, (through, meaning) = "connections_0_" if kind == "stack" else "", TRANSFORMS[name]
    backward = "auto" if name == "vmap" else None
    check(target_against_formulas(module, [prefix], iterations=3, through=through, meaning=meaning, backward=backward))


def test_triton_refuses_transforms_that_it_cannot_differentiate():
    module = connection(backend="triton", iterations=2).to(DEVICE)
    x = x_of(2).to(DEVICE)
    sentence = "mhc.pre: triton: torch.func transforms and forward-mode derivatives use the reference only"
    for transform in (lambda: torch.func.vmap(module)(x), lambda: tangent(module, x)):
        with pytest.raises(BackendUnavailable) as caught:
            transform()
        assert str(caught.value) == sentence


def test_a_second_derivative_raises():
    module, x = connection(), x_of(2).requires_grad_()
    (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        first.square().sum().backward()
