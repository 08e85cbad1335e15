"""DeepSeek-V4's classes with hyper-connections, computed by goldsmith.mhc."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as plain

from .class_names import under_its_name
from .stream_forms import SigmoidHead, SinkhornConnection, through


@under_its_name
class AppliedDeepseekV4HyperConnection(SinkhornConnection, plain.DeepseekV4HyperConnection):
    """mhc.pre with the parameters of transformers' module."""


@under_its_name
class AppliedDeepseekV4HyperHead(SigmoidHead, plain.DeepseekV4HyperHead):
    """mhc.head with the parameters of transformers' module."""


@under_its_name
class AppliedDeepseekV4DecoderLayer(plain.DeepseekV4DecoderLayer):
    """Attention and experts, each between mhc.pre and mhc.post with a joint backward."""

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        def attention(h: Tensor) -> Tensor:
            return self.self_attn(self.input_layernorm(h), **kwargs)[0]

        def mlp(h: Tensor) -> Tensor:
            return self.mlp(self.post_attention_layernorm(h), input_ids=input_ids)

        return through(hidden_states, (self.attn_hc, attention), (self.ffn_hc, mlp))
