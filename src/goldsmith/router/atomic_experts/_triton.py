"""router.atomic_experts on a GPU: dots and sums by token, in slabs of the tables that stay in L2; tables by expert.

Bytes, U experts in use: forward 4 U D of tables (HBM, once) and 4 P D from L2; backward the same and both gradients.
"gather" and "sorted" are one here: what the reference sorts for, the slabs give without a sort. "dense" is matrix
products. No float atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._common import flat
from .._kernels.dense import dense_dots, dense_sums
from .._kernels.lookup import dots, gate, gate_backward, sums
from .._kernels.tables import ByExpert
from .._pairs import Pairs
from .few_rows import few_rows

DOTS = {"gather": dots, "sorted": dots, "dense": dense_dots}
SUMS = {"gather": sums, "sorted": sums, "dense": dense_sums}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(tensors: dict, options: dict) -> str | None:
    h = tensors["h"]
    if h.dtype not in DTYPES:
        return f"{str(h.dtype).removeprefix('torch.')} has a reference only; bfloat16, float16 and float32 run here"
    return None


def forward(
    h: Tensor, w_in: Tensor | None, w_out: Tensor, weights: Tensor, indices: Tensor, *,
    activation: str, strategy: str, sparse_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if indices.device.type == "cpu":
        Pairs(indices, w_out.shape[0]).refuse_what_is_out_of_range()
    lists, n = flat(indices), w_out.shape[0]
    part = None if w_in is None else DOTS[strategy](flat(h), w_in, lists)
    preact, gated = gate(part, flat(weights), lists, n, activation)
    if w_in is not None:
        preact = stage("preact", preact)
    gated = stage("gated", gated)
    y = SUMS[strategy](gated, w_out, lists, h.dtype).view(*h.shape[:-1], w_out.shape[1])
    return stage("y", y), preact if w_in is None else preact.view(indices.shape)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    h, w_in, w_out = (tensors[name] for name in ("h", "w_in", "w_out"))
    lists, rows, dy = flat(tensors["indices"]), flat(h), flat(grads["y"])
    tables = {name for name in ("w_in", "w_out") if name in needs and tensors[name] is not None}
    sparse = options["sparse_grad"]
    if tables and sparse:  # first: the host waits for the number of experts in use, while the rest is computed
        pairs = ByExpert(lists, w_out.shape[0], sparse=True)
    part = DOTS[options["strategy"]](dy, w_out, lists) if needs - {"w_out"} else None
    preact = None if w_in is None else flat(tensors["preact"])
    dweights, da, gated = gate_backward(
        part, preact, flat(tensors["weights"]), lists, w_out.shape[0], options["activation"]
    )
    del part  # as much again as all else that is kept of a pair
    found = {}
    if "weights" in needs:
        found["weights"] = stage("dweights", dweights).view(tensors["weights"].shape)
    if w_in is None:
        found["h"] = torch.zeros_like(h, memory_format=torch.contiguous_format)
    elif needs & {"h", "w_in"}:
        da = stage("dpreact", da)
        if "h" in needs:
            found["h"] = stage("dh", SUMS[options["strategy"]](da, w_in, lists, h.dtype).view(h.shape))
    if tables:
        pairs = pairs if sparse else ByExpert(lists, w_out.shape[0])
        jobs = {"w_in": (da, rows), "w_out": (gated, dy)}
        names = [name for name in ("w_in", "w_out") if name in tables]
        sums = pairs.sums([(*jobs[name], tensors[name].dtype) for name in names])
        experts = pairs.used() if sparse else None
        for name, grad in zip(names, sums.tables(experts), strict=True):
            found[name] = stage(f"d{name}", grad if experts is None else few_rows(grad, experts, tensors[name]))
    return found
