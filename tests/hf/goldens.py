"""The golden of a model with LoRA on its experts: transformers' eager model with the merged weights.

The golden runs in any dtype. transformers casts norms, softmax and rotary angles to float32 by name; in a float64 run
`Wide` casts them to float64 instead.
"""

import contextlib
import copy

import torch
from torch.overrides import TorchFunctionMode

from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import models

RANK, ALPHA = 3, 6.0
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")


class Wide(TorchFunctionMode):
    """float64 wherever the code below asks for float32 by name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wider = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(wider, args), **{name: wider(value) for name, value in (kwargs or {}).items()})


def sizes(experts):
    """E, H, I of a plain experts module."""
    shape = experts.gate_up_proj.shape
    hidden, double = (shape[1], shape[2]) if experts.is_transposed else (shape[2], shape[1])
    return shape[0], hidden, double // 2


def draw_factors(make, experts, dtype=None):
    """A and B of the three targets; without up_a, gate and up share one A, as in peft."""
    e, h, i = sizes(experts)
    shapes = [(e, RANK, h), (e, i, RANK), (e, RANK, h), (e, i, RANK), (e, RANK, i), (e, h, RANK)]
    return {name: make.normal(*shape, std=0.2, dtype=dtype) for name, shape in zip(FACTORS, shapes)}


def merged(experts, values):
    """gate_up_proj and down_proj with s B A added, in the layout of the model."""
    scale = ALPHA / RANK
    delta = {t: scale * values[f"{t}_b"] @ values[f"{t}_a"] for t in ("gate", "up", "down")}
    if experts.is_concatenated:
        gate_up = torch.cat((delta["gate"], delta["up"]), 1)
    else:
        gate_up = torch.stack((delta["gate"], delta["up"]), 2).flatten(1, 2)
    added = {"gate_up_proj": gate_up, "down_proj": delta["down"]}
    turned = (lambda d: d.mT) if experts.is_transposed else (lambda d: d)
    return {name: getattr(experts, name).to(d.dtype) + turned(d) for name, d in added.items()}


def golden_of(plain, *, shared):
    """logits(embeds, factors) of the eager model with merged weights."""
    wide = InItsDtype(plain)
    path, experts = next((n, m) for n, m in plain.named_modules() if n.endswith("mlp.experts"))

    def golden(embeds, **values):
        values = {"up_a": values["gate_a"], **values} if shared else values
        return wide.logits(embeds, {f"{path}.{name}": value for name, value in merged(experts, values).items()})

    return golden


class InItsDtype:
    """A copy of a model that runs in any dtype, with other parameters in place of its own."""

    def __init__(self, model):
        self.wide = copy.deepcopy(model).double()

    def outputs(self, dtype, values, inputs):
        state = self.wide.state_dict()
        weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()} | values
        with Wide() if dtype == torch.float64 else contextlib.nullcontext():
            return torch.func.functional_call(self.wide, weights, (), inputs, tie_weights=False)  # all are there

    def logits(self, embeds, values):
        return self.outputs(embeds.dtype, values, {"inputs_embeds": embeds, "use_cache": False}).logits


def alike(ours, theirs):
    """A target: the logits of one whole model, compared with another's in float64."""

    def draw(make):
        return {"embeds": make.normal(1, 3, theirs.config.hidden_size)}

    wide = InItsDtype(theirs)
    return assay.Target(
        lambda embeds: logits_of(ours, {}, embeds),
        lambda embeds: wide.logits(embeds, {}),
        cases=[Case("logits", draw, {})],
        name=theirs.config.model_type,
    )


def check_alike(ours, theirs):
    assay.check(alike(ours, theirs), probes=["values", "ensemble"])


def logits_of(model, weights, embeds):
    """The model's logits with these parameters in place of its own."""
    return torch.func.functional_call(model, weights, (), {"inputs_embeds": embeds, "use_cache": False}).logits


def target(plain, *, shared=True, **candidates):
    """A target of several candidates, logits of (embeds, factors), against the plain model's golden in its dtype.

    All candidates share one target, each with its own output gradient, because a whole model's golden costs more than
    they do. In bfloat16 transformers rounds between operators, so the whole model is only as exact as that.
    """
    experts, golden, dtype = models.experts_of(plain), golden_of(plain, shared=shared), plain.dtype

    def draw(make):
        factors = draw_factors(make, experts)
        if shared:
            del factors["up_a"]
        return {"embeds": make.normal(1, 3, plain.config.hidden_size), **factors}

    return assay.Target(
        lambda **values: {name: candidate(**values) for name, candidate in candidates.items()},
        lambda **values: dict.fromkeys(candidates, golden(**values)),
        cases=[Case("logits", draw, {})],
        dtypes=(dtype,),
        compute=None if dtype == torch.float32 else dtype,
        name=plain.config.model_type,
    )
