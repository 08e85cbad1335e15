"""router.atomic_experts: its declaration, argument checks and public function."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.op import Op
from ...core.shapes import ShapeError, check_choice, check_dtype, check_same_device, check_tensor
from .._common import FLOATS, check_flag, dtype_name, same_dtype, sum_dtype
from .._strategy import STRATEGIES, rule_based_strategy

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")

ATOMIC_EXPERTS = Op(
    "router.atomic_experts",
    schema="(Tensor h, Tensor? w_in, Tensor w_out, Tensor weights, Tensor indices, "
    "str activation, str strategy, bool sparse_grad) -> (Tensor y, Tensor preact)",
    saved=("preact",),
    package=__package__,
    axes={
        "h": "*batch D",
        "w_in": "N D",
        "w_out": "N E",
        "weights": "*batch K",
        "indices": "*batch K",
        "y": "*batch E",
    },
    expert_axis=("N", "indices"),
    backends=("triton",),
    grads=("h", "w_in", "w_out", "weights"),
    stages=("preact", "hidden", "gated", "y", "dout_dot", "dweights", "dpreact", "dh", "dw_in", "dw_out"),
    summary="weighted sum of the selected experts, each of one hidden unit",
)


def atomic_experts(
    h: Tensor,
    w_in: Tensor | None,
    w_out: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    activation: str = "silu",
    strategy: str = "auto",
    sparse_grad: bool = False,
    backend: str = "auto",
) -> Tensor:
    """y = sum_j weights[j] * act(<h, w_in[e_j]>) * w_out[e_j],   e = indices

    h [..., D], w_in [N, D], w_out [N, E] in one dtype; weights [..., K] in that dtype or float32; indices [..., K] in
    int32 or int64 -> y [..., E] in h's dtype, summed in float32 (float64 for float64) and rounded once. w_in=None makes
    a product-key memory: y = sum_j weights[j] * w_out[e_j]. activation: "silu", "gelu", "gelu_tanh", "relu", "relu2",
    "identity".

    An expert that a token lists twice counts twice. -1 is skipped and nothing is read for it. An index outside [-1, N)
    raises IndexError on a CPU; on a GPU, where the check would have to wait, it is skipped and that token's y and dh
    are NaN. Differentiable in h, w_in, w_out and weights.

    strategy: "gather", "sorted", "dense", or "auto", which calls choose_strategy. All agree within rounding, but
    "dense" multiplies unselected experts by 0, so NaN in any expert spoils every token. Within one strategy a token's y
    and its gradients of h and weights have the same bits in every batch. sparse_grad=True returns the tables' gradients
    as coalesced sparse tensors of the used rows, equal to the dense ones bit for bit (for torch.optim.SparseAdam and
    SGD; the backward then waits for the device once).

    Raises ShapeError, TypeError, ValueError, IndexError, BackendUnavailable. Source: He 2024, arXiv 2407.04153;
    OmniMoE, arXiv 2602.05711.
    """
    check_choice("router.atomic_experts", "strategy", strategy, STRATEGIES)
    if strategy == "auto" and isinstance(h, Tensor) and isinstance(w_out, Tensor) and isinstance(indices, Tensor):
        k, experts = (t.shape[axis] if t.dim() else 0 for t, axis in ((indices, -1), (w_out, 0)))
        strategy = rule_based_strategy(h.shape[:-1].numel(), k, experts, h.dtype, h.device.type)
    if sparse_grad and torch.compiler.is_compiling() and torch.is_grad_enabled():
        raise NotImplementedError(
            "router.atomic_experts: sparse_grad=True cannot be compiled with gradients, because their number of rows "
            "depends on the routing. Leave the layer out of the graph (torch.compiler.disable) or use sparse_grad=False"
        )
    return ATOMIC_EXPERTS(
        h, w_in, w_out, weights, indices,
        activation=activation, strategy=strategy, sparse_grad=sparse_grad, backend=backend,
    )  # fmt: skip


def check(
    h: Tensor,
    w_in: Tensor | None,
    w_out: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    activation: str,
    strategy: str,
    sparse_grad: bool,
) -> None:
    op = "router.atomic_experts"
    floats = {"h": h, "w_in": w_in, "w_out": w_out, "weights": weights}
    for name, tensor in floats.items():
        if tensor is None and name == "w_in":
            continue
        check_tensor(op, name, tensor)
        check_dtype(op, name, tensor, FLOATS)  # type: ignore[arg-type]
    check_tensor(op, "indices", indices)
    check_dtype(op, "indices", indices, (torch.int32, torch.int64))
    same_dtype(op, [(name, t) for name, t in floats.items() if t is not None and name != "weights"])
    if weights.dtype not in (h.dtype, torch.float32):
        raise TypeError(f"{op}: weights is {dtype_name(weights.dtype)}, expected float32 or h's {dtype_name(h.dtype)}")
    _check_shapes(op, h, w_in, w_out, weights, indices)
    check_same_device(op, {**floats, "indices": indices})
    check_choice(op, "activation", activation, ACTIVATIONS)
    check_choice(op, "strategy", strategy, STRATEGIES[1:])
    check_flag(op, "sparse_grad", sparse_grad)


def _check_shapes(op: str, h: Tensor, w_in: Tensor | None, w_out: Tensor, weights: Tensor, indices: Tensor) -> None:
    def fail(problem: str) -> None:
        arguments = {"h": h, "w_in": w_in, "w_out": w_out, "weights": weights, "indices": indices}
        wanted = {"h": "[*batch, D]", "w_in": "[N, D] or None", "w_out": "[N, E]"}
        lines = [
            f"  {name + ':':9}{'None' if t is None else list(t.shape)}, expected {wanted.get(name, '[*batch, K]')}"
            for name, t in arguments.items()
        ]
        raise ShapeError("\n".join([f"{op}: {problem}", *lines]))

    if h.dim() == 0 or h.shape[-1] == 0:
        fail("h needs a last dimension of at least 1")
    for name, table in (("w_in", w_in), ("w_out", w_out)):
        if table is not None and (table.dim() != 2 or 0 in table.shape):
            fail(f"{name} needs two dimensions of at least 1")
    if w_in is not None and w_in.shape[-1] != h.shape[-1]:
        fail(f"w_in has D={w_in.shape[-1]}, but h has D={h.shape[-1]}")
    if w_in is not None and w_in.shape[0] != w_out.shape[0]:
        fail(f"w_out has N={w_out.shape[0]}, but w_in has N={w_in.shape[0]}")
    if indices.dim() == 0 or indices.shape[:-1] != h.shape[:-1]:
        fail("indices and h need the same leading dimensions")
    if weights.shape != indices.shape:
        fail("weights and indices need the same shape")


def fake(
    h: Tensor,
    w_in: Tensor | None,
    w_out: Tensor,
    weights: Tensor,
    indices: Tensor,
    *,
    activation: str,
    strategy: str,
    sparse_grad: bool,
) -> tuple[Tensor, Tensor]:
    y = torch.empty((*h.shape[:-1], w_out.shape[1]), dtype=h.dtype, device=h.device)
    shape = (0,) if w_in is None else indices.shape
    return y, torch.empty(shape, dtype=sum_dtype(h.dtype), device=h.device)
