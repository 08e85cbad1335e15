"""Batcher: the thread that computes; it takes requests in turn and steps all running texts together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from ...offload.attach import Offloaded
from ..experts_spec import experts_modules
from ..model_types import Tokenizer
from ..offload.token_loop import CHUNK
from ..rotary_lengths import lengths_forgotten
from .native_rows import NativeRows, native_forward
from .refusals import UNAVAILABLE, RequestRefusal
from .rows import CacheKind, Rows, new_cache, prefill
from .running_text import RunningText
from .step_errors import STEP_ERRORS, refusal_of
from .watched_files import WatchedFiles

BUSY = "server_busy"


@dataclass(frozen=True)
class ServingLimits:
    """parallel: texts that step together. context: tokens of one text with its prompt. tokens: of all running texts,
    each counted with the longest one's. queue: requests that wait."""

    parallel: int
    context: int
    tokens: int
    queue: int


@dataclass
class Served:
    """What the server has done so far."""

    answered: int = 0
    failed: int = 0
    tokens: int = 0


class Interrupted(Exception):
    """Ends a call of the model between two layers: nobody waits for it."""


class Batcher:
    """Runs texts on an offloaded model until `stop`; `submit` and `cancel` may be called from any thread.

    A prompt is computed in chunks, between the steps of the others. Texts with the same adapter step together, in the
    native step if it computes the model; each adapter has its turn. A step that fails is repeated for every text alone,
    so that it fails only for its cause.
    """

    def __init__(
        self,
        offloaded: Offloaded,
        tokenizer: Tokenizer,
        limits: ServingLimits,
        watched: WatchedFiles,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._report = report
        self._offloaded, self._model, self._tokenizer = offloaded, offloaded.model, tokenizer
        self._limits, self._watched, self._caches = limits, watched, CacheKind(offloaded.model)
        self.parallel = 1 if self._caches.alone else limits.parallel
        self.served = Served()
        self._open: list[RunningText] = []  # all texts without an answer
        self._waiting: deque[RunningText] = deque()  # those that no step has touched yet
        self._prompts: list[tuple[RunningText, Rows]] = []  # texts whose prompt is being computed
        self._batches: list[Rows | NativeRows] = []
        self._changed = threading.Condition()
        self._stopping: RequestRefusal | None = None
        self._alone: RunningText | None = None  # the only text of the call under way
        self._hooks = [m.register_forward_pre_hook(self._interrupt) for _, m in experts_modules(self._model)]
        stepping = native_forward(self._model)
        if stepping is not None:
            stepping.permit(hook.id for hook in self._hooks)  # a step is too short to be interrupted
        self._hooks += lengths_forgotten(self._model)
        self._thread = threading.Thread(target=self._run, name="goldsmith steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, text: RunningText) -> None:
        """Puts a text into the queue; raises RequestRefusal if that is full or the server is ending."""
        self._watched.check()
        with self._changed:
            if self._stopping is not None:
                raise self._stopping
            if len(self._waiting) >= self._limits.queue:
                sentence = f"{self._limits.queue} requests are waiting already: try again later."
                raise RequestRefusal(UNAVAILABLE, sentence, code=BUSY)
            self._open.append(text)
            self._waiting.append(text)
            self._changed.notify()

    def cancel(self, text: RunningText) -> None:
        """Nobody waits for the text any more: it costs no further step."""
        text.cancelled = True

    def stop(self, refusal: RequestRefusal) -> None:
        """Ends all texts with this answer, and the call under way at its next layer."""
        with self._changed:
            self._stopping = refusal
            texts = list(self._open)
            self._changed.notify()
        for text in texts:
            text.fail(refusal)

    def join(self, seconds: float) -> bool:
        """Waits for the thread's end; returns whether it has ended."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        for hook in self._hooks:
            hook.remove()
        return not self._thread.is_alive()

    def state(self) -> dict[str, int]:
        """How many requests run and wait, and what was done so far."""
        with self._changed:
            waiting = len(self._waiting)
            return {"running": len(self._open) - waiting, "waiting": waiting, **asdict(self.served)}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        reason = RequestRefusal(UNAVAILABLE, "The server's computing thread has ended: start the server again.")
        try:
            with torch.no_grad():
                while self._wait():
                    try:
                        self._turn()
                    except Interrupted:
                        continue
                    except STEP_ERRORS as error:  # between two steps: no memory to sort the rows, for example
                        self._drop_all(refusal_of(error))
        finally:
            self.stop(self._stopping or reason)

    def _wait(self) -> bool:
        """Waits for work; False: the server ends."""
        with self._changed:
            while self._stopping is None and not self._open:
                self._changed.wait()
            return self._stopping is None

    def _turn(self) -> None:
        self._forget()
        try:
            self._watched.check()
        except RequestRefusal as refusal:
            self._drop_all(refusal)
            return
        self._admit()
        self._compute_prompts()
        for rows in list(self._batches):
            if self._stopping is None:
                self._step(rows)

    def _forget(self) -> None:
        """Drops texts that have ended, and those that nobody waits for."""
        with self._changed:
            self._open = [text for text in self._open if not text.cancelled and not text.ended]
            self._waiting = deque(text for text in self._waiting if not text.cancelled)
        self._prompts = [(text, rows) for text, rows in self._prompts if not text.cancelled and not text.ended]
        for rows in self._batches:
            rows.keep([text for text in rows.texts if not text.cancelled and not text.ended])
        self._batches = [rows for rows in self._batches if rows.texts]

    def _drop_all(self, refusal: RequestRefusal) -> None:
        with self._changed:
            texts = list(self._open)
            self._waiting.clear()
        self._prompts, self._batches = [], []
        for text in texts:
            self._fail(text, refusal)

    def _admit(self) -> None:
        """Begins texts in the order of their requests, as long as there is room for their keys and values."""
        while True:
            with self._changed:
                running = [text for text in self._open if text.ids]
                if not self._waiting or len(running) >= self.parallel:
                    return
                texts = [*running, self._waiting[0]]
                most = max(text.request.tokens for text in texts)
                if running and len(texts) * most > self._limits.tokens:
                    return
                text = self._waiting.popleft()
            with self._failing([text]):
                text.begin(self._model, self._tokenizer)
                self._prompts.append((text, Rows([text], new_cache(self._model))))

    def _compute_prompts(self) -> None:
        """Computes chunks of prompts, oldest first, until they have CHUNK tokens.

        A text's chunks end at the same places whoever else has a prompt: other chunks would round differently.
        """
        left = CHUNK
        for text, rows in list(self._prompts):
            if left <= 0:
                return
            whole = len(text.request.ids) - text.prefilled
            tokens = min(CHUNK, whole) if self._caches.chunked else whole
            left -= tokens
            with self._failing([text]):
                self._compute_prompt(text, rows, tokens)
        self._prompts = [(text, rows) for text, rows in self._prompts if not text.ended]

    def _compute_prompt(self, text: RunningText, rows: Rows, tokens: int) -> None:
        begin, end = text.prefilled, text.prefilled + tokens
        with self._call(text.request.adapter, text):
            logits = prefill(self._model, text.ids, rows.cache, range(begin, end))
        text.prefilled = end
        if end < len(text.request.ids):
            return
        self._prompts = [pair for pair in self._prompts if pair[0] is not text]
        self._add(text, text.next_token(logits))
        if not text.ended:
            self._put(NativeRows.of(rows, self._model) or rows)

    def _put(self, rows: Rows | NativeRows) -> None:
        """Adds rows to the batch with their adapter, or as a batch of their own."""
        for other in self._batches:
            if other.adapter != rows.adapter:
                continue
            if isinstance(rows, NativeRows) and isinstance(other, NativeRows):
                return other.join(rows)
            if isinstance(rows, Rows) and isinstance(other, Rows) and self._caches.joined:
                return other.join(rows)
        self._batches.append(rows)

    def _step(self, rows: Rows | NativeRows) -> None:
        try:
            rows = self._possible(rows)
            self._advance(rows)
        except STEP_ERRORS as error:
            self._recover(rows, error)

    def _possible(self, rows: Rows | NativeRows) -> Rows | NativeRows:
        """The rows; for the model's own forward, if somebody has changed the model so that it has no native step."""
        self._use(rows.adapter)
        if isinstance(rows, Rows) or rows.ready:
            return rows
        plain = rows.plain()
        self._batches = [plain if batch is rows else batch for batch in self._batches]
        return plain

    def _advance(self, rows: Rows | NativeRows) -> None:
        """One more token for every row."""
        with self._call(rows.adapter, rows.texts[0] if len(rows.texts) == 1 else None):
            logits = rows.step(self._model)
        best = logits.argmax(-1).tolist()
        for row, text in enumerate(rows.texts):
            with self._failing([text]):
                self._add(text, best[row] if text.greedy else text.next_token(logits[row : row + 1]))
        rows.keep([text for text in rows.texts if not text.ended])
        self._batches = [batch for batch in self._batches if batch.texts]

    def _recover(self, rows: Rows | NativeRows, error: BaseException) -> None:
        """After a step that failed: the rows one by one, so that only those fail that are the cause."""
        self._batches = [batch for batch in self._batches if batch is not rows]
        if len(rows.texts) == 1 or not self._caches.joined or rows.broken or isinstance(error, RequestRefusal):
            for text in rows.texts:
                self._fail(text, refusal_of(error))
            return
        for single in rows.separate():
            with self._failing(single.texts):
                alone = self._possible(single)
                self._advance(alone)
                if alone.texts:
                    self._put(alone)

    @contextmanager
    def _call(self, adapter: str | None, alone: RunningText | None) -> Iterator[None]:
        """A call of the model with this adapter, checked: files that changed meanwhile raise RequestRefusal."""
        self._use(adapter)
        self._alone = alone
        try:
            yield
        finally:
            self._alone = None
        self._watched.check()

    def _use(self, adapter: str | None) -> None:
        if self._offloaded.active_adapters != (() if adapter is None else (adapter,)):
            self._offloaded.set_adapter(adapter)

    @contextmanager
    def _failing(self, texts: Sequence[RunningText]) -> Iterator[None]:
        """Errors of the block are the answer to these texts."""
        try:
            yield
        except STEP_ERRORS as error:
            for text in texts:
                self._fail(text, refusal_of(error))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _add(self, text: RunningText, token: int) -> None:
        text.add(token)
        self.served.tokens += 1
        self.served.answered += text.ended

    def _fail(self, text: RunningText, refusal: RequestRefusal) -> None:
        if not text.ended:
            self.served.failed += 1
            self._report(refusal.sentence)
        text.fail(refusal)

    def _interrupt(self, module: object, arguments: object) -> None:
        if self._stopping is not None or self._alone is not None and self._alone.cancelled:
            raise Interrupted
