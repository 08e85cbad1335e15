"""The gradient of a table of which few rows are used, as torch's own optimisers take it."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sparse(rows: Tensor, experts: Tensor, table: Tensor) -> Tensor:
    """The tensor of the table's shape that has rows[i] at experts[i], which ascend, and 0 elsewhere.

    By the operator at the bottom of torch.sparse_coo_tensor, which looks at no invariants: they hold here. That
    function asks for the global setting before it looks at check_invariants=False, and in torch 2.11 and 2.12 asking
    warns (pytorch issue 178274). The operator does not, and a setting or a filter would be everybody's.
    """
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, table.dim() - 1, table.shape, experts.unsqueeze(0), rows,
        dtype=rows.dtype, layout=torch.sparse_coo, device=rows.device, is_coalesced=True,
    )  # fmt: skip
