"""Row-sparse gradients of a table, in the format of torch's sparse optimizers."""

from __future__ import annotations

import torch
from torch import Tensor


def row_sparse(rows: Tensor, experts: Tensor, table: Tensor) -> Tensor:
    """A coalesced sparse tensor of the table's shape with rows[i] at experts[i] (ascending) and 0 elsewhere.

    Calls the operator below torch.sparse_coo_tensor, which does not check invariants; they hold here. The public
    function reads the global setting before check_invariants=False, and in torch 2.11 and 2.12 that read warns (pytorch
    issue 178274). Changing the setting or filtering the warning would affect the whole process.
    """
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1, table.dim() - 1, table.shape, experts.unsqueeze(0), rows,
        dtype=rows.dtype, layout=torch.sparse_coo, device=rows.device, is_coalesced=True,
    )  # fmt: skip
