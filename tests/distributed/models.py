"""One training step of a small model with hyper-connections, plain and parallel, for ranks to import."""

import torch
from torch import nn
from torch.distributed import all_gather_object, get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from goldsmith import experts, mhc, router
from goldsmith.distributed import ExpertParallel, shard

DIM, N, LAYERS = 6, 2, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def plain_step(x, dy, *parameters):
    """y and the gradients of all parameters, by the formulas; any float dtype."""
    leaves = [p.detach().requires_grad_() for p in parameters]
    with torch.enable_grad():
        y = x
        for fn, base, scale, weight in zip(*[iter(leaves)] * 4, strict=True):
            h, h_post, h_res = mhc.pre(y, fn, scale, base, backend="reference")
            y = mhc.post(y, h @ weight.T, h_post, h_res, backend="reference")
        gradients = torch.autograd.grad(y, leaves, dy)
    return (y.detach(), *gradients)


def parallel_step(style, x, dy, *parameters):
    """The same on ranks: `style` is one of fsdp, fsdp_bf16, shard_bf16, sequence, and may end in stack or recompute."""
    model = _model(parameters, recompute="recompute" in style)
    connections = list(model.connections) if isinstance(model, mhc.HyperStack) else list(model)
    model = mhc.HyperStack(connections) if "stack" in style else model
    mesh = init_device_mesh("cpu", (get_world_size(),))
    if style.startswith("sequence"):
        model = distribute_module(model, mesh)
        placed = distribute_tensor(x, mesh, [Shard(0)])
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if "compile" in style else model
        y = run(placed)
        y.backward(distribute_tensor(dy, mesh, y.placements))
    else:
        if style.startswith("shard_bf16"):
            for connection in connections:
                shard(connection, mesh=mesh, mp_policy=BF16)
            shard(model, mesh=mesh, mp_policy=BF16)
        else:
            policy = {"mp_policy": BF16} if "bf16" in style else {}
            for connection in connections:
                fully_shard(connection, mesh=mesh, **policy)
            fully_shard(model, mesh=mesh, **policy)
        rows = x.chunk(get_world_size())[get_rank()]
        y = model(rows)
        # FSDP takes the mean over ranks
        y.backward(dy.chunk(get_world_size())[get_rank()].to(y.dtype) * get_world_size())
        y = DTensor.from_local(y, mesh, [Shard(0)])
    gradients = [p.grad.full_tensor() for c in connections for p in (c.fn, c.base, c.scale, c.layer.weight)]
    return (y.full_tensor().detach(), *(g.float() for g in gradients))


def _model(parameters, *, recompute):
    blocks = []
    for fn, base, scale, weight in zip(*[iter(parameters)] * 4, strict=True):
        block = mhc.HyperConnection(DIM, nn.Linear(DIM, DIM, bias=False), n=N, recompute=recompute)
        values = {"fn": fn, "base": base, "scale": scale, "layer.weight": weight}
        block.load_state_dict({name: value.float() for name, value in values.items()})
        blocks.append(block)
    return nn.Sequential(*blocks)


TABLES = ("router_x.weight", "router_y.weight", "w_in", "w_out")


def plain_experts(h, dy, *parameters):
    leaves = [p.detach().requires_grad_() for p in parameters]
    with torch.enable_grad():
        x, y = (torch.nn.functional.layer_norm(h @ w.T, w.shape[:1], eps=1e-5) for w in leaves[:2])
        weights, indices = router.product_topk(x, y, 2, weights="softmax", backend="reference")
        out = router.atomic_experts(h, *leaves[2:], weights, indices, backend="reference")
        gradients = torch.autograd.grad(out, leaves, dy)
    return (out.detach(), *gradients)


def parallel_experts(h, dy, *parameters):
    """OmniMoE with its experts and its tokens spread over the same ranks."""
    layer = router.OmniMoE(h.shape[-1], len(parameters[2]), 2, intermediate_size=0)
    layer.load_state_dict(dict(zip(TABLES, parameters, strict=True)))
    mesh = init_device_mesh("cpu", (get_world_size(),))
    layer = parallelize_module(layer, mesh, ExpertParallel())
    own, down = (t.tensor_split(get_world_size())[get_rank()] for t in (h, dy))
    y = layer(own)
    y.backward(down)
    whole = [None] * get_world_size()
    all_gather_object(whole, y.detach())
    tables = dict(layer.named_parameters())
    gradients = [tables[name].grad.full_tensor() for name in TABLES]
    return (torch.cat(whole), *gradients)


class RoutedExperts(nn.Module):
    """experts.moe with trained weights; the router is elsewhere."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    def forward(self, h, ids, weights):
        return experts.moe(h, ids, weights, (self.gate_up, self.down))


def plain_moe(ids, h, dy, weights, gate_up, down):
    leaves = [t.detach().requires_grad_() for t in (h, weights, gate_up, down)]
    with torch.enable_grad():
        y = experts.moe(leaves[0], ids, leaves[1], tuple(leaves[2:]), backend="reference")
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def parallel_moe(ids, h, dy, weights, gate_up, down):
    mesh = init_device_mesh("cpu", (get_world_size(),))
    layer = parallelize_module(RoutedExperts(gate_up, down), mesh, ExpertParallel())
    own_ids, h, down_gradient, weights = (t.tensor_split(get_world_size())[get_rank()] for t in (ids, h, dy, weights))
    h, weights = h.requires_grad_(), weights.requires_grad_()
    y = layer(h, own_ids, weights)
    y.backward(down_gradient)
    whole = [None] * get_world_size()
    all_gather_object(whole, (y.detach(), h.grad, weights.grad))
    return (*map(torch.cat, zip(*whole, strict=True)), *(p.grad.full_tensor() for p in layer.parameters()))


def plain_loss(kind, x, y, indices):
    leaves = [x.detach().requires_grad_(), y.detach().requires_grad_()]
    with torch.enable_grad():
        loss = router.load_balance_loss(*leaves, indices, kind=kind)
    return (loss.detach(), *torch.autograd.grad(loss, leaves))


def parallel_loss(kind, x, y, indices):
    """The loss of all ranks' tokens, and its gradients with the mean that DDP takes."""
    own = [t.tensor_split(get_world_size())[get_rank()] for t in (x, y, indices)]
    leaves = [t.detach().requires_grad_() for t in own[:2]]
    mesh = init_device_mesh("cpu", (get_world_size(),))
    loss = router.load_balance_loss(*leaves, own[2], kind=kind, group=mesh)
    gradients = [g / get_world_size() for g in torch.autograd.grad(loss, leaves)]
    return (
        loss.detach(),
        *(
            DTensor.from_local(g, mesh, [Shard(0)], shape=w.shape, stride=w.stride()).full_tensor()
            for g, w in zip(gradients, (x, y), strict=True)
        ),
    )


def counts(indices, num_experts, weights):
    own = [t.tensor_split(get_world_size())[get_rank()] for t in (indices, weights)]
    usage = router.usage(own[0], num_experts, weights=own[1], group=init_device_mesh("cpu", (get_world_size(),)))
    return usage.counts, usage.mass
