"""GLM-5's classes with hyper-connections, computed by goldsmith.mhc. The head is a mean, which torch computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as plain

from .class_names import under_its_name
from .stream_forms import SinkhornConnection, through


@under_its_name
class AppliedGlm5NextTextHyperConnection(SinkhornConnection, plain.Glm5NextTextHyperConnection):
    """mhc.pre with the parameters of transformers' module."""


@under_its_name
class AppliedGlm5NextTextDecoderLayer(plain.Glm5NextTextDecoderLayer):
    """Attention and MLP, each between mhc.pre and mhc.post with a joint backward."""

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
            h = self.input_layernorm(h)
            if self.block_type == "linear_attention":
                return self.self_attn(
                    hidden_states=h, cache_params=past_key_values, attention_mask=attention_mask, **kwargs
                )
            f, _, topk_indices = self.self_attn(
                hidden_states=h,
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
