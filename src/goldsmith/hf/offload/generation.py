"""Text generation from prompts with `model.generate`, reported piece by piece in whole characters."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.generation.logits_process import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from ..checkpoint.foreign_errors import explained, of_the_model
from ..checkpoint.gguf.files import tokenizer_arguments
from ..model_types import Tokenizer
from ..rotary_lengths import length_types, lengths_forgotten
from .token_loop import draw

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows the first bytes of an incomplete character
FILE = "tokenizer.json"
CONTEXT = 8  # prompt ids decoded together with a piece, so that its leading space is not dropped as a text's start
OnPiece = Callable[[int, str], None]


class NothingToDraw(ArithmeticError):
    """The logits give no probabilities, so no token can be drawn; `scaled`: only after division by the temperature."""

    def __init__(self, text: str, *, scaled: bool) -> None:
        super().__init__(text)
        self.scaled = scaled


@dataclass
class GeneratedText:
    """The text generated for one prompt; finish_reason is "stop", "length" or "interrupted"."""

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "interrupted"


@dataclass
class Generation:
    """All generated texts, with seconds from the call to the first token and to the end."""

    outputs: list[GeneratedText]
    first_token: float | None = None
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float | None:
        """Speed of all rows together, not counting each row's first token."""
        after, rows = self.tokens, sum(bool(output.tokens) for output in self.outputs)
        if self.first_token is None or after <= rows:
            return None
        return (after - rows) / (self.seconds - self.first_token)


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer in a model's folder; raises ValueError if there is none."""
    from transformers import AutoTokenizer

    place, options = tokenizer_arguments(folder)
    there = bool(options) or (place / FILE).is_file()  # a few models have files of other names
    try:
        with explained(f"{folder} has no tokenizer that can be read"):
            tokenizer = cast("Tokenizer", AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options))
        # transformers makes an empty tokenizer if files are missing
        empty = set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
    except ValueError:
        if there:
            raise
        empty = True
    if empty:
        why = "its vocabulary is empty" if there else f"{FILE} is missing"
        raise ValueError(f"{folder} has no tokenizer: {why}")
    return tokenizer


def save_tokenizer(folder: Path, output: Path) -> None:
    """Writes the tokenizer of a model into another folder, if the model has one."""
    try:
        tokenizer = tokenizer_of(folder)
    except ValueError:
        return  # a model without a tokenizer is merged all the same
    cast("Any", tokenizer).save_pretrained(output)


def check_ids(model: PreTrainedModel, highest: int) -> None:
    """Raises ValueError unless the embedding table has a row for each id up to the highest."""
    rows = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    if highest >= rows:
        raise ValueError(
            f"its tokenizer produces the id {highest:,}, but its embedding table has only {rows:,} rows: tokenizer "
            "and weights belong to different models"
        )


def encoded(tokenizer: Tokenizer, prompts: Sequence[str], *, chat: bool = False) -> dict[str, Tensor]:
    """input_ids and attention_mask, padded on the left. Raises ValueError for a prompt without tokens."""
    if chat:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; run without --chat")
        rows = []
        for prompt in prompts:
            rows.append(chat_ids(tokenizer, [{"role": "user", "content": prompt}]))
    else:
        rows = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    for number, row in enumerate(rows, 1):
        if not row:
            raise ValueError(f"prompt {number} is empty, and the tokenizer has no token that begins a text")
    width = max(map(len, rows))
    pad = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device="cpu")
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device="cpu")
    return {"input_ids": ids, "attention_mask": mask}


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a text; an empty text is the token that begins a text, if the tokenizer has one."""
    return _begun(tokenizer, tokenizer(prompt)["input_ids"])


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, object]], **options: object) -> list[int]:
    """The ids of messages in the tokenizer's chat template, up to where the answer begins."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return _begun(tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"])


def _begun(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return ids or ([] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id])


class IncrementalText:
    """The text of one row as it grows: `add` returns the characters that are final, `end` the rest.

    special   whether special tokens are part of the text
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], *, special: bool = False) -> None:
        self._special = special
        self._tokenizer, self._ids = tokenizer, list(before[-CONTEXT:])
        self._from, self._read, self._sent = 0, len(self._ids), 0

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._next(whole=False)

    def end(self) -> str:
        return self._next(whole=True)

    def _next(self, *, whole: bool) -> str:
        read_length = len(self._text(self._ids[self._from : self._read])) + self._sent
        text = self._text(self._ids[self._from :])
        sure = text if whole else text.rstrip(UNFINISHED)
        piece = sure[read_length:]
        if len(sure) == len(text) and len(text) > read_length - self._sent:
            self._from, self._read, self._sent = self._read, len(self._ids), 0
        else:
            self._sent += len(piece)
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not self._special, clean_up_tokenization_spaces=False)


class RowStreamer(BaseStreamer):
    """Receives every row's tokens from `generate`, one at a time, and reports their text."""

    def __init__(
        self, tokenizer: Tokenizer, generation: Generation, prompt: dict[str, Tensor], stop: set[int], on_piece: OnPiece
    ) -> None:
        self._generation, self._stop, self._on_piece = generation, stop, on_piece
        rows = zip(prompt["input_ids"].tolist(), prompt["attention_mask"].tolist())
        self._pieces = [IncrementalText(tokenizer, [i for i, there in zip(*row) if there]) for row in rows]
        self._began, self._open = time.perf_counter(), [True] * len(self._pieces)
        self.begin(range(len(self._pieces)))

    def begin(self, rows: Sequence[int]) -> None:
        """The next call of `generate` continues these rows."""
        self._rows, self._prompt_seen = rows, False

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self._generation.first_token is None:
            self._generation.first_token = time.perf_counter() - self._began
        for row, token in zip(self._rows, value.reshape(-1).tolist(), strict=True):
            if self._open[row]:
                output = self._generation.outputs[row]
                output.tokens.append(token)
                self._report(row, self._pieces[row].add(token))
                if token in self._stop:
                    self._close(row, "stop")

    def end(self) -> None:
        self.close("length")

    def close(self, reason: str) -> None:
        """Finishes every open row of the call and reports the rest of its text."""
        self._generation.seconds = time.perf_counter() - self._began
        for row in self._rows:
            if self._open[row]:
                self._close(row, reason)

    def _close(self, row: int, reason: str) -> None:
        self._open[row] = False
        self._generation.outputs[row].finish_reason = reason
        self._report(row, self._pieces[row].end())

    def _report(self, row: int, piece: str) -> None:
        if piece:
            self._generation.outputs[row].text += piece
            self._on_piece(row, piece)


