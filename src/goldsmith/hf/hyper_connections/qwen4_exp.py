"""Qwen4-Exp's classes with gated residuals. Its streams are flat, [B, S, n*D]."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as plain

from ...mhc import gated_pre, inject
from .calling import is_called
from .class_names import under_its_name
from .stream_forms import alike, widened


@under_its_name
class AppliedQwen4ExpTextGatedResidual(plain.Qwen4ExpTextGatedResidual):
    """mhc.gated_pre with the parameters of transformers' module."""

    def forward(self, hyper_input: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        if any(is_called(part) or not _is_plain(part) for part in self.children()):  # LoRA is a layer of its own
            return super().forward(hyper_input)
        down, up, inject_linear = self.input_mix_weight_down, self.input_mix_weight_up, self.block_inject_weight
        streams = hyper_input.unflatten(-1, (self.hc_count, self.hidden_size))
        gamma = 1.0 + widened(self.hc_norm.weight)
        weights = None if inject_linear is None else inject_linear.weight
        outputs = gated_pre(streams, gamma, down.weight, up.weight, weights, rms_eps=self.hc_norm.eps)
        return outputs if isinstance(outputs, Tensor) else (outputs[0], hyper_input, outputs[1])


@under_its_name
class AppliedQwen4ExpTextDecoderLayer(plain.Qwen4ExpTextDecoderLayer):
    """Attention and experts, each between mhc.gated_pre and mhc.inject."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        conv_mask: Tensor | None = None,
        past_key_values: Any = None,
        ple_input_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.ple is not None:
            hidden_states = hidden_states + self.ple(hidden_states, ple_input_ids, past_key_values, conv_mask=conv_mask)
        h, streams, weights = self.attn_hyper_connection(hidden_states)
        if self.layer_type == "linear_attention":
            f = self.linear_attn(h, cache_params=past_key_values, attention_mask=conv_mask, **kwargs)
        else:
            f, _ = self.self_attn(
                h, position_embeddings, attention_mask=attention_mask, past_key_values=past_key_values, **kwargs
            )
        h, streams, weights = self.mlp_hyper_connection(_injected(streams, f, weights))
        return _injected(streams, self.mlp(h), weights)


def _injected(streams: Tensor, f: Tensor, weights: Tensor) -> Tensor:
    x, f = alike(streams.unflatten(-1, (weights.shape[-1], -1)), f)
    return inject(x, f, widened(weights)).flatten(-2)


def _is_plain(part: nn.Module) -> bool:
    return type(part) in (nn.Linear, plain.Qwen4ExpTextRMSNorm)
