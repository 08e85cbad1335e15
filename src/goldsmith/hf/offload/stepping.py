"""The forward of a model for one new token of each sequence: the native step, or else the model's own forward.

The cache stays transformers': its layers become views of the step's buffers, and any other change of a layer is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from ...core import native
from ...offload.decoding.cache import SequenceCache, SequenceRows, StepCache
from ...offload.decoding.model import MOST_ROWS
from ...offload.settings import pickling_error
from .decoder import NotDescribed, described
from .untouched import OWN, Touched, Untouched

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ...offload.engine import Engine


class TokenStep(Protocol):
    """Called with tokens [rows] and a cache: the logits of the tokens' successors [rows, vocabulary]

    cache   a StepCache; the native step also takes SequenceRows
    """

    def __call__(self, tokens: Tensor, cache: Any) -> Tensor: ...

    def close(self) -> None: ...


# keywords of a forward that the step knows; any other that is not None or False belongs to the model's own forward
KNOWN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position",
         "logits_to_keep", "return_dict"}  # fmt: skip
OUTPUTS = "output_hidden_states", "output_attentions", "output_router_logits"  # that a config asks for


class BufferedLayer(DynamicLayer):
    """A layer of transformers' cache whose tensors are the used part of a step's buffers, until they are set."""

    def __init__(self, cache: StepCache, index: int) -> None:
        self._cache, self._index = cache, index
        self._own: dict[str, Tensor | None] = {}
        buffer = cache.keys[index]
        self.is_initialized, self.dtype, self.device = True, buffer.dtype, buffer.device

    @property
    def keys(self) -> Tensor | None:
        return self._tensor("keys")

    @keys.setter
    def keys(self, tensor: Tensor | None) -> None:
        self._set("keys", tensor)

    @property
    def values(self) -> Tensor | None:
        return self._tensor("values")

    @values.setter
    def values(self, tensor: Tensor | None) -> None:
        self._set("values", tensor)

    @property
    def step_cache(self) -> StepCache | None:
        """The step's buffers, if this layer and all others still have their tensors."""
        return self._cache if self._cache.shared else None

    def __copy__(self) -> DynamicLayer:
        """A layer of its own, which does not grow with this one."""
        layer = DynamicLayer()
        layer.keys, layer.values = self.keys, self.values
        layer.is_initialized, layer.dtype, layer.device = True, self.dtype, self.device
        return layer

    def _tensor(self, name: str) -> Tensor | None:
        if name in self._own:
            return self._own[name]
        return getattr(self._cache, name)[self._index][:, :, : self._cache.length]

    def _set(self, name: str, tensor: Tensor | None) -> None:
        self._own[name] = tensor
        self._cache.shared = False


