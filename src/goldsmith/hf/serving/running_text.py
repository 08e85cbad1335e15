"""RunningText: one request while its text grows, and what its client hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from ..model_types import Tokenizer
from ..offload.generation import FiniteLogits, IncrementalText, sampling_config
from .refusals import RequestRefusal
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. temperature 0: always the most likely one. The seed is that of `goldsmith generate`."""

    max_new_tokens: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: int


@dataclass(frozen=True)
class TextRequest:
    """A checked request: the adapter that computes (None: the plain model), the prompt's ids, and how it goes on.

    special   whether special tokens are part of the text
    """

    adapter: str | None
    ids: Sequence[int]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    special: bool = False

    @property
    def tokens(self) -> int:
        """The most tokens that it may have, prompt and text."""
        return len(self.ids) + self.sampling.max_new_tokens


@dataclass(frozen=True)
class Piece:
    """More characters of the text, and the number of tokens so far."""

    text: str
    tokens: int


@dataclass(frozen=True)
class End:
    """The end of the text; `reason` is "stop" or "length". closing: the end token's text, if special tokens count"""

    reason: str
    tokens: int
    closing: str = ""


Event = Piece | End | RequestRefusal


@dataclass
class RunningText:
    """A request with its client's `listener`, which is called from the thread of the steps.

    ids         the prompt and the tokens so far
    prefilled   how many of the prompt's ids the model has seen
    cancelled   set by any thread: nobody waits for the text
    """

    request: TextRequest
    listener: Callable[[Event], None]
    ids: list[int] = field(default_factory=list)
    prefilled: int = 0
    cancelled: bool = False
    ended: bool = False

    def begin(self, model: PreTrainedModel, tokenizer: Tokenizer) -> None:
        """Prepares sampling and decoding, in the thread of the steps."""
        request, wish = self.request, self.request.sampling
        self.ids, self._tokenizer = list(request.ids), tokenizer
        config, self._stop_ids = sampling_config(
            model, tokenizer, max_new_tokens=wish.max_new_tokens, temperature=wish.temperature, top_p=wish.top_p,
            top_k=wish.top_k,
        )  # fmt: skip
        self._text = IncrementalText(tokenizer, request.ids, special=request.special)
        self._stops = StopStrings(request.stop)
        self._choice = TokenChoice(model, config, len(self.ids), wish)

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - len(self.request.ids)

    def next_token(self, logits: Tensor) -> int:
        """The next token, from float32 logits [1, vocabulary]."""
        return self._choice(self.ids, logits)

    @property
    def greedy(self) -> bool:
        """Whether the next token is that of the largest logit, whatever came before."""
        return self._choice.greedy

    def add(self, token: int) -> None:
        """Adds a token, tells the client, and ends the text if it is complete."""
        self.ids.append(token)
        at_stop = token in self._stop_ids
        piece = self._text.add(token)
        complete = at_stop or self.new_tokens >= self.request.sampling.max_new_tokens
        if complete:
            piece += self._text.end()
        closing = self._token_text(token) if at_stop and self.request.special else ""
        text = self._stops.add(piece.removesuffix(closing))
        if complete:
            text += self._stops.end()
        if text:
            self.listener(Piece(text, self.new_tokens))
        if complete or self._stops.found:
            self.ended = True
            self.listener(End("stop" if at_stop or self._stops.found else "length", self.new_tokens, closing))

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def fail(self, refusal: RequestRefusal) -> None:
        if not self.ended:
            self.ended = True
            self.listener(refusal)


class TokenChoice:
    """Chooses tokens as `model.generate` does, with a random generator of its own."""

    def __init__(self, model: PreTrainedModel, config: Any, length: int, wish: Sampling) -> None:
        device = model.device
        whole = cast("Any", model)
        config, _ = whole._prepare_generation_config(config)
        whole._prepare_special_tokens(config, True, device=device)
        config.max_length = length + wish.max_new_tokens
        self._draws = wish.temperature > 0
        self._processors = whole._get_logits_processor(
            config, input_ids_seq_length=length, device=device,
            logits_processor=[FiniteLogits(wish.temperature)] if self._draws else [],
        )  # fmt: skip
        self._generator = torch.Generator(device).manual_seed(wish.seed) if self._draws else None
        self._device = device

    @property
    def greedy(self) -> bool:
        return not self._draws and not self._processors

    def __call__(self, ids: Sequence[int], logits: Tensor) -> int:
        so_far = torch.tensor([ids], device=self._device)
        scores = self._processors(so_far, logits)
        if not self._draws:
            return int(scores.argmax(-1))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))
