"""Service: requests of OpenAI's API, from their JSON to a running text and its answer."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from ...core.json_values import parse_json
from ..model_types import Tokenizer
from ..offload.generation import check_ids, prompt_ids
from .answers import Answer, ChatAnswer, CompletionAnswer
from .batcher import Batcher, ServingLimits
from .messages import AnswerParts, chat_prompt
from .refusals import BAD_REQUEST, NOT_FOUND, RequestRefusal
from .request_fields import CHAT, COMPLETIONS, RequestFields, field_of, read_fields, shortened, shown, wrong
from .running_text import End, Event, Piece, RunningText, Sampling, TextRequest

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

NEW_TOKENS = 1024  # of a request that does not say how many, as in `transformers serve`
MOST_BYTES, LEAST_BYTES = 8 * 2**20, 2**20  # of a request; a tokenizer reads about 1 MiB in a second
BYTES_PER_TOKEN = 32  # of a request; ids take 8, escaped letters 6 to 12
SHORT = 2**16  # bytes of a request that waits for no longer one
WISHES = {"max_new_tokens", "do_sample", "temperature", "top_p", "top_k"}  # of a generation config


class Service:
    """Answers requests. names: {the model's name in requests: its adapter, or None for the plain model}"""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, batcher: Batcher, limits: ServingLimits,
        names: Mapping[str, str | None],
    ) -> None:  # fmt: skip
        self._model, self._tokenizer, self._batcher = model, tokenizer, batcher
        self._limits, self.names = limits, dict(names)
        self._workers = [
            ThreadPoolExecutor(1, thread_name_prefix=f"goldsmith {name} prompts") for name in ("short", "long")
        ]

    @property
    def most_bytes(self) -> int:
        """Of a request's body: the tokenizer computes this much for whoever sends it."""
        return min(max(LEAST_BYTES, BYTES_PER_TOKEN * self._limits.context), MOST_BYTES)

    async def chat(self, body: object, length: int) -> tuple[Answer, Conversation]:
        return await self._begin(body, length, chat=True)

    async def complete(self, body: object, length: int) -> tuple[Answer, Conversation]:
        return await self._begin(body, length, chat=False)

    async def _begin(self, body: object, length: int, *, chat: bool) -> tuple[Answer, Conversation]:
        """length: bytes of the body"""
        loop, worker = asyncio.get_running_loop(), self._workers[length > SHORT]
        request, answer, stream = await loop.run_in_executor(worker, self._read, body, chat)
        conversation = Conversation(self._batcher, request, stream)
        return answer, conversation

    def _read(self, body: object, chat: bool) -> tuple[TextRequest, Answer, bool]:
        """The request in a body, and an empty answer to it; raises RequestRefusal."""
        fields, body = read_fields(_with_generation_config(body), CHAT if chat else COMPLETIONS)
        name, adapter = self._served(fields.model)
        tools = None
        if chat:
            ids, tools = chat_prompt(self._tokenizer, body)
            self._check_ids(ids)
        else:
            ids = self._prompt(body.get("prompt"))
        if not ids:
            raise RequestRefusal(
                BAD_REQUEST, "The prompt is empty, and the model's tokenizer has no token that begins a text."
            )
        sampling = self._sampling(fields, len(ids))
        answer: Answer
        if chat:
            parts = AnswerParts(self._model, self._tokenizer, ids, tools)
            answer, special = ChatAnswer(name, len(ids), parts, count=fields.usage), parts.special
        else:
            answer, special = CompletionAnswer(name, len(ids), count=fields.usage), False
        return TextRequest(adapter, ids, sampling, fields.stop, special), answer, fields.stream

    def _served(self, name: str | None) -> tuple[str, str | None]:
        if name is None:
            name = next(iter(self.names))
        if name not in self.names:
            raise self.unknown(name)
        return name, self.names[name]

    def unknown(self, name: object) -> RequestRefusal:
        """The answer to a request for another model."""
        served = ", ".join(self.names)
        sentence = f"The model {shown(name)} is not served here; served: {served}."
        return RequestRefusal(NOT_FOUND, sentence, field="model", code="model_not_found")

    def _prompt(self, prompt: object) -> list[int]:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = prompt_ids(self._tokenizer, prompt)
            self._check_ids(ids)
            return ids
        given: list[Any] = prompt if isinstance(prompt, list) else [None]
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**31 for token in given):
            raise wrong(
                "prompt", "expected one text, or one list of token ids; send several prompts as several requests."
            )
        if not given:
            raise wrong("prompt", "the list is empty: give a text, or a list of at least one token id.")
        rows = cast("nn.Embedding", self._model.get_input_embeddings()).num_embeddings
        if max(given) >= rows:
            raise wrong("prompt", f"there is no token {max(given):,}: the model has ids from 0 to {rows - 1:,}.")
        return given

    def _check_ids(self, ids: list[int]) -> None:
        """Raises RequestRefusal if the tokenizer gives ids that the model has no embedding for."""
        try:
            check_ids(self._model, max(ids, default=0))
        except ValueError as error:
            raise RequestRefusal(BAD_REQUEST, f"The prompt does not fit the model: {error}.") from error

    def _sampling(self, fields: RequestFields, prompt: int) -> Sampling:
        most = self._limits.context
        if prompt >= most:
            raise RequestRefusal(
                BAD_REQUEST, f"The prompt has {prompt:,} tokens, but this server takes at most {most:,}, one of "
                "them for the text: shorten the prompt.", code="context_length_exceeded",
            )  # fmt: skip
        new = fields.max_tokens or min(NEW_TOKENS, most - prompt)
        if prompt + new > most:
            wish = shortened(f"{new:,}")
            raise RequestRefusal(
                BAD_REQUEST, f"The prompt has {prompt:,} tokens, and max_tokens is {wish}: together more than the "
                f"{most:,} tokens that this server takes. Shorten the prompt, or give max_tokens of at most "
                f"{most - prompt:,}.", field="max_tokens", code="context_length_exceeded",
            )  # fmt: skip
        seed = secrets.randbits(63) if fields.seed is None else fields.seed
        temperature, top_p, top_k = fields.temperature, fields.top_p, fields.top_k
        config = self._model.generation_config
        if temperature is None and top_p is None and top_k is None and config.do_sample:
            temperature, top_p, top_k = config.temperature, config.top_p, config.top_k
        if temperature is None:
            temperature = 1.0 if config.do_sample or top_p is not None or top_k is not None else 0.0
        return Sampling(new, temperature, top_p, top_k, seed)


