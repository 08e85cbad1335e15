"""A transformers model under transformers' own expert parallelism, for ranks to import."""

import torch
from torch.distributed.tensor import DTensor

PATH = "model.layers.0.mlp"
TRAINED = (f"{PATH}.gate.weight", f"{PATH}.experts.gate_up_proj", f"{PATH}.experts.down_proj")


def step(folder, implementation, embeds, dy, *weights):
    """Logits, and the gradients of the inputs, router and experts of the first layer, on ranks with one batch."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import goldsmith.hf  # noqa: F401  registers the experts implementation

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="goldsmith",
        distributed_config=DistributedConfig(tp_size=2, ep_size=2, ep_implementation=implementation),
    )
    parameters = dict(model.named_parameters())
    local = [parameters[name] for name in TRAINED[1:]]
    assert all(isinstance(p, DTensor) and p.to_local().shape[0] == p.shape[0] // 2 for p in local)
    embeds = embeds.requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    logits.backward(dy)
    gradients = [embeds.grad, *(parameters[name].grad for name in TRAINED)]
    return (logits.detach(), *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients))
