"""DecodeStep: logits of the next token of each sequence, by one native call for the whole model."""

from __future__ import annotations

from ctypes import POINTER, addressof, byref, cast

import torch
from torch import Tensor

from ...core import native
from ...experts._native_abi import MoeArgs
from ..engine import Engine
from ..lanes.direct import StepCalls
from ._native_abi import DTYPES, StepArgs, StepLayer, linear_args, put_linear, put_tensor
from .cache import TOKEN, StepRows
from .model import MOST_ROWS, DecoderModel

PARTS = ("attention with its products", "router", "experts", "head")  # of gs_step_args.seconds


class DecodeStep:
    """logits [rows, vocabulary] = step(tokens [rows], cache): computes the tokens' layers and appends them to the cache

    The numbers are those of the model's own layers: each result is rounded to its dtype, sums are float32. With at most
    MOST_ROWS rows, a row's bits depend on no other row. If the engine has other lanes than the CPU's, or must see every
    call, it computes the experts between two native calls; that gives the same bits. Not for several threads at once.
    """

    def __init__(self, engine: Engine, model: DecoderModel, threads: int) -> None:
        self.engine, self.model, self._threads = engine, model, threads
        self._args = StepArgs()
        self._calls: StepCalls | None = None
        self._room, self._lora = 0, engine.adapters.lora
        self._angles = model.rotary(0)

    def __call__(self, tokens: Tensor, cache: StepRows) -> Tensor:
        """The logits of the tokens' successors, in the model's dtype."""
        cache.make_room()
        table = cache.table
        rows = len(table)
        if rows > self._room or self.engine.adapters.lora is not self._lora:
            self._prepare(rows if rows == 1 else max(rows, MOST_ROWS))
        if cache.positions > len(self._angles[0]):
            self._angles = self.model.rotary(cache.positions)
            put_tensor(self._args, "cosines", self._angles[0])
            put_tensor(self._args, "sines", self._angles[1])
        args, kept = self._args, self._kept
        if rows != kept.tokens:
            kept.resize(rows)
        table[:, TOKEN] = tokens.view(-1)
        logits = torch.empty(rows, args.vocabulary, dtype=self._dtype, device="cpu")
        args.rows, args.logits.data = rows, logits.data_ptr()
        args.sequences, args.caches = table.data_ptr(), cache.places.data_ptr()
        if self._calls is not None and not self.engine.watched:
            args.first, args.last, args.outside = 0, 2 * args.layer_count + 1, 0
            self.engine.step(self._calls, self._run)
        else:
            self._run_between_calls()
        cache.advance()
        return logits

    @property
    def seconds(self) -> dict[str, float]:
        """What the parts of the steps took, since the arguments were made."""
        return dict(zip(PARTS, self._args.seconds, strict=True))

    def close(self) -> None:
        """Gives the engine what was counted."""
        if self._calls is not None and self.engine.direct is not None:
            self.engine.direct.drop(self._calls)
        self._calls, self._room = None, 0

    def _run(self) -> None:
        native.check(native.library().gs_step(byref(self._args)))

    def _run_between_calls(self) -> None:
        args = self._args
        args.first, args.outside = 0, 1
        for i, (layer, call) in enumerate(zip(self.model.layers, self._kept.buffers)):
            args.last = 2 * i + 1
            self._run()
            call.y.copy_(self.engine(layer.index, call.x, call.ids, call.weights))
            args.first = 2 * i + 1
        args.last = 2 * args.layer_count + 1
        self._run()

    def _prepare(self, room: int) -> None:
        """Buffers and arguments for up to this many sequences."""
        model, engine = self.model, self.engine
        dtype = self._dtype = model.embedding.dtype
        vocabulary, hidden = model.head.weight.shape[0], model.embedding.shape[1]
        with torch.inference_mode(False):
            self._stream = torch.zeros(room, hidden, dtype=torch.float32, device="cpu")
        args = self._args = StepArgs(
            threads=self._threads, dtype=DTYPES[dtype], hidden=hidden, heads=model.heads, kv_heads=model.kv_heads,
            head_dim=model.head_dim, vocabulary=vocabulary, normalised=model.normalised,
            float_weights=model.float_weights, epsilon=model.epsilon, scaling=model.scaling,
            layer_count=len(model.layers),
        )  # fmt: skip
        put_tensor(args, "embedding", model.embedding)
        put_tensor(args, "final_norm", model.final_norm)
        put_linear(args, "head", model.head)
        put_tensor(args, "stream", self._stream)
        put_tensor(args, "logits", torch.empty(room, vocabulary, dtype=dtype, device="cpu"))
        put_tensor(args, "cosines", self._angles[0])
        put_tensor(args, "sines", self._angles[1])
        numbers = tuple(layer.index for layer in model.layers)
        self.close()
        calls = engine.step_calls(numbers, room, model.experts_per_token, dtype)
        self._calls = calls if engine.direct is not None else None
        layers = calls.results = (StepLayer * len(numbers))()
        for layer, into, call, uses in zip(model.layers, layers, calls.native, calls.uses, strict=True):
            for name in ("input_norm", "experts_norm", "query_norm", "key_norm"):
                put_tensor(into, name, getattr(layer, name))
            for name in ("query", "key", "value", "output"):
                put_linear(into, name, getattr(layer, name))
            into.router = linear_args(layer.router.weight, layer.router.bias)
            into.experts = cast(addressof(call.args), POINTER(MoeArgs))
            into.uses = uses.data_ptr()
        args.layers = layers
        self._kept = calls  # what the arguments point to
        self._room, self._lora = room, engine.adapters.lora
