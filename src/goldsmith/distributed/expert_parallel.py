"""A parallel style that spreads the experts of a layer over the ranks of a mesh dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

TABLES = {"w_in", "w_out", "gate_up", "down", "gate_up_bias", "down_bias"}  # parameters whose first axis counts experts
SUMMED = "_goldsmith_summed_ranks"  # attribute of a layer: over how many ranks its gradients are sums
MOST_AXES = 7  # of h, without its last


class ExpertParallel(ParallelStyle):
    """Every rank computes its own experts for the tokens of all ranks; to be used with `parallelize_module`

    The tables of experts become `Shard(0)` over the mesh, other parameters `Replicate()`. The forward gathers the
    tokens of the mesh once, every rank skips the experts of others, and the outputs are summed in one reduction. A
    gradient of a table stays on the rank that has it.

        parallelize_module(model, mesh["ep"], {"layers.*.moe": ExpertParallel()})

    input_layouts   the placement of the plain tensors that the layer receives, h and then others with the same leading
                    axes, such as ids and weights: Shard(0) or Shard(1) if every rank has its own tokens (data x expert
                    parallelism), Replicate() if all have the same
    output_layouts  how y is returned; by default like h
    use_local_output  whether results are plain tensors, this rank's part, or DTensors
    equal_tokens    whether all ranks always have h of one shape. By default they tell each other at every call, for
                    which a GPU has to wait, and shorter ranks add tokens of zeros

    Raises TypeError for a layout that is no placement, and ValueError for a layer without experts, a mesh of several
    dimensions, or tokens of zeros that would change a result; then on all ranks.
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
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, Placement):
                raise TypeError(
                    f"distributed.ExpertParallel: {name}={layout!r}, expected Shard(0), Shard(1) or Replicate() of "
                    "torch.distributed.tensor"
                )
        self.input_layouts = (input_layouts or Shard(0),)
        self.output_layouts = (output_layouts or self.input_layouts[0],)
        self.use_local_output, self.equal_tokens = use_local_output, equal_tokens
        self._own: torch.Size = torch.Size()  # leading axes of this rank's h, in the call that is running
        self._padded = False  # whether a rank has added tokens in it

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not any(name in TABLES for name, _ in module.named_parameters(recurse=False)):
            raise ValueError(
                f"distributed.ExpertParallel: {type(module).__name__} has none of the parameters "
                f"{', '.join(sorted(TABLES))}; expected a layer with experts, such as router.OmniMoE"
            )
        if device_mesh.ndim != 1:
            raise ValueError(
                f"distributed.ExpertParallel: {device_mesh} has {device_mesh.ndim} dimensions, expected one of them, "
                'such as mesh["ep"]'
            )
        distribute_module(module, device_mesh, _distribute)
        setattr(module, SUMMED, device_mesh.size() if self.input_layouts[0].is_shard() else 1)

        def receive(
            layer: nn.Module, inputs: tuple[object, ...], named: dict[str, object]
        ) -> tuple[object, dict[str, object]]:
            return self._receive(layer, inputs, named, device_mesh)

        module.register_forward_pre_hook(receive, with_kwargs=True)
        module.register_forward_hook(lambda layer, inputs, outputs: self._return(outputs))
        return module

    def _receive(
        self, module: nn.Module, inputs: tuple[object, ...], named: dict[str, object], mesh: DeviceMesh
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        h = next((value for value in (*inputs, *named.values()) if isinstance(value, Tensor)), None)
        if h is None or isinstance(h, DTensor):
            self._own, self._padded = torch.Size(), False
            return inputs, named
        self._own = h.shape[:-1]
        wanted = self._leading(module, h, mesh)

        def placed(value: object) -> object:
            if not isinstance(value, Tensor) or isinstance(value, DTensor) or not value.dim():
                return value
            common = _common(value.shape, h.shape[:-1])
            if not common:
                return value
            return DTensor.from_local(_padded(value, wanted[:common]), mesh, self.input_layouts, run_check=False)

        return tuple(map(placed, inputs)), {name: placed(value) for name, value in named.items()}

    def _leading(self, module: nn.Module, h: Tensor, mesh: DeviceMesh) -> torch.Size:
        """The leading axes of h on every rank, with tokens of zeros: the largest size of each axis."""
        own = h.shape[:-1]
        self._padded = False
        if self.equal_tokens or not self.input_layouts[0].is_shard():
            return own
        sizes = [len(own), *own, *(0,) * (MOST_AXES - len(own))]
        most = torch.tensor([*sizes, *(-size for size in sizes)], device=h.device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        largest, smallest = most.tolist()[: len(sizes)], [-size for size in most.tolist()[len(sizes) :]]
        if largest[0] != smallest[0]:
            raise ValueError(
                f"distributed.ExpertParallel: h has {smallest[0] + 1} axes on one rank and {largest[0] + 1} on another"
            )
        self._padded = largest != smallest
        norms = [name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
        if self._padded and module.training and norms:
            raise ValueError(
                f"distributed.ExpertParallel: ranks have different numbers of tokens (h has leading axes {list(own)} "
                f"here), and {norms[0]} would count the zeros that are added; give all ranks equally many"
            )
        if self._padded and (self.output_layouts != self.input_layouts or not self.use_local_output):
            raise ValueError(
                f"distributed.ExpertParallel: ranks have different numbers of tokens (h has leading axes {list(own)} "
                "here), so results need output_layouts like input_layouts, and use_local_output=True"
            )
        return torch.Size(largest[1 : 1 + len(own)])

    def _return(self, outputs: object) -> object:
        y, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        if isinstance(y, DTensor):
            y = self._local(y.redistribute(placements=self.output_layouts))
        # beside y: logits, ids and weights of the tokens, such as a RouterOutput
        return (y, *_mapped(self._beside, rest)) if isinstance(outputs, tuple) else y

    def _beside(self, value: DTensor) -> Tensor:
        return self._local(value.redistribute(placements=self.input_layouts))

    def _local(self, value: DTensor) -> Tensor:
        if not self.use_local_output:
            return value
        own = value.to_local()
        for axis, size in enumerate(self._own if self._padded else ()):
            own = own.narrow(axis, 0, size)
        return own


def _common(shape: torch.Size, leading: torch.Size) -> int:
    """How many leading axes of a tensor are those of the tokens."""
    for count, (size, wanted) in enumerate(zip(shape, leading, strict=False)):
        if size != wanted:
            return count
    return min(len(shape), len(leading))


def _padded(value: Tensor, wanted: torch.Size) -> Tensor:
    """The tensor with zeros behind it, up to these leading axes; they are routed, and have no gradient."""
    for axis, size in enumerate(wanted):
        if value.shape[axis] < size:
            shape = (*value.shape[:axis], size - value.shape[axis], *value.shape[axis + 1 :])
            value = torch.cat((value, value.new_zeros(shape)), axis)
    return value


def _mapped(function: Callable[[DTensor], Tensor], values: object) -> Any:
    """The values with `function` of each DTensor in tuples and lists."""
    if isinstance(values, DTensor):
        return function(values)
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(_mapped(function, value) for value in values))
    if isinstance(values, (tuple, list)):
        return type(values)(_mapped(function, value) for value in values)
    return values


def _distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for key, parameter in list(module.named_parameters(recurse=False)):
        placement = Shard(0) if key in TABLES else Replicate()
        whole = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
