"""offload and from_pretrained: a transformers model whose experts an Engine computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from .engine import Engine
from .settings import not_sent
from .store.expert_store import ExpertStore

ADAPTER = "goldsmith.hf.offload"  # by name, and when it is needed: this floor imports no transformers
Progress = Callable[[int, int | None, str], None]


class Offloaded:
    """A model whose experts are in a store and are computed by an engine; `offload` and `from_pretrained` make it.

    model    the same transformers model: `model(...)` and `model.generate(...)` work as before
    engine   the Engine that computes its experts
    stats, reset_stats, explain, trace, profile   the engine's own

    As a context manager it closes at the end. Afterwards the model's experts cannot be computed any more; `detach`
    gives the plain model back instead.
    """

    def __init__(self, attached: Any) -> None:
        self._attached = attached

    @property
    def model(self) -> Any:
        return self._attached.model

    @property
    def engine(self) -> Engine:
        return self._attached.engine

    def stats(self) -> Any:
        return self.engine.stats()

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def explain(self) -> Any:
        return self.engine.explain()

    def trace(self, path: str | Path) -> Any:
        return self.engine.trace(path)

    def profile(self, *args: Any, **options: Any) -> Any:
        return self.engine.profile(*args, **options)

    def detach(self) -> Any:
        """The plain model: its experts' parameters out of the store, all of it on the device where it was before.

        A model of `from_pretrained` comes back on the CPU. The engine is closed. Raises ValueError where the store's
        format was lossy, since the model's own weights are gone then, and after close().
        """
        store = self.engine.store
        if self.engine.closed:
            raise ValueError("Offloaded.detach: it is closed; detach() before close(), or in its place")
        if not store.exact:
            raise ValueError(
                f"Offloaded.detach: the store holds the experts in {store.format}, which is not exactly what they "
                "were: load the model anew"
            )
        self.engine.flush()  # an error of the last call is raised before anything is undone
        model = self._attached.detach()
        self.close()
        return model

    def close(self) -> None:
        """Ends the engine's threads and gives its memory back. Twice is once."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.engine.__exit__(kind, value, at)
        finally:
            if self._attached.owned:
                self.engine.store.close()

    def __reduce__(self) -> Any:
        raise not_sent()

    def __repr__(self) -> str:
        store = self.engine.store
        what = f"{len(store.layers)} layers of experts in {store.format}"
        return f"Offloaded({type(self.model).__name__}, {what}, {store.path})"


def offload(
    model: Any,
    *,
    store: ExpertStore | str | Path | None = None,
    cpu_format: str = "auto",
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Offloaded:
    """y = sum_j w_j expert_{id_j}(x) of every mixture layer, computed by an Engine over a store of the experts

    model       a transformers model whose experts are fused (Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2 and V3, gpt-oss,
                and others that a trial on one pair of experts agrees with)
    store       an ExpertStore, or a path, which is opened if it exists and else built there. Default: the user's cache
                folder, under a key of every byte of the weights; one that is there is used again. One that is given is
                compared with a model in memory to the last byte, where it is exact, else by a sample
    cpu_format  "auto": the narrowest that holds the weights exactly; or a format of `experts.pack`, and then a lossy
                one needs exact=False
    batch, max_length   with gpu_budget="auto": rows, and tokens of each, whose keys and values find room on the GPU
                beside the experts. Default: one row of the generation config's max_length, or of 4096
    progress    is told (bytes done, bytes in all or None, what) while weights are hashed and a store is built
    options     the Engine's keywords: device, gpu_budget, cache, prefill, exact, guard, lanes, threads, calibration,
                profile, adaptive

    The experts leave the memory (their parameters go to the meta device) as soon as the store that holds them is
    published; before that an error leaves the model as it was. The rest of the model moves to the engine's device, and
    no parameter asks for a gradient any more. Raises UnsupportedModel with the class and the property, StoreMismatch
    for a store of other weights, ValueError for arguments, ImportError where transformers is not installed.
    """
    given: dict[str, Any] = {"store": store, "cpu_format": cpu_format, "batch": batch, "max_length": max_length}
    return Offloaded(_adapter().attach(model, **given, progress=progress, **options))


def from_pretrained(
    path: str | Path,
    *,
    store: ExpertStore | str | Path | None = None,
    dtype: torch.dtype | None = None,
    cpu_format: str = "auto",
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Offloaded:
    """`offload` of the model in a folder (or of a hub name that this machine has), which never holds experts twice

    dtype   of what is no expert, and of the numbers that experts stand for; default: the checkpoint's

    The model is made on the meta device; what is no expert is loaded to the engine's device, and the experts go from
    the checkpoint's files to the store one at a time, the codes of a quantised checkpoint bit for bit. `progress` is
    told of both. The other keywords, and what is raised, as in `offload`.
    """
    given: dict[str, Any] = {"store": store, "cpu_format": cpu_format, "batch": batch, "max_length": max_length}
    return Offloaded(_adapter().load(path, dtype=dtype, **given, progress=progress, **options))


def _adapter() -> Any:
    try:
        return importlib.import_module(ADAPTER)
    except ImportError as error:
        raise ImportError(
            f"goldsmith.offload computes experts without transformers, but a model of transformers needs it: {error}. "
            "pip install goldsmith[hf] brings it; ExpertStore and Engine work as they are."
        ) from error
