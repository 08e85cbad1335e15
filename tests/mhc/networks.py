"""Small networks of hyper-connections, as modules and, for goldens, as formulas."""

import torch
from torch import nn

from goldsmith import assay, mhc
from goldsmith.assay.declare.case import Case
from mhc import formulas

DIM = 6


class Layer(nn.Module):
    """tanh(h W^T)"""

    def __init__(self, dim=DIM):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) * 0.4)

    def forward(self, h):
        return torch.tanh(h @ self.weight.mT.to(h.dtype))


class Norm(nn.Module):
    """RMSNorm computed in float32 or wider."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(dim))

    def forward(self, x):
        wide = torch.promote_types(x.dtype, torch.float32)
        return formulas.rms_norm(x.to(wide), self.weight.to(wide)).to(x.dtype)


def connection(dim=DIM, *, normed=True, base=0.3, backend="reference", **options):
    """A HyperConnection whose parameters all affect the result."""
    module = mhc.HyperConnection(dim, Layer(dim), norm=Norm(dim) if normed else None, backend=backend, **options)
    with torch.no_grad():
        module.fn.normal_(std=0.3)
        module.base.normal_(std=base)
        module.scale.copy_(torch.tensor([0.7, 1.3, 0.9]))
    return module


def gradients(function, x, parameters):
    """The result and the gradients of x and of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    cotangent = torch.linspace(-1, 2, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], cotangent)]


def precisions(backend):
    """Precisions of a target, as its options: float32, and bfloat16 unless the backend's stores do not round.

    In bfloat16 a network stores h_in, its norm and the layer's result in bfloat16 and computes with the rounded values;
    the target declares that. A wrong factor shows in float32, which has no such allowance.
    """
    yield {"dtypes": (torch.float32,)}
    if backend == "reference" or torch.cuda.is_available():  # the interpreter truncates where hardware rounds
        yield {"dtypes": (torch.bfloat16,), "compute": torch.bfloat16}


def target_against_formulas(
    module, connections, *, tokens=(2, 3), n=4, dim=DIM, iterations=20, through=None, meaning=None, **options
):
    """A target: the module's outputs and gradients against the formulas of `hf_connection`.

    `through` turns the module into another function of x, `meaning` does the same with the formulas.
    """
    shapes = {name: p.shape for name, p in module.named_parameters()}
    short = {name: name.replace(".", "_") for name in shapes}

    def draw(make, **sizes):
        drawn = {"x": make.normal(*tokens, n, dim)}
        for name, shape in shapes.items():
            is_gain = name.endswith(("norm.weight", "scale"))
            drawn[short[name]] = make.normal(*shape, std=0.3, dtype=torch.float32) + (1.0 if is_gain else 0.0)
        return drawn

    def candidate(x, **inputs):
        weights = {name: inputs[short[name]] for name in shapes}
        function = lambda x: torch.func.functional_call(module, weights, (x,))  # noqa: E731
        return (function if through is None else through(function))(x)

    def golden(x, **inputs):
        function = lambda x: formula(x, inputs)  # noqa: E731
        return (function if meaning is None else meaning(function))(x)

    def formula(x, tensors):
        for prefix in connections:
            fn, base, scale, weight, gain = (
                tensors[f"{prefix}{name}"] for name in ("fn", "base", "scale", "layer_weight", "norm_weight")
            )

            def layer(h, weight=weight, gain=gain):
                return torch.tanh(formulas.rms_norm(h, gain) @ weight.mT)

            x = formulas.hf_connection(x, fn, base, scale, layer, iterations=iterations)
        return x

    return assay.Target(candidate, golden, cases=[Case("network", draw)], name="network", **options)