class FiniteLogits(LogitsProcessor):
    """Raises NothingToDraw if a row's largest logit is not finite, before or after division by the temperature.

    The softmax of such a row is NaN. torch.multinomial refuses it; on a GPU its assertion makes the device unusable.
    """

    def __init__(self, temperature: float, first: int = 0) -> None:
        """first: the prompt of the first row"""
        self._temperature, self._first = temperature, first

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        most = scores.max(-1).values.float().cpu()  # one wait
        divided = most / self._temperature
        if bool(torch.isfinite(divided).all()):
            return scores
        for scaled, values in ((False, most), (True, divided)):
            if not bool(torch.isfinite(values).all()):
                rows = (~torch.isfinite(values)).nonzero()[:, 0].tolist()
                problem = f"the largest logit of prompt {self._first + rows[0] + 1} is {float(most[rows[0]]):.4g}"
                if scaled:
                    problem += f", which divided by {self._temperature:.4g} does not fit float32"
                raise NothingToDraw(f"{problem}: there are no probabilities to draw a token from", scaled=scaled)
        return scores


def sampling_config(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
) -> tuple[GenerationConfig, set[int]]:
    """The model's generation config with these arguments, and the ids that end a text. Temperature 0 is greedy."""
    config = copy.deepcopy(model.generation_config)
    ends = config.eos_token_id
    stop = {i for i in (*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id) if i is not None}
    config.eos_token_id = sorted(stop) or None
    config.pad_token_id = next((i for i in (tokenizer.pad_token_id, *sorted(stop)) if i is not None), 0)
    config.max_new_tokens, config.max_length, config.num_beams = max_new_tokens, None, 1
    config.do_sample = temperature > 0
    config.temperature, config.top_p, config.top_k = (
        (temperature, top_p or 1.0, top_k or 0) if temperature else (None,) * 3
    )
    return config, stop


def generate(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    generation: Generation,
    inputs: dict[str, Tensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    on_piece: OnPiece = lambda row, piece: None,
) -> None:
    """Continues each prompt; fills `generation`, which also holds the partial texts if an exception ends the call.

    Temperature 0 is greedy. A row ends at an end token of the model's generation config or of the tokenizer. With a
    rotary embedding that depends on the length, each prompt is computed alone: a batch has one length. Raises
    NothingToDraw if the logits give no probabilities, which only happens if the guard lets NaN or Inf pass, and
    ValueError for ids without an embedding and if the model itself cannot compute.
    """
    check_ids(model, int(inputs["input_ids"].max()))
    generation.outputs[:] = [GeneratedText(prompt) for prompt in prompts]
    config, stop = sampling_config(
        model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k
    )
    streamer = RowStreamer(tokenizer, generation, inputs, stop, on_piece)
    everyone = range(len(prompts))
    calls = [everyone[row : row + 1] for row in everyone] if length_types(model) else [everyone]
    hooks = lengths_forgotten(model)
    try:
        with of_the_model():
            for rows in calls:
                streamer.begin(rows)
                torch.manual_seed(seed)
                processors = [FiniteLogits(temperature, rows[0])] if temperature else []
                _continue(model, _inputs_of(inputs, rows), config, streamer, processors)
    except BaseException:
        streamer.close("interrupted")
        raise
    finally:
        for hook in hooks:
            hook.remove()


def _continue(
    model: PreTrainedModel, inputs: dict[str, Tensor], config: GenerationConfig, streamer: RowStreamer,
    processors: list[FiniteLogits],
) -> None:  # fmt: skip
    if draw(model, inputs, config, streamer, processors):
        return
    cast("Callable[..., object]", model.generate)(
        **{name: t.to(model.device) for name, t in inputs.items()},
        generation_config=config,
        streamer=streamer,
        logits_processor=processors,
    )


def _inputs_of(inputs: Mapping[str, Tensor], rows: range) -> dict[str, Tensor]:
    """The inputs of these rows, without the columns that are padding in all of them."""
    at = slice(rows.start, rows.stop)
    width = int(inputs["attention_mask"][at].sum(1).max())
    return {name: tensor[at, -width:] for name, tensor in inputs.items()}
