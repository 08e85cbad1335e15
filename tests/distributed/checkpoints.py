"""Distributed checkpoints (DCP) of a model whose experts lie on several ranks, for ranks to import."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from goldsmith import experts, mhc, router
from goldsmith.distributed import (
    ExpertParallel,
    average_gradients,
    machine_group,
    shard,
    shared_base,
    sum_in_rank_order,
)

DIM, N = 6, 2


class PackedLayer(nn.Module):
    """Experts with a frozen packed base and LoRA: each token visits its expert 0 and 1."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        base = experts.pack(torch.randn(4, 16, DIM), torch.randn(4, DIM, 8), format="bf16")
        self.experts = experts.Experts(base, experts.LoRA(4, DIM, 8, rank=2))

    def forward(self, h):
        ids = torch.arange(2).expand(*h.shape[:-1], 2)
        return self.experts(h, ids, h.new_ones(ids.shape))


def model_and_optimiser(style):
    torch.manual_seed(1)
    moe = router.OmniMoE(DIM, num_experts=9, k=2, intermediate_size=4)
    blocks = [mhc.HyperConnection(DIM, layer, n=N) for layer in (nn.Linear(DIM, DIM), moe, PackedLayer())]
    model = mhc.HyperStack(blocks)
    if style is not None:
        mesh = init_device_mesh("cpu", (get_world_size(),))
        if style == "experts":
            parallelize_module(moe, mesh, ExpertParallel())
        else:
            for part in (*blocks, model):
                shard(part, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)


def step(model, optimiser, style):
    torch.manual_seed(2)
    x = torch.randn(12, N, DIM)
    if style is not None:
        x = x.tensor_split(get_world_size())[get_rank()]
    model(x).square().mean().backward()
    if style == "experts":
        average_gradients(model.parameters(), init_device_mesh("cpu", (get_world_size(),)))
    optimiser.step()
    optimiser.zero_grad()


def whole(states):
    """{name: the whole tensor} of nested states."""
    found = {}
    for name, value in states.items():
        if isinstance(value, dict):
            found |= {f"{name}/{inner}": t for inner, t in whole(value).items()}
        elif isinstance(value, torch.Tensor):
            found[str(name)] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
    return found


def save(folder, style):
    model, optimiser = model_and_optimiser(style)
    step(model, optimiser, style)
    model_state, optimiser_state = get_state_dict(model, optimiser)
    dcp.save({"model": model_state, "optimiser": optimiser_state}, checkpoint_id=folder)
    return whole({"model": model_state, "optimiser": optimiser_state})


def load(folder, style):
    """The states of a fresh model after it has loaded the checkpoint."""
    model, optimiser = model_and_optimiser(style if is_initialized() else None)
    model_state, optimiser_state = get_state_dict(model, optimiser)
    states = {"model": model_state, "optimiser": optimiser_state}
    dcp.load(states, checkpoint_id=folder, no_dist=not is_initialized())
    set_state_dict(model, optimiser, model_state_dict=states["model"], optim_state_dict=states["optimiser"])
    model_state, optimiser_state = get_state_dict(model, optimiser)
    return whole({"model": model_state, "optimiser": optimiser_state})


def shared_experts(x, dy):
    """y, the LoRA's summed gradients, and the files in memory that this rank maps, of experts with one packed copy."""
    torch.manual_seed(3)
    weights = torch.randn(4, 16, DIM), torch.randn(4, DIM, 8)
    made = []

    def make():
        made.append(get_rank())
        return experts.pack(*weights, format="int8", partitions=2)

    base = shared_base(make, machine_group())
    layer = experts.Experts(base, experts.LoRA(4, DIM, 8, rank=2))
    own, down = (t.tensor_split(get_world_size())[get_rank()] for t in (x, dy))
    ids = torch.arange(2).expand(len(own), 2)
    y = layer(own, ids, own.new_ones(ids.shape))
    y.backward(down)
    gradients = [p.grad for p in layer.parameters()]
    sum_in_rank_order(gradients)
    lines = open("/proc/self/maps").read().splitlines()
    files = sorted({tuple(line.split()[3:5]) for line in lines if "goldsmith-experts" in line})
    return made, y.detach(), gradients, files, base.nbytes, base.nodes


def failing_experts():
    def make():
        raise OSError("no such weights")

    try:
        shared_base(make, machine_group())
    except OSError as error:
        return str(error)
