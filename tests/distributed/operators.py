"""Operators by name, as functions that ranks can import."""

import torch
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import interpreted_products
from goldsmith import Op
from goldsmith.cli.verify.rank_targets import OperatorOnRanks


def function_of(op):
    """A function of the operator's inputs and options, which ranks load by its name."""
    return OperatorOnRanks(op.name)


def results_that_depend_on_the_sharding(name, values, backend, device):
    """Names of the results of which a token has other bits if the tokens are sharded."""
    op = Op.get(name)
    mesh = init_device_mesh(device, (get_world_size(),))
    tensors = [values.get(n) for n in op.inputs]
    tensors = [t if t is None else t.to(device) for t in tensors]
    options = {n: values[n] for n in op.options}
    whole = op.all_results(*tensors, backend=backend, **options)
    placed = [
        t if t is None else distribute_tensor(t, mesh, [Shard(0) if op.axes[n].per_token else Replicate()])
        for n, t in zip(op.inputs, tensors, strict=True)
    ]
    parts = op.all_results(*placed, backend=backend, **options)
    tokens = [n for n in parts if op.axes[n].per_token]
    return [n for n in tokens if not torch.equal(parts[n].full_tensor(), whole[n])]


def results_of_kernels_that_depend_on_the_sharding(name, values):
    """The same for Triton kernels in the interpreter, which computes on the CPU."""
    with interpreted_products.by_element():
        return results_that_depend_on_the_sharding(name, values, "triton", "cpu")


def total(x):
    """A sum over the tokens of all ranks, as a function of DTensors."""
    return {"total": x.square().sum(0)}


def own_total(x):
    """The same without the reduction."""
    local = x.to_local().square().sum(0)
    return {"total": DTensor.from_local(local, x.device_mesh, [Replicate()], run_check=False)}
