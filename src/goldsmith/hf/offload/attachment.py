"""Attached: a model whose experts an engine computes; detaching gives the plain model back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...offload.decoding.recording import recorded
from ...offload.engine import Engine
from ...offload.settings import chosen_device, pickling_error
from ...offload.store.cache_folder import cached_store
from ...offload.store.expert_store import ExpertStore
from ...offload.store.source import Weights
from ..dispatch import ENGINE, NAME, call_ours, register
from ..experts_spec import SharedOptions, is_undispatched
from . import adapters as reading
from .adapters import AdapterArgument, ModelAdapters
from .budget import automatic
from .dense_format import EXACT, check_dense_format
from .graph_forward import GraphForward
from .layers import ExpertsLayer
from .stepping import StepForward
from .weights import into_module

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Progress = Callable[[int, int | None, str], None]


class LayerSource(Mapping[int, Weights]):
    """A mapping from layer number to its experts, read on access; `files` are their source, None if it is memory."""

    def __init__(
        self,
        layers: list[ExpertsLayer],
        read: Callable[[ExpertsLayer], Weights],
        files: list[Path] | None = None,
    ) -> None:
        self._layers, self._read, self.files = {layer.index: layer for layer in layers}, read, files

    def __getitem__(self, index: int) -> Weights:
        return self._read(self._layers[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class EngineCall:
    """y = engine(layer, x, ids, weights): the callable that stands in for one layer's experts."""

    def __init__(self, engine: Engine, layer: int) -> None:
        self.engine, self.layer = engine, layer

    @torch.compiler.disable
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.engine(self.layer, hidden_states, top_k_index, top_k_weights)

    def __deepcopy__(self, memo: dict[int, object]) -> EngineCall:
        return self  # a copy of the model computes through the same engine

    def __reduce__(self) -> NoReturn:
        raise pickling_error()


