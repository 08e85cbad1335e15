"""Converted weights of other projects compute what the project documents; every key is checked."""

import importlib.util

import pytest
import torch
from torch import nn

from goldsmith import ShapeError, assay, mhc
from goldsmith.assay.declare.case import Case
from mhc import formulas
from mhc.wrong import check

N, DIM, M, K = 4, 6, 24, 24  # M equals K on purpose, so that a transposed phi has the right shape
LIGER = {"phi": torch.randn(K, M), "b": torch.zeros(M)} | {f"alpha_{p}": torch.ones(()) for p in ("pre", "post", "res")}
TE = {"phi": torch.randn(M, K), "alpha": torch.ones(3), "beta": torch.zeros(M)}
HF = {"fn": torch.randn(M, K), "base": torch.zeros(M), "scale": torch.ones(3)}
CONFIG = {"hc_mult": N, "hc_sinkhorn_iters": 7, "hc_eps": 1e-2, "rms_norm_eps": 1e-3}


def target(candidate, golden, draw, **sizes):
    """A target without gradients, because a converter copies weights."""
    return assay.Target(candidate, golden, cases=[Case("converted", draw, {"T": 3, **sizes})], backward=None)


def connection(weights, options, layer=torch.tanh):
    module = mhc.HyperConnection(weights["fn"].shape[1] // options["n"], layer, **options, backend="reference")
    module.load_state_dict(weights)
    return module


# -- Hugging Face ----------------------------------------------------------------------------------


def draw_hf(make, T, n=N, dim=DIM):
    mixes = n * (n + 2)
    weights = {"fn": make.normal(mixes, n * dim, std=0.3), "base": make.normal(mixes), "scale": make.normal(3)}
    return {"x": make.normal(T, 2, n, dim), **weights}


def test_hf_weights_give_hfs_formula():
    def candidate(x, **weights):
        state = {f"model.layers.0.attn_hc.{name}": value for name, value in weights.items()}
        return connection(*mhc.from_hf(state, "model.layers.0.attn_hc", config=CONFIG))(x)

    def golden(x, fn, base, scale):
        return formulas.hf_connection(x, fn, base, scale, torch.tanh, iterations=7, hc_eps=1e-2, rms_eps=1e-3)

    check(target(candidate, golden, draw_hf))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_our_modules_compute_what_those_of_transformers_compute():
    """The classes of the installed version against our reference."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = deepseek.DeepseekV4Config(hidden_size=DIM, hc_mult=N)
    weights = {"fn": torch.zeros(M, K), "base": torch.zeros(M), "scale": torch.zeros(3)}
    options = mhc.from_hf(weights, config=config)[1]
    assert options.pop("n") == N

    def theirs(x, **weights):
        module = deepseek.DeepseekV4HyperConnection(config)
        module.load_state_dict(weights)
        post, comb, collapsed = module(x)
        return {"h_in": collapsed, "h_post": post, "h_res": comb}

    def ours(x, fn, base, scale):
        results = mhc.pre(x, fn, scale, base, **options, backend="reference")
        return dict(zip(("h_in", "h_post", "h_res"), results, strict=True))

    check(target(theirs, ours, draw_hf))

    def draw_head(make, T):
        weights = {"hc_fn": make.normal(N, K, std=0.3), "hc_base": make.normal(N), "hc_scale": make.normal(1)}
        return {"x": make.normal(T, 2, N, DIM), **weights}

    def their_head(x, **weights):
        module = deepseek.DeepseekV4HyperHead(config)
        module.load_state_dict(weights)
        return module(x)

    def our_head(x, hc_fn, hc_base, hc_scale):
        eps = {"rms_eps": config.rms_norm_eps, "pre_eps": config.hc_eps}
        return mhc.head(x, hc_fn, hc_scale, hc_base, **eps, backend="reference")

    check(target(their_head, our_head, draw_head))
    head = mhc.HyperHead(DIM)
    assert head.state_dict().keys() == deepseek.DeepseekV4HyperHead(config).state_dict().keys()
    for name, parameter in deepseek.DeepseekV4HyperConnection(config).named_parameters():
        assert getattr(mhc.HyperConnection(DIM, nn.Identity()), name).shape == parameter.shape


@pytest.mark.parametrize(
    "prefix, key",
    [("", "{}"), ("layers.3.hc_attn", "layers.3.hc_attn_{}"), ("layers.3.hc_ffn_", "layers.3.hc_ffn_{}"),
     ("model.layers.3.ffn_hc.", "model.layers.3.ffn_hc.{}"), ("model.layers.3.ffn_hc", "model.layers.3.ffn_hc.{}")],
)  # fmt: skip
def test_key_names_of_a_model_and_of_a_checkpoint_are_both_recognised(prefix, key):
    parts = {"fn": torch.randn(M, K), "base": torch.randn(M), "scale": torch.randn(3)}
    weights, options = mhc.from_hf({key.format(name): value.bfloat16() for name, value in parts.items()}, prefix)
    assert options == {"n": N} and list(weights) == ["fn", "base", "scale"]
    assert all(torch.equal(weights[name], parts[name].bfloat16().float()) for name in parts)


@pytest.mark.parametrize(
    "prefix, key", [("", "hc_{}"), ("hc_head", "hc_head_{}"), ("model.hc_head", "model.hc_head.hc_{}")]
)
def test_the_head_is_recognised_by_its_one_scale(prefix, key):
    parts = {"fn": torch.randn(N, K), "base": torch.randn(N), "scale": torch.randn(1)}
    state = {key.format(name): value for name, value in parts.items()}
    weights, options = mhc.from_hf(state, prefix)
    assert options == {"n": N} and list(weights) == ["hc_fn", "hc_base", "hc_scale"]
    head = mhc.HyperHead(DIM, **options)
    head.load_state_dict(weights)
    assert mhc.to_hf(weights).keys() == weights.keys()


# -- Liger -----------------------------------------------------------------------------------------


def draw_liger(make, T):
    alphas = {f"alpha_{part}": make.normal() for part in ("pre", "post", "res")}
    return {"x": make.normal(T, N, DIM), "phi": make.normal(K, M, std=0.3), "b": make.normal(M), **alphas}


def from_liger(x, **state):
    return connection(*mhc.from_liger(state))(x)


def test_liger_weights_give_ligers_formula():
    check(target(from_liger, lambda **inputs: formulas.liger_connection(**inputs, layer=torch.tanh), draw_liger))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
@pytest.mark.filterwarnings("ignore")
def test_our_module_with_converted_weights_computes_what_ligers_module_computes():
    """LigerMHC on its Triton kernels against our connection with the converted weights."""
    from liger_kernel.transformers import LigerMHC

    class Tanh(nn.Module):
        def forward(self, h):
            return torch.tanh(h)

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def theirs(x, **state):
        module = LigerMHC(Tanh(), hc=N, c=DIM, phi_dtype=torch.float32, allow_fp32=True).to(x.device)
        module.load_state_dict(state)
        return module(x)

    options = mhc.from_liger(LIGER)[1]
    orientation = options.pop("orientation")
    assert options.pop("n") == N

    def golden(x, phi, b, alpha_pre, alpha_post, alpha_res):
        alpha = torch.stack([alpha_pre, alpha_post, alpha_res])
        h_in, h_post, h_res = mhc.pre(x, phi.mT, alpha, b, **options, backend="reference")
        return mhc.post(x, torch.tanh(h_in), h_post, h_res, orientation=orientation, backend="reference")

    dot = "tf32" if device == "cuda" else "ieee"
    cases = [Case("liger", draw_liger, {"T": 3})]
    check(assay.Target(theirs, golden, cases=cases, backward=None, dot=dot), device=device)


# -- TransformerEngine -----------------------------------------------------------------------------


def draw_te(make, T, n=N, norm=True):
    mixes = n * (n + 2)
    weights = {"phi": make.normal(mixes, n * DIM, std=0.3), "alpha": make.normal(3), "beta": make.normal(1, mixes)}
    if norm:
        weights["norm_weight"] = 1 + make.normal(n * DIM, std=0.3)
    return {"x": make.normal(T, 2, DIM, n), **weights}


@pytest.mark.parametrize("norm", [True, False], ids=["norm_weight", "no_norm_weight"])
@pytest.mark.parametrize("n", [2, 4])
def test_transformer_engines_weights_give_its_formula(norm, n):
    def candidate(x, **state):
        module = connection(*mhc.from_te(state, n=n))
        return mhc.streams_to_te(module(mhc.streams_from_te(x)))

    def golden(x, phi, alpha, beta, norm_weight=None):
        return formulas.te_connection(x, phi, alpha, beta, norm_weight, torch.tanh)

    check(target(candidate, golden, draw_te, n=n, norm=norm))


def test_stream_conversion_permutes_axes_and_changes_no_value():
    x = torch.randn(2, 3, DIM, N)
    ours = mhc.streams_from_te(x)
    assert ours.is_contiguous() and all(torch.equal(ours[..., i, :], x[..., i]) for i in range(N))
    assert torch.equal(mhc.streams_to_te(ours), x) and mhc.streams_to_te(ours).is_contiguous()
    for convert, axes in ((mhc.streams_from_te, "dim, n"), (mhc.streams_to_te, "n, dim")):
        name = f"mhc.{convert.__name__}"
        with pytest.raises(ShapeError) as caught:
            convert(x[0, 0, 0])
        assert str(caught.value) == f"{name}: x is [4], expected [*batch, {axes}]"


# -- Megatron-LM -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first_release", [False, True], ids=["now", "first_release"])
def test_megatrons_weights_give_its_formula(first_release):
    def draw(make, T):
        weights = {"weight": make.normal(M, K, std=0.3), "bias": make.normal(M)}
        return {"x": 0.01 * make.normal(T, 2, N, DIM), **weights, "alphas": make.normal(3)}

    def candidate(x, weight, bias, alphas):
        state = {"mapping_proj.weight": weight, "bias": bias}
        state |= {f"alpha_{part}": alphas[i : i + 1] for i, part in enumerate(("pre", "post", "res"))}
        return connection(*mhc.from_megatron(state, first_release=first_release))(x)

    def golden(x, weight, bias, alphas):
        return formulas.megatron_connection(x, weight, bias, alphas.split(1), torch.tanh, first_release=first_release)

    check(target(candidate, golden, draw))
    if not first_release:  # eps matters: its place shows at these magnitudes
        wrong = lambda **inputs: formulas.megatron_connection(  # noqa: E731
            inputs["x"], inputs["weight"], inputs["bias"], inputs["alphas"].split(1), torch.tanh, eps=1e-5
        )
        with pytest.raises(assay.AssayError):
            check(target(candidate, wrong, draw))


def test_megatrons_single_pass_is_the_lagged_scheme():
    weights = {"fn": torch.randn(M, K), "base": torch.randn(M), "scale": torch.randn(3)}
    assert mhc.from_megatron(mhc.to_megatron(weights), single_pass=True)[1] == {"n": N}
    with pytest.raises(ValueError, match="the first release has no single_pass"):
        mhc.from_megatron(mhc.to_megatron(weights), single_pass=True, first_release=True)


def test_the_gradient_of_an_eps_outside_the_root_at_zero_streams_is_finite():
    module = mhc.HyperConnection(DIM, torch.tanh, rms_form="outside", backend="reference")
    x = torch.zeros(2, N, DIM, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.isfinite().all() and module.fn.grad.isfinite().all()


# -- round trips and bad input ------------------------------------------------------------------


@pytest.mark.parametrize("project", ["hf", "liger", "te", "megatron"])
def test_a_round_trip_is_exact(project):
    weights = {"fn": torch.randn(M, K), "base": torch.randn(M), "scale": torch.randn(3)}
    weights |= {"norm_weight": torch.randn(K)} if project == "te" else {}
    theirs = getattr(mhc, f"to_{project}")(weights)
    ours, options = getattr(mhc, f"from_{project}")(theirs)
    assert ours.keys() == weights.keys() and all(torch.equal(ours[name], weights[name]) for name in weights)
    again = getattr(mhc, f"to_{project}")(ours)
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)
    assert not any(value.requires_grad for value in (*ours.values(), *theirs.values()))
    mhc.HyperConnection(DIM, nn.Identity(), **options).load_state_dict(ours)


def test_from_functions_return_the_options_that_the_layout_does_not_show():
    liger = mhc.from_liger(mhc.to_liger(mhc.HyperConnection(DIM, torch.tanh).state_dict()))[1]
    assert liger == {"n": N, "orientation": "out_in", "pre_eps": 0.0}
    te = mhc.from_te(mhc.to_te(mhc.HyperConnection(DIM, torch.tanh, gamma=True).state_dict()))[1]
    assert te == {
        "n": N, "form": "log", "rms_eps": 1.1920928955078125e-07, "pre_eps": 0.0, "orientation": "in_out",
        "gamma": True,
    }  # fmt: skip


def test_weights_of_the_layer_and_the_norm_are_ignored():
    module = mhc.HyperConnection(DIM, nn.Linear(DIM, DIM), norm=nn.RMSNorm(DIM))
    theirs = mhc.to_liger(module.state_dict())
    weights, _ = mhc.from_liger(theirs | {"layer.weight": torch.ones(2)})
    assert all(torch.equal(value, getattr(module, name)) for name, value in weights.items())


OURS, AND = "fn, base, scale", "fn, base and scale"
FN = "fn [n*(n+2), n*dim], or [n, n*dim]"
FIVE = "phi, b, alpha_pre, alpha_post, alpha_res"


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    "convert, part",
    [
        (
            lambda: mhc.from_liger(without(LIGER, "b")),
            f"lacks b; expected {FIVE}; keys: phi, alpha_pre, alpha_post, alpha_res",
        ),
        (
            lambda: mhc.from_liger(LIGER | {"gamma": torch.ones(K)}),
            f"has unknown gamma; expected {FIVE}; keys: {FIVE}, gamma",
        ),
        (
            lambda: mhc.from_liger(LIGER | {"phi": torch.randn(K, M - 1)}),
            "mhc.from_liger: phi is [24, 23], expected phi [K, M] = [n*dim, n*(n+2)]",
        ),
        (
            lambda: mhc.from_liger(LIGER | {"b": torch.zeros(M - 1)}),
            "mhc.from_liger: b has shape [23], expected 24 elements",
        ),
        (
            lambda: mhc.from_te(without(TE, "alpha")),
            "lacks alpha; expected phi, alpha, beta",
        ),
        (
            lambda: mhc.from_te(TE, n=2),
            "mhc.from_te: phi is [24, 24], expected phi [M, K] = [8, dim*2] for n=2",
        ),
        (
            lambda: mhc.from_te(TE | {"norm_weight": torch.ones(5)}),
            "mhc.from_te: norm_weight has shape [5], expected 24 elements",
        ),
        (
            lambda: mhc.from_hf({"a.fn": torch.ones(1)}, "a"),
            f"mhc.from_hf: no {AND} under prefix 'a' (tried a.fn, a_fn, a.hc_fn); keys of hyper-connections: a.fn",
        ),
        (
            lambda: mhc.from_hf({"weight": torch.ones(1)}),
            f"mhc.from_hf: no {AND} under prefix '' (tried fn, hc_fn); keys: weight",
        ),
        (lambda: mhc.from_hf(HF | {"scale": torch.ones(4)}), "mhc.from_hf: scale has shape [4], expected 3 elements"),
        (
            lambda: mhc.from_hf(HF, config=CONFIG | {"hc_mult": 2}),
            "mhc.from_hf: fn has n=4, but the config says hc_mult=2",
        ),
        (
            lambda: mhc.from_hf(HF, config=without(CONFIG, "hc_sinkhorn_iters")),
            "mhc.from_hf: the config lacks hc_sinkhorn_iters; keys: hc_mult, hc_eps, rms_norm_eps",
        ),
        (
            lambda: mhc.to_hf(HF | {"norm_weight": torch.ones(K)}),
            "use fn * norm_weight",
        ),
        (
            lambda: mhc.to_liger(HF | {"norm_weight": torch.ones(K)}),
            "use fn * norm_weight",
        ),
        (
            lambda: mhc.to_te(TE),
            f"lacks {OURS}; expected {OURS}",
        ),
        (lambda: mhc.from_hf(HF | {"fn": torch.ones(M)}), f"mhc.from_hf: fn is [24], expected {FN}"),
        (lambda: mhc.from_hf(HF | {"fn": torch.ones(())}), f"mhc.from_hf: fn is [], expected {FN}"),
        (lambda: mhc.from_hf(HF | {"fn": torch.ones(M, K - 1)}), f"mhc.from_hf: fn is [24, 23], expected {FN}"),
        (lambda: mhc.from_hf(HF | {"fn": torch.ones(M, 0)}), f"mhc.from_hf: fn is [24, 0], expected {FN}"),
        (
            lambda: mhc.from_liger(LIGER | {"alpha_pre": torch.ones(3)}),
            "mhc.from_liger: alpha_pre has shape [3], expected 1 elements",
        ),
        (
            lambda: mhc.from_liger(LIGER | {"phi": torch.ones(())}),
            "mhc.from_liger: phi is [], expected phi [K, M] = [n*dim, n*(n+2)]",
        ),
        (lambda: mhc.from_te(TE, n="4"), "mhc.from_te: n='4', expected a whole number of at least 1"),
        (lambda: mhc.to_hf(HF | {"fn": torch.ones(M)}), "mhc.to_hf: fn is [24], expected fn [n*(n+2), n*dim]"),
        (lambda: mhc.to_liger(HF | {"scale": torch.ones(4)}), "mhc.to_liger: scale has shape [4], expected 3 elements"),
        (
            lambda: mhc.to_te(HF | {"norm_weight": torch.ones(5)}),
            "mhc.to_te: norm_weight has shape [5], expected 24 elements",
        ),
    ],
)
def test_a_wrong_or_missing_key_is_named_with_the_keys_that_are_there(convert, part):
    with pytest.raises(ValueError) as caught:
        convert()
    assert str(caught.value).startswith("mhc.")
    assert part in str(caught.value)


@pytest.mark.parametrize("convert", [mhc.from_hf, mhc.from_liger, mhc.from_te, mhc.to_hf, mhc.to_liger, mhc.to_te])
def test_weights_that_are_not_a_dict_of_tensors(convert):
    def says(sentence, weights):
        with pytest.raises(TypeError) as caught:
            convert(weights)
        assert str(caught.value) == f"mhc.{convert.__name__}: {sentence}"

    says("the weights are a NoneType, expected a dict of tensors", None)
    connection = mhc.HyperConnection(DIM, torch.tanh)
    says("the weights are a HyperConnection, expected a dict of tensors: its state_dict()", connection)
    state = {mhc.from_liger: LIGER, mhc.from_te: TE}.get(convert, HF)
    for name in state:
        says(f"{name} is a float, expected a torch.Tensor", state | {name: 1.0})
    says(f"{name} is int64, expected one of: bfloat16, float16, float32, float64", state | {name: state[name].long()})


def test_a_prefix_that_is_not_a_string():
    with pytest.raises(TypeError, match="mhc.from_hf: prefix=3, expected a string such as 'model.layers.0.attn_hc'"):
        mhc.from_hf(HF, 3)
