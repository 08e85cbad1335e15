"""experts.moe under transformers' expert parallel plan: logits and gradients are certified against the plain model."""

import functools

import pytest

pytest.importorskip("transformers", reason="comes with the extra hf")

import torch

from cli.finetune_tools import tiny_model
from distributed import expert_parallel_models as ep
from distributed.test_modules import certify
from hf import goldens


@pytest.mark.parametrize("implementation", ["all_reduce", "all_to_all"])
def test_both_ways_to_reach_the_experts_are_certified(implementation, pools, tmp_path):
    plain = tiny_model(num_hidden_layers=1, num_key_value_heads=2)
    plain.save_pretrained(tmp_path)
    wide = goldens.InItsDtype(plain)

    def golden(embeds, dy, *weights):
        leaves = [t.detach().requires_grad_() for t in (embeds, *weights)]
        with torch.enable_grad():
            logits = wide.logits(leaves[0], dict(zip(ep.TRAINED, leaves[1:], strict=True)))
            return (logits.detach(), *torch.autograd.grad(logits, leaves, dy))

    torch.manual_seed(0)
    values = {"x": torch.randn(1, 5, 32), "dy": torch.randn(1, 5, plain.config.vocab_size)}
    values |= {f"weight{k}": plain.get_parameter(name).detach() for k, name in enumerate(ep.TRAINED)}
    step = functools.partial(ep.step, str(tmp_path), implementation)
    certify(pools(2), step, golden, values, ("x", "router", "gate_up", "down"))
