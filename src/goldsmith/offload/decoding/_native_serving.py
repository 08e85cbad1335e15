"""Serving: the CPU's experts of a recorded step, by one native call for all layers."""

from __future__ import annotations

from ctypes import POINTER, addressof, byref, cast

import numpy as np
import torch
from torch import Tensor

from ...core import native
from ...experts._native_abi import MoeArgs, busy
from ..engine import Engine
from ..lanes.kernels import Kernels
from ..settings import int8_group
from ._native_abi import ServeArgs, ServedLayer

PATIENCE = 60.0  # seconds that the CPU waits for a layer


class Serving:
    """Answers the questions of a device, layer by layer, with the experts that `table` [L, E] does not have (-1)

    x [T, H], routed [T, k] int64 and rows [T k, H] float32 are in pinned memory; words: the question, and 16 numbers
    further the answer.
    """

    def __init__(
        self, engine: Engine, x: Tensor, routed: Tensor, rows: Tensor, table: Tensor, words: Tensor, *, polite: bool
    ) -> None:
        store = engine.store
        int8 = int8_group(store, engine.settings.compute) if engine.device_lanes is None else 0
        routes, layers = routed.numel(), store.layers
        self._kernels = Kernels(store.options, 0, int8)
        with torch.inference_mode(False):
            ids, flags = torch.full_like(routed, -1), torch.zeros(routes, dtype=torch.uint8, device="cpu")
            self.uses = torch.zeros(table.shape, dtype=torch.int64, device="cpu")
            lora = engine.adapters.lora
            self._calls = [
                self._kernels.call(x, ids, store.experts(layer), rows, flags, lora.on_cpu(layer)) for layer in layers
            ]
            size, work = store.expert_nbytes(layers[0]), 6 * store.hidden_size * store.intermediate_size
            counts = [min(engine.threads, busy(size * n, work * n)) for n in range(routes + 1)]
            threads = torch.tensor(counts, dtype=torch.int32, device="cpu")
        self._layers = (ServedLayer * len(layers))()
        for row, (served, call) in enumerate(zip(self._layers, self._calls, strict=True)):
            served.experts = cast(addressof(call.args), POINTER(MoeArgs))
            served.slots, served.uses = table[row].data_ptr(), self.uses[row].data_ptr()
        self._args = ServeArgs(
            layers=self._layers, layer_count=len(layers), routes=routes, routed=routed.data_ptr(), ids=ids.data_ptr(),
            threads=threads.data_ptr(), asked=words.data_ptr(), answered=words[16:].data_ptr(), patience=PATIENCE,
            polite=int(polite),
        )  # fmt: skip
        self._kept = x, routed, rows, table, words, ids, flags, threads, lora  # what the arguments point to
        self._asked = words.numpy()
        self._counted = np.zeros(len(layers), dtype=np.int64)

    def serve(self) -> None:
        """Computes the CPU's experts of all layers, as the device asks for them."""
        native.check(native.library().gs_serve(byref(self._args)))

    @property
    def served(self) -> int:
        """Steps that were served to their end; a signal may be raised after that, but not in `serve` before it."""
        return int(self._args.served)

    @property
    def asked(self) -> bool:
        """Whether the device waits for an answer."""
        return bool(self._asked[0])

    @property
    def computed(self) -> int:
        """Routes that the CPU has computed so far."""
        return sum(layer.computed for layer in self._layers)

    def take(self, row: int) -> tuple[int, float]:
        """Routes of a layer that the CPU computed since this was asked last, and its seconds."""
        layer = self._layers[row]
        routes, seconds = layer.computed - int(self._counted[row]), layer.seconds
        self._counted[row], layer.seconds = layer.computed, 0.0
        return routes, seconds
