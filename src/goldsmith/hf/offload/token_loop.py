"""The loop from token to token over a native step: the same tokens as `model.generate` draws, without its work between
two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .stepping import StepForward

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel
    from transformers.generation.logits_process import LogitsProcessor
    from transformers.generation.streamers import BaseStreamer

# what the loop knows of a generation config; with anything else that is not the default, `model.generate` draws
KNOWN = {
    "bos_token_id", "eos_token_id", "pad_token_id", "max_new_tokens", "max_length", "num_beams", "do_sample",
    "temperature", "top_p", "top_k", "transformers_version", "disable_compile", "use_cache", "_from_model_config",
}  # fmt: skip

CHUNK = 512  # tokens of a prompt in one call on the CPU: Ctrl-C waits for a call's operation; as the server computes it


def draw(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    config: GenerationConfig,
    streamer: BaseStreamer,
    processors: Sequence[LogitsProcessor],
) -> bool:
    """Continues every row until its end token or config.max_new_tokens; False, with nothing done, without a step."""
    forward = model.__dict__.get("forward")
    unknown = {name for name, value in config.to_diff_dict().items() if value not in (None, False)} - KNOWN
    if unknown or not isinstance(forward, StepForward) or not forward.ready(len(inputs["input_ids"])):
        return False
    with torch.no_grad():
        _draw(model, forward, inputs, config, streamer, LogitsProcessorList([*processors, *_warpers(config)]))
    return True


def _draw(
    model: Any, forward: StepForward, inputs: dict[str, Tensor], config: GenerationConfig, streamer: BaseStreamer,
    processors: Any,
) -> None:  # fmt: skip
    ids = inputs["input_ids"].cpu()
    mask = inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask.cpu()
    ends = config.eos_token_id or []
    stop = set(ends if isinstance(ends, list) else [ends])
    streamer.put(ids)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    device = model.device
    there, mask_there, positions_there = ids.to(device), mask.to(device), positions.to(device)
    cache, width = DynamicCache(config=model.config), ids.shape[1]
    chunk = CHUNK if device.type == "cpu" else width  # a GPU copies a layer's experts once for a whole prompt
    for begin in range(0, width, chunk):
        part = slice(begin, begin + chunk)
        outputs = model(
            there[:, part], attention_mask=mask_there[:, : part.stop], position_ids=positions_there[:, part],
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
    logits, step = outputs.logits[:, -1].float(), None
    running = [True] * len(ids)
    for left in range(int(config.max_new_tokens or 0), 0, -1):
        scores = processors(there, logits) if processors else logits
        if config.do_sample:
            drawn = torch.multinomial(torch.softmax(scores, -1), 1).squeeze(1).tolist()
        else:
            drawn = forward.best(scores)
        drawn = [token if runs else config.pad_token_id or 0 for token, runs in zip(drawn, running)]
        tokens = torch.tensor(drawn, device="cpu")
        streamer.put(tokens)
        running = [runs and token not in stop for token, runs in zip(drawn, running)]
        if left == 1 or not any(running):
            break
        if step is None:
            step = forward.stepper(outputs.past_key_values, mask, left)
            del outputs
        logits = step(tokens)
    streamer.end()


def _warpers(config: GenerationConfig) -> list[LogitsProcessor]:
    """In the order of `generate`."""
    warpers: list[LogitsProcessor] = []
    if config.do_sample:
        if config.temperature is not None and config.temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            warpers.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1.0:
            warpers.append(TopPLogitsWarper(config.top_p))
    return warpers
