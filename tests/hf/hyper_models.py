"""Tiny models of every family with hyper-connections, and their steps, plain and on ranks."""

import torch
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import tiny_models
from goldsmith import assay
from goldsmith.assay.declare.case import Case
from hf import goldens

EXPERTS = 2  # all are chosen for every token, and the indexers choose all tokens: rounding changes no decision
# without Qwen4's linear attention: it is the same code in both models, and slow to bound
PROVABLE = {"qwen4_exp_text": {"layer_types": ["full_attention"] * 2}}
# features of n-grams, added to Qwen4's streams. They take roots of numbers near 0, so gradients there are not compared
PLE = {"ple_layer_ids": [1], "ngram_vocab_size_base": 20, "heads_per_ngram": 2, "split_ngram_parts": 1}
FAMILIES = {
    "deepseek_v4": {"n_routed_experts": EXPERTS, "mlp_layer_types": ["hash_moe", "moe"]},
    "glm5_next": {"text_config": {"n_routed_experts": EXPERTS}},
    "hy_v4": {"n_routed_experts": EXPERTS},
    "qwen4_exp_text": {"num_experts": EXPERTS, "hc_lowrank": 6, "indexer_budget": 64},
}
PRESENT = [family for family in FAMILIES if family in tiny_models.model_types()]


def model(family, **changes):
    """A tiny model in which the streams differ and every weight of the hyper-connections matters."""
    made = tiny_models.tiny_model(family, **(FAMILIES[family] | changes))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    made.set_experts_implementation("eager")
    return made


def in_bfloat16(made):
    """As from_pretrained loads it: some weights stay in float32."""
    kept = tuple(made._keep_in_fp32_modules_strict or ())
    for name, parameter in made.named_parameters():
        if not any(part in name.split(".") or part in name for part in kept):
            parameter.data = parameter.data.bfloat16()
    return made


def ids(rows=2, length=5):
    return torch.randint(3, 48, (rows, length), generator=torch.Generator().manual_seed(2))


def trained(made):
    """{name: parameter} of the parameters that text reaches."""
    made(ids(), use_cache=False).logits.float().sum().backward()
    names = {name: p.detach() for name, p in made.named_parameters() if p.grad is not None}
    made.zero_grad()
    return names


def target(ours, theirs, name, device="cpu"):
    """The logits and the gradients of all parameters of one model on a device, against another's in float64."""
    wide, paths, inputs = goldens.InItsDtype(theirs), trained(theirs), {"input_ids": ids(), "use_cache": False}
    values = {path.replace(".", "__"): value for path, value in paths.items()}  # the assay binds by identifiers
    dtype = theirs.get_input_embeddings().weight.dtype
    ours, there = ours.to(device), inputs | {"input_ids": ids().to(device)}

    def candidate(**weights):
        weights = {path: weights[path.replace(".", "__")].to(device) for path in paths}
        return torch.func.functional_call(ours, weights, (), there, tie_weights=False).logits.cpu()

    def golden(**weights):
        weights = {path: weights[path.replace(".", "__")] for path in paths}
        doubled = all(w.dtype == torch.float64 for w in weights.values())
        return wide.outputs(torch.float64 if doubled else dtype, weights, inputs).logits

    return assay.Target(
        candidate,
        golden,
        cases=[Case("logits", lambda make: values, {})],
        dtypes=(dtype,),
        compute=None if dtype == torch.float32 else dtype,
        name=name,
    )


def gradients_target(gradients, theirs, name):
    """The gradients that ranks returned, against one process's gradients of the mean of the rows' losses."""
    wide, paths = goldens.InItsDtype(theirs), trained(theirs)
    names = {path: path.replace(".", "__") for path in paths}

    def golden(**weights):
        leaves = {path: weights[name].detach().requires_grad_() for path, name in names.items()}
        inputs = [{"input_ids": row, "labels": row, "use_cache": False} for row in ids().chunk(2)]
        with torch.enable_grad():
            dtype = weights[next(iter(names.values()))].dtype
            loss = sum(wide.outputs(dtype, leaves, one).loss for one in inputs) / len(inputs)
            found = torch.autograd.grad(loss, list(leaves.values()))
        return {f"d_{name}": gradient for name, gradient in zip(names.values(), found, strict=True)}

    return assay.Target(
        lambda **_: {f"d_{name}": gradients[path] for path, name in names.items()},
        golden,
        cases=[Case("gradients", lambda make: {name: paths[path] for path, name in names.items()}, {})],
        dtypes=(torch.float32,),
        backward=None,
        name=name,
    )


def step(made, inputs):
    """The loss and the gradients of one training step."""
    made.zero_grad()
    loss = made(inputs, labels=inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}


def sharded_step(family):
    """The gradients of one step of an applied model on ranks, each with a row of the batch, under FSDP2."""
    import goldsmith.hf as hf

    made = model(family)
    hf.apply(made)
    mesh = init_device_mesh("cpu", (get_world_size(),))
    for layer in made.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    inputs = ids().chunk(get_world_size())[get_rank()]
    made(inputs, labels=inputs, use_cache=False).loss.backward()
    return {name: p.grad.full_tensor() for name, p in made.named_parameters() if p.grad is not None}