class Conversation:
    """One request from its submission to its end, for the event loop of the server."""

    def __init__(self, batcher: Batcher, request: TextRequest, stream: bool) -> None:
        self._batcher, self._loop, self.stream = batcher, asyncio.get_running_loop(), stream
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self.text = RunningText(request, self._hear)

    def _hear(self, event: Event) -> None:
        self._events.append(event)
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:  # the server has ended
            self.text.cancelled = True

    def submit(self) -> None:
        self._batcher.submit(self.text)

    def cancel(self) -> None:
        self._batcher.cancel(self.text)

    async def next_event(self) -> Piece | End:
        """The next piece, or the end; raises RequestRefusal when the text fails. Pieces that wait are one."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        while isinstance(event, Piece) and self._events and isinstance(following := self._events[0], Piece):
            event = Piece(event.text + following.text, following.tokens)
            self._events.popleft()
        if isinstance(event, RequestRefusal):
            raise event
        return event


def _with_generation_config(body: object) -> Any:
    """The body with the wishes of its generation_config, as `transformers chat` sends them, in its own fields."""
    if not isinstance(body, dict) or "generation_config" not in body:
        return body
    rest = {name: value for name, value in body.items() if name != "generation_config"}
    text = field_of(body, "generation_config", str) or "{}"
    try:
        config = parse_json(text)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise wrong("generation_config", "expected a JSON object in a string.")
    unknown = set(config) - WISHES - {"transformers_version"}
    if unknown:
        raise wrong(
            "generation_config", f"{shortened(min(unknown))} is not supported; known: {', '.join(sorted(WISHES))}."
        )
    if config.get("do_sample") is False:
        rest.setdefault("temperature", 0)
    for name in ("temperature", "top_p", "top_k"):
        if config.get(name) is not None and config.get("do_sample") is not False:
            rest.setdefault(name, config[name])
    if config.get("max_new_tokens") is not None:
        rest.setdefault("max_tokens", config["max_new_tokens"])
    return rest
