"""Whole layers of PEER and of a product-key memory: projection, routing and experts, as the published peers have them.

They run in float32, where scores do not tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from goldsmith.assay.declare.case import Case, Make
from goldsmith.assay.declare.target import Target
from goldsmith.cli.bench.subject import OURS, MakeThere, ModuleSubject, Tensors, Variant
from goldsmith.core.bench import BenchCase
from goldsmith.core.op import Op

PARAMETERS = {
    "query": "query.weight", "norm_weight": "norm.weight", "norm_bias": "norm.bias", "keys": "keys", "w_in": "w_in",
    "w_out": "w_out",
}  # fmt: skip
PER_WINDOW = 256  # tokens of a window; the golden takes one window


class PeerLayer(ModuleSubject):
    """router.PEER with softmax over the k experts of each head; `tensors` are h and the parameters."""

    kind = "router.peer"
    memory = False
    sizes: Mapping[str, int] = {"T": 4096, "D": 1024, "s": 256, "heads": 8, "k": 16, "key_dim": 512}

    def __init__(self, entry: BenchCase, device: str) -> None:
        self.op, self.entry, self.device, self.name = Op.get("router.atomic_experts"), entry, device, self.kind
        inputs = entry.build(dtype=entry.dtype, device=device, seed=0, make=MakeThere)
        self.options = {name: inputs.pop(name) for name in ("heads", "k")}
        self.turns: dict[str, Any] = {}
        self.drawn: dict[str, Any] = inputs
        self.tensors, self.grads = inputs, tuple(inputs)

    @classmethod
    def entries(cls) -> list[BenchCase]:
        sizes = dict(cls.sizes)
        T, D, n, pairs = sizes["T"], sizes["D"], sizes["s"] ** 2, sizes["T"] * sizes["heads"] * sizes["k"]
        rows = n * (1 - (1 - 1 / n) ** pairs)  # distinct experts of a uniform routing
        tables, fixed = 1 if cls.memory else 2, 2 * sizes["heads"] * sizes["key_dim"] * (D + sizes["s"])
        case = Case(f"layer[{','.join(f'{name}={size}' for name, size in sizes.items())}]", cls.draw, sizes)
        forward = round(4 * (tables * rows * D + 2 * T * D + fixed))
        backward = round(4 * (tables * (rows + n) * D + 3 * T * D + 2 * fixed))
        why = "rows in use of the tables once, tokens twice, projection and keys; backward with dense gradients"
        return [BenchCase(case.name, sizes, torch.float32, case.build, forward, backward, why)]

    @classmethod
    def draw(cls, make: Make, T: int, D: int, s: int, heads: int, k: int, key_dim: int) -> dict[str, Any]:
        window = min(T, PER_WINDOW)
        drawn = {
            "h": make.normal(T // window, window, D),
            "query": make.normal(2 * heads * key_dim, D, std=D**-0.5),
            "keys": make.normal(2, heads, s, key_dim, std=key_dim**-0.5),
            "w_out": make.normal(s * s, D, std=heads**-0.5),
            "heads": heads,
            "k": k,
        }
        if cls.memory:
            return drawn | {
                "norm_weight": 1 + make.normal(key_dim, std=0.1),
                "norm_bias": make.normal(key_dim, std=0.1),
            }
        return drawn | {"w_in": make.normal(s * s, D, std=D**-0.5)}

    def choose(self, backend: str) -> str:
        h, w = (self.drawn[name][0] for name in ("h", "w_out"))
        lists = torch.zeros(len(h), 1, dtype=torch.int32, device=h.device)
        options = {"activation": "gelu", "strategy": "gather", "sparse_grad": False}
        return self.op.choose(backend, (h, None, w[None], lists.to(h.dtype), lists), options)

    def ours(self, backend: str) -> Variant:
        tensors: dict[str, Any] = self.fresh_leaves()
        module = layer(tensors, backend, **self.options)
        return Variant(OURS, lambda: module(tensors["h"]), [tensors["h"], *module.parameters()], backend)

    def reference(self) -> Callable[[Tensors], tuple[Tensor, ...]]:
        return lambda tensors: (formula(**{**tensors, **self.options}),)

    def golden(self) -> Tensor:
        wide = {name: t.double() for name, t in self.drawn.items()}
        return formula(**{**wide, **self.options, "h": wide["h"][:1]})

    def target(self, backend: str) -> Target:
        def candidate(heads: int, k: int, **tensors: Tensor) -> Tensor:
            state = {PARAMETERS[name]: t for name, t in tensors.items() if name in PARAMETERS}
            return torch.func.functional_call(layer(tensors, backend, heads=heads, k=k), state, (tensors["h"],))

        sizes = {"T": 13, "D": 24, "s": 7, "heads": 2, "k": 5, "key_dim": 9}
        return Target(
            candidate,
            formula,
            cases=[Case("small", self.draw, sizes)],
            name=f"{self.name} on {backend}",
            outputs=("y",),
            grads=tuple(self.tensors),
            dtypes=(torch.float32,),
        )


class ProductKeyMemory(PeerLayer):
    """router.PEER with values_only (a product-key memory) and a LayerNorm of its queries."""

    kind = "router.memory"
    memory = True
    sizes = {"T": 4096, "D": 1024, "s": 256, "heads": 4, "k": 32, "key_dim": 128}


def layer(tensors: Mapping[str, Any], backend: str, *, heads: int, k: int) -> Any:
    """router.PEER whose parameters are these tensors, not copies."""
    from goldsmith.router import PEER

    module = PEER(
        tensors["h"].shape[-1], len(tensors["w_out"]), k, heads=heads, key_dim=tensors["keys"].shape[-1],
        query_norm="layer" if "norm_weight" in tensors else "none", values_only="w_in" not in tensors,
        backend=backend, device="meta",
    )  # fmt: skip
    module.load_state_dict({PARAMETERS[name]: t for name, t in tensors.items() if name in PARAMETERS}, assign=True)
    return module


def formula(
    h: Tensor, query: Tensor, keys: Tensor, w_out: Tensor, heads: int, k: int, w_in: Tensor | None = None,
    norm_weight: Tensor | None = None, norm_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The layer in plain PyTorch: the top k of each axis, their k * k sums, and the top k of those."""
    s, key_dim = keys.shape[-2:]
    queries = functional.linear(h, query).unflatten(-1, (2, heads, key_dim))
    if norm_weight is not None:
        queries = functional.layer_norm(queries, (key_dim,), norm_weight, norm_bias)
    x, y = (part.topk(k) for part in torch.einsum("...ahd,ahsd->...ahs", queries, keys).unbind(-3))
    best = (x.values[..., :, None] + y.values[..., None, :]).flatten(-2).topk(k)
    expert = (x.indices[..., :, None] * s + y.indices[..., None, :]).flatten(-2).gather(-1, best.indices)
    gate = best.values.softmax(-1)
    if w_in is not None:
        gate = gate * functional.gelu(torch.einsum("...d,...hkd->...hk", h, functional.embedding(expert, w_in)))
    return torch.einsum("...hk,...hkd->...d", gate, functional.embedding(expert, w_out))
