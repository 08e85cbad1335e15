"""The model, and the ways to compute its hyper-connections."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as plain
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

import goldsmith.hf as hf

Step = Callable[..., Any]  # called as the model


def model(dim: int, layers: int, experts: int, dtype: torch.dtype, device: str) -> nn.Module:
    """DeepSeek-V4 with fewer layers, experts and words; every size that is not `dim` is a share of it, as there."""
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    config = DeepseekV4Config(
        vocab_size=8 * dim,
        hidden_size=dim,
        num_hidden_layers=layers,
        num_attention_heads=max(dim // 64, 2),
        head_dim=max(dim // 8, 16),
        q_lora_rank=dim // 4,
        o_lora_rank=dim // 4,
        o_groups=2 if dim < 512 else 8,
        moe_intermediate_size=dim // 2,
        n_routed_experts=experts,
        index_n_heads=max(dim // 64, 2),
        index_head_dim=max(dim // 32, 16),
        layer_types=[kinds[layer % 2] for layer in range(layers)],
        mlp_layer_types=["moe"] * layers,
    )
    torch.manual_seed(0)
    with torch.device(device):
        made = plain.DeepseekV4ForCausalLM(config)
    kept = tuple(made._keep_in_fp32_modules_strict or ())
    for name, parameter in made.named_parameters():  # as from_pretrained loads a checkpoint
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    return made.train()


def _plain(made: nn.Module) -> Step:
    return made


def _compiled(made: nn.Module) -> Step:
    return torch.compile(made)


def _goldsmith(made: nn.Module) -> Step:
    hf.apply(made)
    return made


def _goldsmith_compiled(made: nn.Module) -> Step:
    hf.apply(made)
    return torch.compile(made)


def _liger(made: nn.Module) -> Step:
    for layer in made.modules():
        if type(layer) is plain.DeepseekV4DecoderLayer:
            layer.__class__ = LigerLayer
    return made


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "plain": _plain,
    "compiled": _compiled,
    "liger": _liger,
    "goldsmith": _goldsmith,
    "goldsmith-compiled": _goldsmith_compiled,
}
OURS = ("goldsmith", "goldsmith-compiled")
NOTES = {"liger": "Liger has no patch for these layers: its functions, phi in bfloat16; the head is transformers'"}


def missing(way: str, device: str) -> str | None:
    """Why a way cannot run here, or None."""
    if way != "liger":
        return None
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    return None if device.startswith("cuda") else "its kernels need a GPU"


class LigerLayer(plain.DeepseekV4DecoderLayer):
    """A layer whose connections are Liger's functions."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        x, post, residual = _entered(self.attn_hc, hidden_states)
        f = self.self_attn(self.input_layernorm(x), **kwargs)[0]
        streams = _left(hidden_states, f, post, residual)
        x, post, residual = _entered(self.ffn_hc, streams)
        return _left(streams, self.mlp(self.post_attention_layernorm(x), input_ids=input_ids), post, residual)


def _entered(connection: Any, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_pre

    h_pre, h_post, h_res = liger_mhc_coeffs(
        streams, connection.fn.mT.contiguous().bfloat16(), connection.base.float(), *connection.scale.float().unbind(),
        tmax=connection.hc_sinkhorn_iters, rms_eps=connection.input_norm.eps, pre_eps=connection.hc_eps,
        sinkhorn_eps=connection.hc_eps, post_mult=2.0, allow_fp32=streams.dtype == torch.float32,
    )  # fmt: skip
    return liger_mhc_pre(streams, h_pre), h_post, h_res.mT.contiguous()


def _left(streams: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_mhc_post_res

    return liger_mhc_post_res(streams, f, h_post, h_res)
