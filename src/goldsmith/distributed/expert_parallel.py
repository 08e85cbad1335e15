"""A parallel style that spreads the experts of a layer over the ranks of a mesh dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

TABLES = {"w_in", "w_out", "gate_up", "down", "gate_up_bias", "down_bias"}  # parameters whose first axis counts experts


class ExpertParallel(ParallelStyle):
    """Every rank computes its own experts for the tokens of all ranks; to be used with `parallelize_module`

    The tables of experts become `Shard(0)` over the mesh, other parameters `Replicate()`. The forward gathers the
    tokens of the mesh once, every rank skips the experts of others, and the outputs are summed in one reduction. A
    gradient of a table stays on the rank that has it.

        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

    input_layouts   the placement of the plain tensors that the layer receives, h and then others of as many rows, such
                    as ids and weights: Shard(0) if every rank has its own tokens (data x expert parallelism),
                    Replicate() if all have the same
    output_layouts  how y is returned; by default like h
    use_local_output  whether y is a plain tensor, this rank's part, or the DTensor
    equal_tokens    whether all ranks always have equally many tokens. By default they tell each other at every call,
                    for which a GPU has to wait, and shorter ranks add rows of zeros
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        equal_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Shard(0),)
        self.output_layouts = (output_layouts or self.input_layouts[0],)
        self.use_local_output, self.equal_tokens = use_local_output, equal_tokens
        self._rows = 0  # of this rank, in the call that is running

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not any(name in TABLES for name, _ in module.named_parameters(recurse=False)):
            raise ValueError(
                f"distributed.ExpertParallel: {type(module).__name__} has none of the parameters "
                f"{', '.join(sorted(TABLES))}; wanted a layer with experts, such as router.OmniMoE"
            )
        return distribute_module(module, device_mesh, _distribute, self._receive, self._return)

    def _receive(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        plain = [isinstance(value, Tensor) and not isinstance(value, DTensor) for value in inputs]
        if not plain[0]:
            return inputs
        self._rows = rows = inputs[0].shape[0]
        most = self._most_rows(inputs[0], mesh)
        placed = []
        for value, own in zip(inputs, plain, strict=True):
            if own and value.dim() and value.shape[0] == rows:
                # rows of zeros are routed, and have no gradient
                padded = value if most == rows else torch.cat((value, value.new_zeros(most - rows, *value.shape[1:])))
                value = DTensor.from_local(padded, mesh, self.input_layouts, run_check=False)
            placed.append(value)
        return tuple(placed)

    def _most_rows(self, h: Tensor, mesh: DeviceMesh) -> int:
        """How many rows the rank with the most has."""
        if self.equal_tokens or not self.input_layouts[0].is_shard(0):
            return h.shape[0]
        most = torch.tensor(h.shape[0], device=h.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        return int(most)

    def _return(self, module: nn.Module, outputs: object, mesh: DeviceMesh) -> object:
        y, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        if isinstance(y, DTensor):
            y = y.redistribute(placements=self.output_layouts)
            y = y.to_local()[: self._rows] if self.use_local_output else y
        return (y, *rest) if isinstance(outputs, tuple) else y


def _distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        placement = Shard(0) if key in TABLES else Replicate()
        whole = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
