"""The forward of a model on a GPU for one new token of each sequence: one recording of the model's own modules.

The modules run as they are, with two replacements: keys and values go into buffers that keep their place, and
attention reads their lengths from memory. So one recording serves every length up to the buffers' capacity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...core import native
from ...offload.decoding.cache import StepCache
from ...offload.decoding.graph import GraphStep, NotFinite, StepInputs
from ...offload.decoding.graph_model import GraphModel
from ...offload.lanes.kernels import kernel_module
from ..rotary_lengths import length_types
from .decoder import NotDescribed, described
from .stepping import StepForward
from .untouched import Touched, Untouched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...offload.adapters import ActiveLora
    from ...offload.engine import Engine

NAME = "goldsmith_step"  # the attention in a recording
PLAIN = {"sdpa", "eager"}  # attention that is replaced in a recording
WAITING = 16  # steps with other adapters before they are recorded: a server may change them at every step
_INPUTS: ContextVar[StepInputs | None] = ContextVar("goldsmith_step_inputs", default=None)


class WritingLayer(DynamicLayer):
    """A layer of the cache in a recording: writes keys and values at the step's position, and returns the buffers."""

    def __init__(self, inputs: StepInputs, index: int) -> None:
        super().__init__()
        self._inputs, self._index = inputs, index
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        inputs, index = self._inputs, self._index
        keys, values = inputs.keys[index], inputs.values[index]
        keys.index_copy_(2, inputs.last, key_states)
        values.index_copy_(2, inputs.last, value_states)
        return keys, values

    def get_seq_length(self) -> int:
        return 0  # nothing in a recording may depend on the length


def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
    dropout: float = 0.0, **options: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """[B, 1, heads, D]: attention of a step's tokens over the buffers, as `ALL_ATTENTION_FUNCTIONS` calls it."""
    inputs = _INPUTS.get()
    if inputs is None:
        raise RuntimeError(f"{NAME} computes only steps of goldsmith's recordings")
    special = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if special or attention_mask is not None:
        raise NotDescribed(f"its attention has {special[0] if special else 'a mask'}")
    if not any(key is each for each in inputs.keys):
        raise NotDescribed("its attention changes keys after they are cached")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = kernel_module("offload.decoding._triton").attend
    return attend(query[:, :, 0], key, value, inputs.last, inputs.starts, scale)[:, None], None


