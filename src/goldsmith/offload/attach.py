"""offload and from_pretrained: a transformers model whose experts an Engine computes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import torch

from .engine import Engine
from .explanation import Explanation
from .observe.statistics import Stats
from .settings import pickling_error
from .store.expert_store import ExpertStore

ADAPTER = "goldsmith.hf.offload"  # imported by name on first use, because this floor must not import transformers
Progress = Callable[[int, int | None, str], None]
AdapterFolders = str | Path | Mapping[str, str | Path] | Sequence[str | Path]


class Offloaded:
    """A transformers model whose experts an engine computes from a store. offload and from_pretrained return it.

    model    the same transformers model: `model(...)` and `model.generate(...)` work as before
    engine   the Engine that computes its experts
    stats, reset_stats, explain, trace, profile   the engine's methods

    A context manager that closes at the end. After `close` the model's experts cannot be computed any more; call
    `detach` instead to get the plain model back.
    """

    def __init__(self, attached: Any) -> None:
        self._attached = attached

    @property
    def model(self) -> Any:
        return self._attached.model

    @property
    def engine(self) -> Engine:
        return self._attached.engine

    def stats(self) -> Stats:
        return self.engine.stats()

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def explain(self) -> Explanation:
        return self.engine.explain()

    def trace(self, path: str | Path) -> AbstractContextManager[None]:
        return self.engine.trace(path)

    def profile(self, *args: object, **options: object) -> dict[str, dict[str, list[int]]]:
        return self.engine.profile(*args, **options)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that `set_adapter` can select."""
        return self._attached.adapters.names

    @property
    def active_adapters(self) -> tuple[str, ...]:
        return self._attached.adapters.active

    def set_adapter(self, names: str | Sequence[str] | None) -> None:
        """Selects what the model computes with: an adapter by name, the sum of several, or None, the plain model.

        Raises ValueError for an unknown name, with nothing changed.
        """
        self._attached.use_adapter(names)

    def load_adapter(self, adapter: AdapterFolders) -> tuple[str, ...]:
        """Adds adapters as `offload(adapter=...)` takes them, and returns their names; select them with `set_adapter`.

        On a GPU the memory for factors is reserved at the start, so give large adapters to `offload`.
        """
        return self._attached.load_adapter(adapter)

    def detach(self) -> Any:
        """The plain model: its experts' parameters read from the store, everything on its former device.

        A model of `from_pretrained` comes back on the CPU. Closes the engine. Raises ValueError after close(), and if
        the store's format is lossy, because the model's own weights no longer exist.
        """
        store = self.engine.store
        if self.engine.closed:
            raise ValueError("Offloaded.detach: this object is closed; call detach() before close(), or instead of it")
        if not store.exact:
            raise ValueError(
                f"Offloaded.detach: the store holds the experts in {store.format}, which rounded their weights: "
                "load the model again"
            )
        if self._attached.dense_format != "exact":
            raise ValueError(
                f"Offloaded.detach: the dense part is packed in {self._attached.dense_format}, so its own weights no "
                "longer exist: load the model again"
            )
        self.engine.flush()  # raises errors of the last call before anything is undone
        model = self._attached.detach()
        self.close()
        return model

    def close(self) -> None:
        """Ends the engine's threads and frees its memory. May be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.engine.__exit__(kind, value, at)
        finally:
            if self._attached.owned:
                self.engine.store.close()

    def __reduce__(self) -> NoReturn:
        raise pickling_error()

    def __repr__(self) -> str:
        store = self.engine.store
        experts = f"{len(store.layers)} layers of experts in {store.format}"
        return f"Offloaded({type(self.model).__name__}, {experts}, {store.path})"


def offload(
    model: object,
    *,
    store: ExpertStore | str | Path | None = None,
    adapter: AdapterFolders | None = None,
    cpu_format: str = "auto",
    dense_format: str = "exact",
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Offloaded:
    """y = sum_j w_j expert_{id_j}(x) of every mixture layer, computed by an Engine over a store of the experts

    model       a transformers model with fused experts (Qwen3-MoE, Mixtral, OLMoE, DeepSeek-V2 and V3, gpt-oss, and
                others for which a trial on one pair of experts gives the same result)
    store       an ExpertStore, or a path: opened if it exists, otherwise built there. Default: the cache folder, under
                a key of every byte of the weights; an existing store is reused. A given store is compared with a model
                in memory, byte by byte if the store is exact, otherwise by a sample
    adapter     the folder of a peft adapter, several, or {name: folder}. The first is active; `set_adapter` selects.
                LoRA on experts is computed beside their packed weights, which do not change
    cpu_format  "auto": the narrowest format that holds the weights exactly. Or a format of `experts.pack`; a lossy one
                needs exact=False
    dense_format    "exact": all linear layers but the experts keep the model's own weights. Or a format of
                    `experts.pack_matrix` for all but the routers; only on the CPU, without adapters
    batch, max_length   with gpu_budget="auto": rows, and tokens per row, whose keys and values must fit on the GPU
                        besides
                the experts. Default: one row of the generation config's max_length, or of 4096
    progress    called with (bytes done, total bytes or None, what) while weights are hashed and a store is built
    options     keywords of the Engine: device, gpu_budget, cache, prefill, exact, guard, lanes, threads, calibration,
                profile, adaptive

    When the store is published, the model's experts leave memory (their parameters move to the meta device). An error
    before that leaves the model unchanged. The rest of the model moves to the engine's device, and no parameter
    requires a gradient any more. Raises UnsupportedModel with the class and the property, StoreMismatch for a store of
    other weights, ValueError for arguments, ImportError if transformers is not installed.
    """
    arguments: dict[str, Any] = {"store": store, "adapter": adapter, "cpu_format": cpu_format, "batch": batch}
    arguments |= {"dense_format": dense_format, "max_length": max_length}
    return Offloaded(_adapter().attach(model, **arguments, progress=progress, **options))


def from_pretrained(
    path: str | Path,
    *,
    store: ExpertStore | str | Path | None = None,
    dtype: torch.dtype | None = None,
    adapter: AdapterFolders | None = None,
    cpu_format: str = "auto",
    dense_format: str = "exact",
    batch: int = 1,
    max_length: int | None = None,
    progress: Progress | None = None,
    on_memory: Callable[[Any], None] | None = None,
    **options: object,
) -> Offloaded:
    """`offload` of the model in a folder, or of a cached hub model; the experts are never in memory twice

    dtype      of all other weights, and of the numbers that codes of experts represent; default: the checkpoint's
    on_memory  called before weights are read, with the bytes that the model will take: its attributes `dense` (all but
               the experts), `store`, `token` (keys and values of one token) and `available`

    The model is created on the meta device, and all but its experts is loaded to the engine's device. The experts go
    from the checkpoint's files to the store one at a time; codes of a quantised checkpoint are kept bit for bit.
    `progress` reports both. Other keywords and errors as in `offload`; ValueError also if all but the experts does not
    fit in memory.
    """
    arguments: dict[str, Any] = {"store": store, "adapter": adapter, "cpu_format": cpu_format, "batch": batch}
    arguments |= {"dense_format": dense_format, "max_length": max_length}
    return Offloaded(_adapter().load(path, dtype=dtype, **arguments, progress=progress, on_memory=on_memory, **options))


def _adapter() -> ModuleType:
    try:
        return importlib.import_module(ADAPTER)
    except ImportError as error:
        raise ImportError(
            f"goldsmith.offload computes experts without transformers, but models of transformers need it: {error}. "
            "Install it with pip install 'transformers>=5' peft; ExpertStore and Engine work without it."
        ) from error
