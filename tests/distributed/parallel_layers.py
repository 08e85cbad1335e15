"""Layers with experts, and gradients, on ranks that have different batches, for ranks to import."""

import torch
from torch import nn
from torch.distributed import all_gather_object, get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from distributed.models import TABLES
from goldsmith import mhc, router
from goldsmith.distributed import ExpertParallel, average_gradients, clip_grad_norm, shard, sum_in_rank_order


def gathered(value):
    """The tensors of all ranks, one behind the other."""
    whole = [None] * get_world_size()
    all_gather_object(whole, value.detach())
    return torch.cat(whole)


def layer_of(parameters, **options):
    """OmniMoE with these router and expert tables."""
    sizes = len(parameters[0]), len(parameters[1])
    layer = router.OmniMoE(parameters[0].shape[1], sizes, 2, intermediate_size=0, **options)
    layer.load_state_dict(dict(zip(TABLES, parameters, strict=True)))
    return layer


def batches_of_different_lengths(h, dy, *parameters):
    """Each rank has one row [1, tokens, dim], of another length; the layer is called by keyword."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    layer = parallelize_module(layer_of(parameters), mesh, ExpertParallel())
    own, down = (t.tensor_split(get_world_size())[get_rank()].unsqueeze(0) for t in (h, dy))
    y, routing = layer(h=own, return_router=True)
    assert [t.shape[:2] for t in routing] == [own.shape[:2]] * 4
    assert not any(isinstance(t, DTensor) for t in (y, *routing))
    y.backward(down)
    tables = dict(layer.named_parameters())
    return (gathered(y[0]), *(tables[name].grad.full_tensor() for name in TABLES))


def over_two_dimensions(h, dy, *parameters):
    """Experts over "ep", FSDP2 over "dp", and different tokens on all ranks; FSDP2 takes the mean."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    layer = parallelize_module(layer_of(parameters), mesh["ep"], ExpertParallel())
    shard(layer, mesh=mesh["dp"])
    own, down = (t.tensor_split(get_world_size())[get_rank()] for t in (h, dy))
    y = layer(own)
    y.backward(down * get_world_size())
    tables = dict(layer.named_parameters())
    return (gathered(y), *(tables[name].grad.full_tensor() for name in TABLES))


def refusals():
    """The messages of calls that make no sense, as (class, text)."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    dim = 4

    def layer(**options):
        return router.OmniMoE(dim, 9, 2, intermediate_size=0, **options)

    def run(module, rows, **options):
        return parallelize_module(module, mesh, ExpertParallel(**options))(torch.ones(rows, dim))

    def on_one_rank_only():
        weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        if get_rank() == 0:
            weight.grad = torch.zeros_like(weight)
        average_gradients([weight], mesh)

    calls = {
        "no_placement": lambda: ExpertParallel(input_layouts="rows"),
        "two_dimensions": lambda: parallelize_module(layer(), init_device_mesh("cpu", (1, 2)), ExpertParallel()),
        "zeros_in_a_norm": lambda: run(layer(router_norm="batch"), 2 + get_rank()),
        "other_output": lambda: run(layer(), 2 + get_rank(), output_layouts=Replicate()),
        "other_axes": lambda: parallelize_module(layer(), mesh, ExpertParallel())(torch.ones(*(2,) * get_rank(), dim)),
        "same_ranks": lambda: shard(parallelize_module(layer(), mesh, ExpertParallel()), mesh=mesh),
        "sparse_fsdp": lambda: shard(layer(sparse_grad=True), mesh=mesh),
        "policy": lambda: shard(layer(), mesh=mesh, mp_policy="bfloat16"),
        "one_rank_only": on_one_rank_only,
        "other_parameters": lambda: average_gradients([nn.Parameter(torch.ones(2 + get_rank()))], mesh),
        "no_mesh": lambda: average_gradients([], mesh.get_group()),
        "other_sizes": lambda: sum_in_rank_order([torch.ones(3 + get_rank())]),
        "other_number": lambda: sum_in_rank_order([torch.ones(3)] * get_rank()),
        "no_tensors": lambda: clip_grad_norm({"a": 1}, 1.0),
        "named_parameters": lambda: average_gradients(nn.Linear(2, 2).named_parameters(), mesh),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            messages[name] = (type(error).__name__, str(error))
    return messages


def mean_of_used_parameters(values, unused):
    """The mean over ranks of gradients that only rank 0 has."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    parameters = [nn.Parameter(torch.zeros_like(v)) for v in (*values, unused)]
    for parameter, value in zip(parameters, values, strict=False):
        if get_rank() == 0:
            parameter.grad = value.clone()
    average_gradients(parameters, mesh)
    assert parameters[-1].grad is None
    return [parameter.grad for parameter in parameters[:-1]]


def norm_of_all_kinds(norm_type, *gradients):
    """The norm, and the clipped gradients, of plain, sparse, sharded, replicated and partial gradients."""
    world = get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    parameters = []
    for index, shared in enumerate(gradients):
        gradient = shared.clone()  # the ranks' copies are one memory
        placed = [None, Shard(0), Replicate(), Partial()][index % 4]
        parameter = nn.Parameter(torch.zeros_like(gradient))
        if placed is not None:
            partial = placed.is_partial()
            whole = distribute_tensor(parameter.data, mesh, [Replicate() if partial else placed])
            parameter = nn.Parameter(whole)
            own = gradient / world if partial else distribute_tensor(gradient, mesh, [placed]).to_local()
            gradient = DTensor.from_local(own, mesh, [placed], run_check=False, shape=gradient.shape, stride=(1,))
        elif index:
            gradient = gradient.to_sparse()
        parameter.grad = gradient
        parameters.append(parameter)
    norm = clip_grad_norm(parameters, 1.0, norm_type=norm_type)
    whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad.to_dense() for p in parameters]
    return norm, whole


def loss_of_dtensors(kind, x, y, indices):
    """The loss of sharded logits, its gradients, and the counts of sharded indices."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    leaves = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (x, y)]
    placed = distribute_tensor(indices, mesh, [Shard(0)])
    loss = router.load_balance_loss(*leaves, placed, kind=kind)
    loss.backward()
    counts = router.usage(placed, x.shape[-1] * y.shape[-1]).counts
    assert torch.equal(counts, router.usage(indices, x.shape[-1] * y.shape[-1]).counts)
    return (loss.full_tensor().detach(), *(leaf.grad.full_tensor() for leaf in leaves))


def most_unsharded_at_once(style):
    """Elements of blocks that are unsharded at once, at most, and those of the largest block, in a forward."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = [mhc.HyperConnection(8, nn.Linear(8, 8), n=2) for _ in range(4)]
    size = max(sum(p.numel() for p in block.parameters()) for block in blocks)
    model = mhc.HyperStack(blocks) if style == "stack" else nn.Sequential(*blocks)
    for part in (*blocks, model):
        shard(part, mesh=mesh, mp_policy=policy)
    seen = []

    def count(*_):
        seen.append(sum(p.numel() for block in blocks for p in block.parameters() if not isinstance(p, DTensor)))

    for block in blocks:
        block.layer.register_forward_hook(count)
    x = torch.randn(3, 2, 8)
    model(x).sum().backward()
    left = sum(not isinstance(p, DTensor) for p in model.parameters())
    return max(seen), size, len(seen), left