class GraphForward(StepForward):
    """`model.forward` of a model on a GPU: a recorded step, and the model's own forward for the rest."""

    def __init__(
        self, model: PreTrainedModel, experts: Mapping[int, str], engine: Engine, hooks: Collection[int]
    ) -> None:
        super().__init__(model, experts, engine, hooks)
        ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
        self._graph: GraphStep | None = None
        self._refused = ""  # why the model cannot be recorded as it is
        self._lora: ActiveLora | None = None  # with which it was asked for last
        self._waiting = 0  # steps until these are recorded

    @functools.cached_property
    def _configs(self) -> dict[int, Any]:
        """The configs that name an attention; the model of a copy has them only once it is complete."""
        configs = [getattr(module, "config", None) for module in self._model.modules()]
        return {id(config): config for config in configs if hasattr(config, "_attn_implementation_internal")}

    def _layers(self) -> int:
        return int(self._model.config.get_text_config().num_hidden_layers)

    def stepper(self, cache: DynamicCache, mask: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
        rows = len(mask)
        buffers = self._adopted(cache, rows, torch.nn.functional.pad(mask, (0, 1), value=1))
        if buffers is None or self._graph is None:
            raise RuntimeError("offload: the model's cache has layers that a recorded step cannot continue")
        buffers.reserve(buffers.length + steps)

        def run(tokens: Tensor) -> Tensor:
            nonlocal buffers
            if buffers is None or not buffers.shared:  # the step before ran as the model's own forward
                buffers = self._adopted(cache, rows, mask_of(starts, cache.get_seq_length() + 1))
            logits = None if buffers is None else self._next(tokens, buffers)
            if logits is None:
                options = {"input_ids": tokens.view(rows, 1), "past_key_values": cache}
                logits = self._by_modules(options, starts).logits[:, -1].float()
            return logits

        starts = buffers.starts
        return run

    def _adopted(self, cache: DynamicCache, rows: int, mask: Tensor | None) -> StepCache | None:
        return super()._adopted(cache, rows, None if mask is None else mask.cpu())

    def best(self, logits: Tensor) -> list[int]:
        known = None if self._graph is None else self._graph.best(logits)
        return super().best(logits) if known is None else known

    def _stepped(self, options: Mapping[str, Any], cache: StepCache, step: Any) -> Any:
        logits = self._attempt(step, options["input_ids"], cache)
        if logits is None:
            return self._by_modules(options, cache.starts)
        return MoeCausalLMOutputWithPast(logits=logits.unsqueeze(1), past_key_values=options["past_key_values"])

    def _next(self, tokens: Tensor, cache: StepCache) -> Tensor | None:
        """Float32 logits that are valid until the next step; None if the model's own forward must compute them."""
        return None if self._graph is None else self._attempt(self._graph.next, tokens, cache)

    def _attempt(self, step: Callable[..., Tensor], tokens: Tensor, cache: StepCache) -> Tensor | None:
        """What the step gives; None if the model's own forward must compute it."""
        if self._engine.watched:
            return None
        try:
            return step(tokens, cache)
        except NotFinite:
            return None
        except NotDescribed as reason:  # known only once the modules run
            self._refused = str(reason)
            self._forget(str(reason))
            return None

    def _by_modules(self, options: Mapping[str, Any], starts: Tensor) -> Any:
        """The step by the model's own forward, whose engine says where numbers stop being finite."""
        ids, engine, cache = options["input_ids"].to(self._engine.device), self._engine, options["past_key_values"]
        length = cache.get_seq_length()
        engine.begin_forward(len(ids), 1)
        outputs = self._plain(
            input_ids=ids, past_key_values=cache, use_cache=True,
            attention_mask=mask_of(starts, length + 1).to(ids.device),
            position_ids=(length - starts)[:, None].to(ids.device),
        )  # fmt: skip
        engine.end_forward(outputs.logits[:, -1])
        return outputs

    def _prepared(self) -> bool:
        engine = self._engine
        try:
            self._check()
            if self._state is None or not self._state.still:
                self._forget("")
                self._refused = ""
                self._state = Untouched(self._model, self._hooks)
            if self._refused:
                raise NotDescribed(self._refused)
            if self._graph is None:
                config = self._model.config.get_text_config()
                k = getattr(config, "num_experts_per_tok", None) or config.top_k_experts
                self._graph = self._step = GraphStep(engine, self._runner(), k, self._model.dtype)
        except (NotDescribed, Touched) as reason:
            self._forget(str(reason))
            return False
        return True

    def _runner(self) -> Callable[[StepInputs], Tensor]:
        """What a recording runs."""
        try:
            return GraphModel(self._engine, described(self._model, self._experts))
        except NotDescribed:
            self._check_modules()
            return self._run

    def _forget(self, why: str) -> None:
        if self._graph is not None:
            self._graph.close()
        self._graph = self._step = None
        self.why_not = why

    def _check(self) -> None:
        """Raises NotDescribed if the model or its engine has no recorded step."""
        engine = self._engine
        if engine.closed:
            raise NotDescribed("its engine was closed")
        if engine.watched:
            raise NotDescribed("faults are injected, or a trace is recorded")
        lora = engine.adapters.lora
        if lora is not self._lora:
            self._lora, self._waiting = lora, 0 if self._lora is None else WAITING
        if self._waiting:
            self._waiting -= 1
            raise NotDescribed("its adapters changed a moment ago")
        if engine.settings.lanes not in ("auto", "cpu") or engine.settings.adaptive:
            raise NotDescribed("its engine has lanes that decide at every call")
        if native.reason() is not None:
            raise NotDescribed("the native library is missing")

    def _check_modules(self) -> None:
        """Raises NotDescribed if a recording cannot run the model's own modules."""
        model = self._model
        for rope in length_types(model):
            raise NotDescribed(f"its rotary embedding is of type {rope}")
        used = {config._attn_implementation_internal for config in self._configs.values()} - PLAIN - {None}
        if used:
            raise NotDescribed(f"its attention is computed by {sorted(used)[0]}")

    def _run(self, inputs: StepInputs) -> Tensor:
        """The logits [rows, vocabulary] of the model's own modules over the buffers."""
        try:
            return self._logits(inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # for example, modules that read numbers of the device cannot be recorded
            raise NotDescribed(f"its modules cannot be recorded: {error}") from error

    def _logits(self, inputs: StepInputs) -> Tensor:
        cache = Cache(layers=[WritingLayer(inputs, index) for index in range(len(inputs.keys))])
        token = _INPUTS.set(inputs)
        try:
            with self._replaced():
                outputs = self._plain(
                    input_ids=inputs.tokens, position_ids=inputs.positions, past_key_values=cache, use_cache=True,
                    logits_to_keep=1,
                )  # fmt: skip
        finally:
            _INPUTS.reset(token)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        """The model's attention is ours."""
        before = {key: config._attn_implementation_internal for key, config in self._configs.items()}
        try:
            for config in self._configs.values():
                config._attn_implementation_internal = NAME
            yield
        finally:
            for key, config in self._configs.items():
                config._attn_implementation_internal = before[key]


def mask_of(starts: Tensor, length: int) -> Tensor:
    """The attention mask [rows, length] of sequences that begin at `starts`."""
    return (torch.arange(length, device=starts.device) >= starts[:, None]).long()
