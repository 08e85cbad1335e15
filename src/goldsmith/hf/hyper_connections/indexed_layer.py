"""The layer of GLM-5 and HY-V4, whose attention hands the tokens that it chose to the next layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .stream_forms import StreamConnection, through

if TYPE_CHECKING:

    class _Layer(nn.Module):
        """Attributes of transformers' layers."""

        input_layernorm: nn.Module
        self_attn: nn.Module
        post_attention_layernorm: nn.Module
        mlp: nn.Module
        attn_hc: StreamConnection
        ffn_hc: StreamConnection

else:
    _Layer = nn.Module


class IndexedLayer(_Layer):
    """Attention and MLP, each in a connection with a joint backward; a mixin for transformers' class."""

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
            if getattr(self, "block_type", None) == "linear_attention":
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
