"""Types of the objects from transformers: a model's text config, a tokenizer, an experts module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypedDict, cast, overload

from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as BackendTokenizer
    from transformers import PreTrainedModel


class TextConfig(Protocol):
    """The sizes that every text model's config has."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    layer_types: list[str]


def text_config(model: PreTrainedModel) -> TextConfig:
    """The config of the model's text part, which in a multimodal model is nested in the whole config."""
    return cast("TextConfig", model.config.get_text_config())


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model, unwrapped if it is a PeftModel."""
    return cast(
        "PreTrainedModel", cast("PeftModel", model).get_base_model() if hasattr(model, "get_base_model") else model
    )


class Encoding(TypedDict):
    """One tokenized text."""

    input_ids: list[int]
    offset_mapping: list[tuple[int, int]]


class Encodings(TypedDict):
    """Several tokenized texts."""

    input_ids: list[list[int]]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that goldsmith uses."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | None
    all_special_tokens: list[str]
    backend_tokenizer: BackendTokenizer

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]: ...

    @overload
    def __call__(self, text: str, *, verbose: bool = ..., **options: bool) -> Encoding: ...

    @overload
    def __call__(self, text: list[str], *, verbose: bool = ..., **options: bool) -> Encodings: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: object,
    ) -> str: ...

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


class ExpertsModule(Protocol):
    """An experts module of transformers: its weights in one tensor for all experts, its flags, its gate."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    gate_up_proj_bias: nn.Parameter
    down_proj_bias: nn.Parameter
    has_bias: bool
    is_transposed: bool
    act_fn: nn.Module

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...
