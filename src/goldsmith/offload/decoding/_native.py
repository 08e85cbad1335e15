"""DecodeStep: logits of the next token of each sequence, by one native call for the whole model."""

from __future__ import annotations

import weakref
from ctypes import POINTER, addressof, byref, cast

import torch
from torch import Tensor

from ...core import native
from ...experts._native_abi import MoeArgs
from ..engine import Engine
from ..lanes.direct import StepCalls
from ._native_abi import DTYPES, StepArgs, StepLayer, put_linear, put_tensor
from .cache import StepCache
from .model import DecoderModel


class DecodeStep:
    """logits [rows, vocabulary] = step(tokens [rows], cache): computes the tokens' layers and appends them to the cache

    The numbers are those of the model's own layers: each result is rounded to its dtype, sums are float32. If the
    engine has other lanes than the CPU's, or must see every call, it computes the experts between two native calls;
    that gives the same bits. Not for several threads at once.
    """

    def __init__(self, engine: Engine, model: DecoderModel, threads: int) -> None:
        self.engine, self.model, self._threads = engine, model, threads
        self._args = StepArgs()
        self._calls: StepCalls | None = None
        self._cache: weakref.ref[StepCache] | None = None
        self._rows, self._adapters = -1, engine.adapters.active

    def __call__(self, tokens: Tensor, cache: StepCache) -> Tensor:
        """The logits of the tokens' successors, in the model's dtype."""
        grown = cache.reserve(cache.length + 1)
        if cache.rows != self._rows or self.engine.adapters.active != self._adapters:
            self._prepare(cache.rows)
        if grown or self._cache is None or self._cache() is not cache:
            self._point_to(cache)
        self._tokens.copy_(tokens.view(-1))
        args = self._args
        logits = torch.empty(self._rows, args.vocabulary, dtype=self._dtype, device="cpu")
        args.cached, args.logits.data = cache.length, logits.data_ptr()
        if self._calls is not None and not self.engine.watched:
            args.first, args.last, args.outside = 0, 2 * args.layer_count + 1, 0
            self.engine.step(self._calls, self._run)
        else:
            self._run_between_calls()
        cache.length += 1
        return logits

    def close(self) -> None:
        """Gives the engine what was counted."""
        if self._calls is not None and self.engine.direct is not None:
            self.engine.direct.drop(self._calls)
        self._calls = None

    def _run(self) -> None:
        native.check(native.library().gs_step(byref(self._args)))

    def _run_between_calls(self) -> None:
        args = self._args
        args.first, args.outside = 0, 1
        for i, (layer, call) in enumerate(zip(self.model.layers, self._buffers)):
            args.last = 2 * i + 1
            self._run()
            call.y.copy_(self.engine(layer.index, call.x, call.ids, call.weights))
            args.first = 2 * i + 1
        args.last = 2 * args.layer_count + 1
        self._run()

    def _prepare(self, rows: int) -> None:
        """Buffers and arguments for this many sequences."""
        model, engine = self.model, self.engine
        dtype = self._dtype = model.embedding.dtype
        vocabulary, hidden = model.head.weight.shape[0], model.embedding.shape[1]
        with torch.inference_mode(False):
            self._tokens = torch.zeros(rows, dtype=torch.int64, device="cpu")
            self._stream = torch.zeros(rows, hidden, dtype=torch.float32, device="cpu")
        args = self._args = StepArgs(
            threads=self._threads, dtype=DTYPES[dtype], rows=rows, hidden=hidden, heads=model.heads,
            kv_heads=model.kv_heads, head_dim=model.head_dim, vocabulary=vocabulary, normalised=model.normalised,
            float_weights=model.float_weights, epsilon=model.epsilon, scaling=model.scaling,
            layer_count=len(model.layers), tokens=self._tokens.data_ptr(),
        )  # fmt: skip
        put_tensor(args, "embedding", model.embedding)
        put_tensor(args, "final_norm", model.final_norm)
        put_linear(args, "head", model.head.weight, model.head.bias)
        put_tensor(args, "stream", self._stream)
        put_tensor(args, "logits", torch.empty(rows, vocabulary, dtype=dtype, device="cpu"))
        numbers = tuple(layer.index for layer in model.layers)
        self.close()
        calls = engine.step_calls(numbers, rows, model.experts_per_token, dtype)
        self._calls = calls if engine.direct is not None else None
        self._buffers = calls.buffers
        self._layers = calls.results = (StepLayer * len(numbers))()
        for layer, into, call, uses in zip(model.layers, self._layers, calls.native, calls.uses, strict=True):
            for name in ("input_norm", "experts_norm", "query_norm", "key_norm"):
                put_tensor(into, name, getattr(layer, name))
            for name in ("query", "key", "value", "output", "router"):
                linear = getattr(layer, name)
                put_linear(into, name, linear.weight, linear.bias)
            into.experts = cast(addressof(call.args), POINTER(MoeArgs))
            into.uses = uses.data_ptr()
        args.layers = self._layers
        self._kept = calls  # what the arguments point to
        self._rows, self._cache, self._adapters = rows, None, engine.adapters.active

    def _point_to(self, cache: StepCache) -> None:
        """Takes the buffers of this cache, and the angles of all its positions."""
        for into, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            put_tensor(into, "keys", keys)
            put_tensor(into, "values", values)
        self._angles = self.model.rotary(cache.capacity)
        put_tensor(self._args, "cosines", self._angles[0])
        put_tensor(self._args, "sines", self._angles[1])
        self._args.starts = cache.starts.data_ptr()
        self._cache = weakref.ref(cache)