class StepForward:
    """`model.forward`: the native step for one token of each of up to 8 sequences, and the model's own for the rest

    experts    {layer: path of its experts}
    hooks      ids of hooks that a step need not call: those that attaching has put on the model and its base
    why_not    the reason why the last cache got no step, "" if it did
    """

    def __init__(
        self, model: PreTrainedModel, experts: Mapping[int, str], engine: Engine, hooks: Collection[int]
    ) -> None:
        self._model, self._experts, self._engine, self._hooks = model, experts, engine, set(hooks)
        self._state: Untouched | None = None
        self._step: TokenStep | None = None
        self._by_adapters: dict[tuple[str, ...], tuple[Untouched, TokenStep]] = {}
        self.why_not = "no token was generated yet"
        functools.update_wrapper(self, self._plain)  # `generate` reads the signature

    @property
    def _plain(self) -> Callable[..., Any]:
        return functools.partial(type(self._model).forward, self._model)

    def __call__(self, *arguments: object, **options: Any) -> Any:
        if not arguments and not torch.compiler.is_compiling():
            cache = self._cache_of(options)
            if cache is not None and self._step is not None:
                return self._stepped(options, cache, self._step)
        return self._plain(*arguments, **options)

    def permit(self, hooks: Iterable[int]) -> None:
        """Steps are computed in spite of these hooks on the model's modules, and do not call them."""
        self._hooks |= set(hooks)

    def ready(self, rows: int) -> bool:
        """Whether there is a step for the model as it is now, and so many sequences."""
        if any(number not in self._hooks for name in OWN for number in getattr(self._model, name)):
            return False  # a step without the model's own call would not call them
        return rows <= MOST_ROWS and not self._model.training and self._prepared()

    @property
    def seconds(self) -> dict[str, float] | None:
        """What the parts of the native steps took so far; None if there was none."""
        return getattr(self._step, "seconds", None)

    def stepper(self, cache: DynamicCache, mask: Tensor, steps: int) -> Callable[[Tensor], Tensor]:
        """float32 logits [rows, vocabulary] of one more token [rows] after those in `cache`, at most `steps` times

        mask   [rows, cached]: 0 for padding on the left. `ready` was True.
        """
        rows = len(mask)
        buffers = self._adopted(cache, rows, torch.nn.functional.pad(mask, (0, 1), value=1))
        step, engine = self._step, self._engine
        if buffers is None or step is None:
            raise RuntimeError("offload: the model's cache has layers that a native step cannot continue")
        buffers.reserve(buffers.length + steps)

        def run(tokens: Tensor) -> Tensor:
            engine.begin_forward(rows, 1)
            logits = step(tokens, buffers).float()
            engine.end_forward(logits)
            return logits

        return run

    def best(self, logits: Tensor) -> list[int]:
        """The token of each row with the largest of these logits, which may be those of the step before."""
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    def sequence(self, cache: DynamicCache, room: int) -> SequenceCache | None:
        """The cache of one sequence for `step_sequences`, copied, with room for so many positions; None if there is no
        step for the model as it is now.
        """
        layers: list[Any] = [layer for layer in cache.layers if type(layer) is DynamicLayer]
        if not self.ready(1) or not len(layers) == len(cache.layers) == self._layers():
            return None
        return SequenceCache([layer.keys[0] for layer in layers], [layer.values[0] for layer in layers], room)

    def step_sequences(self, tokens: Sequence[int], sequences: Sequence[SequenceCache]) -> Tensor:
        """float32 logits [rows, vocabulary] of one more token of each sequence; `ready` was True"""
        step, engine = self._step, self._engine
        if step is None:
            raise RuntimeError("offload: the model has no native step")
        logits = []
        for first in range(0, len(tokens), MOST_ROWS):
            at = slice(first, first + MOST_ROWS)
            some = torch.tensor(tokens[at], device="cpu")
            engine.begin_forward(len(some), 1)
            logits.append(step(some, SequenceRows(sequences[at])).float())
            engine.end_forward(logits[-1])
        return torch.cat(logits)

    def _stepped(self, options: Mapping[str, Any], cache: StepCache, step: TokenStep) -> Any:
        logits = step(options["input_ids"], cache)
        return MoeCausalLMOutputWithPast(logits=logits.unsqueeze(1), past_key_values=options["past_key_values"])

    def _cache_of(self, options: Mapping[str, Any]) -> StepCache | None:
        """The buffers of the call's cache, if the step can compute the call."""
        ids, cache = options.get("input_ids"), options.get("past_key_values")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or not 0 < len(ids) <= MOST_ROWS:
            return None
        if type(cache) is not DynamicCache or not cache.layers or options.get("use_cache") is False:
            return None
        if torch.is_grad_enabled() and any(p.requires_grad for p in self._model.parameters()):
            return None
        if options.get("return_dict") is False or self._model.training or torch.is_autocast_enabled("cpu"):
            return None
        if any(getattr(self._model.config, name, False) for name in OUTPUTS):
            return None
        if any(value is not None and value is not False for name, value in options.items() if name not in KNOWN):
            return None
        first = cache.layers[0]
        buffers = first.step_cache if type(first) is BufferedLayer else None
        if buffers is None:
            buffers = self._adopted(cache, len(ids), options.get("attention_mask"))
        elif not all(type(layer) is BufferedLayer and layer.step_cache is buffers for layer in cache.layers):
            return None
        elif not self._prepared():
            return None
        if buffers is None or buffers.rows != len(ids) or not _fits(buffers, options):
            return None
        return buffers

    def _adopted(self, cache: DynamicCache, rows: int, mask: Tensor | None) -> StepCache | None:
        """Moves the cache's tensors into buffers of the step."""
        if not self._prepared() or len(cache.layers) != self._layers():
            return None
        layers: list[Any] = [layer for layer in cache.layers if type(layer) in (DynamicLayer, BufferedLayer)]
        if len(layers) < len(cache.layers) or not all(layer.get_seq_length() for layer in layers):
            return None
        lengths = {layer.keys.shape[2] for layer in layers}
        starts = _starts(mask, rows, next(iter(lengths)))
        if starts is None or len(lengths) > 1 or any(len(layer.keys) != rows for layer in layers):
            return None
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        layers.clear()
        cache.layers[:] = []
        buffers = StepCache(keys, values, starts)
        cache.layers[:] = [BufferedLayer(buffers, index) for index in range(len(keys))]
        return buffers

    def _layers(self) -> int:
        """The layers of a cache."""
        return len(self._experts)

    def _prepared(self) -> bool:
        """Whether there is a step for the model as it is now."""
        engine = self._engine
        if native.reason() is not None or engine.device.type != "cpu" or engine.closed:
            return False
        active = engine.adapters.active
        known = self._by_adapters.get(active)
        if known is not None and known[0].still:
            (self._state, self._step), self.why_not = known, ""
            return True
        from ...offload.decoding._native import DecodeStep  # imports the library's structures

        self._state = None
        try:
            state = Untouched(self._model, self._hooks)
            model = described(self._model, self._experts)
        except (NotDescribed, Touched) as reason:
            self.why_not = str(reason)
            return False
        if known is not None:  # the model has changed, so it has for the other adapters
            for _, step in self._by_adapters.values():
                step.close()
            self._by_adapters.clear()
        self._state, self._step, self.why_not = state, DecodeStep(engine, model, engine.threads), ""
        self._by_adapters[active] = self._state, self._step
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> StepForward:
        return type(self)(memo[id(self._model)], self._experts, self._engine, self._hooks)

    def __reduce__(self) -> NoReturn:
        raise pickling_error()


