"""router.atomic_experts on a GPU: dots and sums by token over slabs of the tables in L2, gradients by expert.

Bytes with U experts in use and P pairs: the forward reads 4 U D of tables (from HBM, once) and 4 P D from L2; the
backward the same plus both gradients. "gather" and "sorted" run the same kernels, because the slabs give the locality
that the reference sorts for. "dense" uses matrix products. No float atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.tracing import stage
from .._common import flat
from .._kernels.dense_products import dense_dots, dense_sums
from .._kernels.table_gradients import ByExpert
from .._kernels.table_lookups import dots, gate, gate_backward, sums
from .._pairs import Pairs
from .row_sparse import row_sparse

DOTS = {"gather": dots, "sorted": dots, "dense": dense_dots}
SUMS = {"gather": sums, "sorted": sums, "dense": dense_sums}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported(tensors: dict, options: dict) -> str | None:
    h = tensors["h"]
    if h.dtype not in DTYPES:
        return (
            f"{str(h.dtype).removeprefix('torch.')} runs on the reference only; "
            "this backend takes bfloat16, float16 and float32"
        )
    return None


def forward(
    h: Tensor, w_in: Tensor | None, w_out: Tensor, weights: Tensor, indices: Tensor, *,
    activation: str, strategy: str, sparse_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if indices.device.type == "cpu":
        Pairs(indices, w_out.shape[0]).raise_if_out_of_range()
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
    if tables and sparse:  # first, so that the number of used experts reaches the host while the rest is computed
        pairs = ByExpert(lists, w_out.shape[0], sparse=True)
    part = DOTS[options["strategy"]](dy, w_out, lists) if needs - {"w_out"} else None
    preact = None if w_in is None else flat(tensors["preact"])
    dweights, da, gated = gate_backward(
        part, preact, flat(tensors["weights"]), lists, w_out.shape[0], options["activation"]
    )
    del part  # it takes as much memory as everything else kept per pair
    gradients = {}
    if "weights" in needs:
        gradients["weights"] = stage("dweights", dweights).view(tensors["weights"].shape)
    if w_in is None:
        gradients["h"] = torch.zeros_like(h, memory_format=torch.contiguous_format)
    elif needs & {"h", "w_in"}:
        da = stage("dpreact", da)
        if "h" in needs:
            gradients["h"] = stage("dh", SUMS[options["strategy"]](da, w_in, lists, h.dtype).view(h.shape))
    if tables:
        pairs = pairs if sparse else ByExpert(lists, w_out.shape[0])
        jobs = {"w_in": (da, rows), "w_out": (gated, dy)}
        names = [name for name in ("w_in", "w_out") if name in tables]
        sums = pairs.sums([(*jobs[name], tensors[name].dtype) for name in names])
        experts = pairs.used() if sparse else None
        for name, grad in zip(names, sums.tables(experts), strict=True):
            gradients[name] = stage(f"d{name}", grad if experts is None else row_sparse(grad, experts, tensors[name]))
    return gradients
