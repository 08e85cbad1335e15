"""HY-V4's classes with hyper-connections of the independent form (no matrix between streams)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.hy_v4 import modeling_hy_v4 as plain

from .class_names import under_its_name
from .stream_forms import IndependentConnection, SigmoidHead, through


@under_its_name
class AppliedHYV4HyperConnection(IndependentConnection, plain.HYV4HyperConnection):
    """mhc.independent_pre with the parameters of transformers' module."""


@under_its_name
class AppliedHYV4HyperHead(SigmoidHead, plain.HYV4HyperHead):
    """mhc.head with the parameters of transformers' module."""


@under_its_name
class AppliedHYV4DecoderLayer(plain.HYV4DecoderLayer):
    """Attention and MLP, each between mhc.independent_pre and mhc.inject with a joint backward."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        prev_topk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        topk_indices = None

        def attention(h: Tensor) -> Tensor:
            nonlocal topk_indices
            f, _, topk_indices = self.self_attn(
                hidden_states=self.input_layernorm(h),
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
            return f

        def mlp(h: Tensor) -> Tensor:
            return self.mlp(self.post_attention_layernorm(h))

        return through(hidden_states, (self.attn_hc, attention), (self.ffn_hc, mlp)), topk_indices