class _KeepsDevice:
    """Replaces a module's `_apply`, so that model.to(...) skips experts whose weights are in the store."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return self._module


class Attached:
    """A model whose experts an engine computes, with a record of every change, so that `detach` can undo them."""

    def __init__(
        self, model: PreTrainedModel, layers: list[ExpertsLayer], store: ExpertStore, owned: bool, home: torch.device
    ) -> None:
        self.model, self.layers, self.store, self.owned, self.home = model, layers, store, owned, home
        self.engine: Engine
        self.dense_format = EXACT
        self.adapters = ModelAdapters(model, {})
        self._configs: dict[int, PreTrainedConfig] = {}
        self._trained: list[str] = []  # names, because releasing an expert's parameter replaces the object
        self._hooks: list[RemovableHandle] = []
        self._compile: bool | None = None
        self._whole = self._within = False  # whether the whole model is running; whether the base runs inside it

    def begin(self, options: dict[str, Any], batch: int = 1, max_length: int | None = None) -> None:
        """Creates the engine and installs it. If creating it fails, the model stays as it was, on its home device."""
        options = dict(options)
        device = chosen_device(options.get("device", "auto"))
        self._freeze()
        try:
            self.move(device)
            if device.type == "cuda" and options.get("gpu_budget", "auto") == "auto":
                options["gpu_budget"] = automatic(self.model, device, batch, max_length)
            self.engine = Engine(self.store, **options, adapters=self.adapters.for_engine())
            try:
                self.adapters.install()
            except BaseException:
                self.engine.close()
                raise
        except BaseException:
            self.adapters.remove()
            self._thaw()
            self.move(self.home)
            raise
        self._put_in()
        if self.adapters.names:
            self.adapters.use(self.adapters.names[0], self.engine)

    def load_adapter(self, adapter: AdapterArgument) -> tuple[str, ...]:
        """Adds the adapters of this argument, and returns their names; `use_adapter` selects them."""
        check_dense_format(self.dense_format, self.engine.device, adapter)
        folders = reading.folders_of(adapter)
        known = [name for name in folders if name in self.adapters.names]
        if known:
            raise ValueError(f"offload: there is already an adapter {known[0]!r}: give {{name: folder}} with another")
        with torch.no_grad():
            read = {name: reading.read(self.model, self.layers, folder) for name, folder in folders.items()}
        for name, one in read.items():
            self.adapters.add(name, one, self.engine)
        return tuple(read)

    def use_adapter(self, names: str | Sequence[str] | None) -> None:
        self.adapters.use(names, self.engine)

    def _put_in(self) -> None:
        register()
        released: dict[int, nn.Parameter] = {}
        for layer in self.layers:
            module = layer.module
            if is_undispatched(module):
                call_ours(module)
            else:  # a copy, so that neither other users of the config nor set_experts_implementation change it
                self._configs[layer.index] = module.config
                module.config = copy.copy(module.config)
                module.config._experts_implementation_internal = NAME
            module.__dict__[ENGINE] = EngineCall(self.engine, layer.index)
            release(module, released)
            module.__dict__["_apply"] = _KeepsDevice(module)
        self._hooks = [
            self.model.register_forward_pre_hook(self._begin_forward, with_kwargs=True),
            self.model.register_forward_hook(self._end_forward),
        ]
        base = getattr(self.model, "base_model", self.model)
        if base is not self.model:  # the base may be called alone, for its hidden states
            self._hooks.append(base.register_forward_pre_hook(self._begin_base, with_kwargs=True))
            self._hooks.append(base.register_forward_hook(self._end_base))
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module) and self.engine.device.type == "cpu":
            self._hooks.append(head.register_forward_pre_hook(_dense_rows))
        experts = {id(layer.module) for layer in self.layers}
        for module in self.model.modules():  # every module that contains experts
            if any(id(below) in experts for below in module.modules()):
                self._hooks.append(module.register_state_dict_pre_hook(self._refuse_state))
                self._hooks.append(module.register_load_state_dict_pre_hook(self._refuse_state))
        if "forward" not in self.model.__dict__:  # a user's own stays
            on_gpu = self.engine.device.type == "cuda" or self.engine.device_lanes is not None
            cast("Any", self.model).forward = (GraphForward if on_gpu else StepForward)(
                self.model, {one.index: one.path for one in self.layers}, self.engine, {one.id for one in self._hooks}
            )
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:  # on a GPU with a static cache, `generate` compiles by itself, into CUDA graphs
            self._compile, generation.disable_compile = generation.disable_compile, True

    def __deepcopy__(self, memo: dict[int, object]) -> Attached:
        return self  # the hooks of a copied model use the same engine

    def __reduce__(self) -> NoReturn:
        raise pickling_error()

    def _begin_forward(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Tells the engine the batch size and length, so that the guard can report which token a row is."""
        self._whole = True
        inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
        tokens = next((value for value in inputs if isinstance(value, Tensor)), None)
        if tokens is not None and tokens.dim() >= 2:
            self.engine.begin_forward(tokens.shape[0], tokens.shape[1])

    def _end_forward(self, model: nn.Module, args: tuple[object, ...], outputs: object) -> None:
        self._whole = False
        self.engine.end_forward(_last(outputs))

    def _begin_base(self, base: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if recorded(self.engine) is not None:
            return
        self._within, self._whole = self._whole, False
        if not self._within:
            self._begin_forward(base, args, kwargs)
            self._whole = False

    def _end_base(self, base: nn.Module, args: tuple[object, ...], outputs: object) -> None:
        if not self._within and recorded(self.engine) is None:
            self._end_forward(base, args, outputs)

    def detach(self) -> PreTrainedModel:
        """Returns the plain model: experts restored from the store, everything on its home device."""
        parameters: dict[int, nn.Parameter] = {}
        self.adapters.remove()
        for layer in self.layers:
            layer.module.__dict__.pop("_apply", None)
            into_module(layer, self.store, self.home, parameters)
            layer.module.__dict__.pop(ENGINE, None)
            if layer.index in self._configs:
                layer.module.config = self._configs[layer.index]
            else:
                del layer.module.forward
        for hook in self._hooks:
            hook.remove()
        if isinstance(self.model.__dict__.get("forward"), StepForward):
            del self.model.forward
        self._thaw()
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.disable_compile = self._compile
        self.move(self.home)
        return self.model

    def _freeze(self) -> None:
        """Freezes all parameters, so that the engine's x needs no gradient even outside no_grad."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self._trained.append(name)
                parameter.requires_grad_(False)

    def _thaw(self) -> None:
        for name in self._trained:
            self.model.get_parameter(name).requires_grad_(True)

    def _refuse_state(self, *_: object) -> None:
        """Refuses state_dict and load_state_dict, which would leave out the experts."""
        if not self.adapters.injecting:  # peft reads the names of the model that it changes
            raise RuntimeError(
                "offload: the experts of this model are in a store, not in its parameters, so state_dict, "
                "save_pretrained and load_state_dict would miss them: call detach() on what offload() returned to get "
                "the plain model back first. An adapter goes into load_adapter() of what offload() returned"
            )

    def move(self, device: torch.device) -> None:
        """Moves everything except the experts to the device."""
        experts = {id(layer.module) for layer in self.layers}
        for module in self.model.modules():
            if id(module) not in experts:
                module._apply(lambda t: t if t.is_meta else t.to(device), recurse=False)


def _dense_rows(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The head's input with dense strides. With those of the last position of a longer input torch copies the weight:
    660 ms instead of 24 for 32,768 x 1,024 in bfloat16 (AMD EPYC, 2 cores, torch 2.13, 2026-11).
    """
    x, *others = inputs
    return x.reshape(-1, x.shape[-1]).contiguous().view(x.shape), *others


def _last(outputs: object) -> Tensor | None:
    """The logits of every row's last token, or its hidden state if the model has no head."""
    for name in ("logits", "last_hidden_state"):
        states = getattr(outputs, name, None)
        if isinstance(states, Tensor) and states.dim() == 3 and states.shape[1]:
            return states[:, -1]
    return None


def release(module: nn.Module, released: dict[int, nn.Parameter]) -> None:
    """Replaces the module's parameters by empty ones; layers that share a parameter share its replacement."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not parameter.is_meta:
            if id(parameter) not in released:
                empty = torch.empty_like(parameter, device="meta")
                released[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = released[id(parameter)]


def open_store(
    source: LayerSource,
    store: ExpertStore | str | Path | None,
    layers: list[ExpertsLayer],
    cpu_format: str,
    exact: bool,
    progress: Progress | None,
) -> tuple[ExpertStore, bool]:
    """The store of these weights (given, cached or newly built), and whether this call opened it."""
    options = layers[0].spec.options()
    for layer in layers:
        if layer.spec.options() != options:
            raise ValueError(
                f"offload: layer {layer.index} uses {layer.spec.options()}, but layer {layers[0].index} uses "
                f"{options}: all layers of a store must have the same activation"
            )
    if store is None:
        return cached_store(source, format=cpu_format, **options, progress=progress), True
    if isinstance(store, ExpertStore):
        _check_given(store, source, cpu_format, exact, options)
        return store, False
    if not Path(store).exists():
        return ExpertStore.build(source, store, format=cpu_format, **options, progress=progress), True
    opened = ExpertStore.open(store)
    try:
        _check_given(opened, source, cpu_format, exact, options)
    except BaseException:
        opened.close()
        raise
    return opened, True


def _check_given(store: ExpertStore, source: LayerSource, cpu_format: str, exact: bool, options: SharedOptions) -> None:
    if exact and not store.exact:
        raise ValueError(
            f"offload: the store {store.path} holds the weights in {store.format}, which rounded them: pass "
            "exact=False (--format on the command line), or leave out the store"
        )
    # "auto" accepts a store of these weights in any format; lossy ones were refused above
    format = None if cpu_format == "auto" else cpu_format
    whole = source.files is None and store.exact  # the store will soon hold the only copy of the model's weights
    store.check_source(source, format=format, whole=whole, **options)