def _starts(mask: Tensor | None, rows: int, cached: int) -> Tensor | None:
    """The first position of each row [rows]; None unless the mask is padding on the left."""
    if mask is None:
        return torch.zeros(rows, dtype=torch.int64, device="cpu")
    if mask.dim() != 2 or mask.shape != (rows, cached + 1) or not mask.is_cpu:
        return None
    starts = (mask == 0).sum(1)
    left = torch.arange(cached + 1, device="cpu") >= starts[:, None]
    return starts if bool((left == mask.bool()).all()) and bool((starts <= cached).all()) else None


def _fits(buffers: StepCache, options: Mapping[str, Any]) -> bool:
    """Whether mask and positions are those of a step after this cache."""
    mask, positions, length = options.get("attention_mask"), options.get("position_ids"), buffers.length
    if mask is None:
        if buffers.padded:
            return False
    elif (
        mask.dim() != 2
        or mask.shape != (buffers.rows, length + 1)
        or not torch.equal(mask.bool().cpu(), torch.arange(length + 1, device="cpu") >= buffers.starts[:, None])
    ):
        return False
    if positions is None:
        return not buffers.padded
    wanted = buffers.starts.neg().add_(length).tolist()
    given = positions.reshape(-1).tolist()
    return given == wanted or (len(given) == 1 and given * len(wanted) == wanted)
