"""Plain transformers over the numbers of a GGUF file, timed token by token."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model.gguf_files import read
from .parts import timed_parts

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
Timed = tuple[list[float], list[int]]  # seconds of each token after the first, and all tokens


class TransformersEngine:
    """Plain transformers, with weights that a GGUF file holds; experts as one grouped product."""

    implementation = "grouped_mm"
    inference = True

    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM  # noqa: F401 - before the memory is read

        self.options = options
        self.model: Any = None

    def load(self) -> str:
        self.model = plain_model(self.options, DTYPES[self.options["dtype"]], self.implementation)
        return ""

    def logits(self, ids: list[int]) -> Tensor:
        return self.model(torch.tensor([ids], device=self.model.device)).logits[0].float().cpu()

    def prompt(self, ids: list[int]) -> float:
        times, _ = self._generate(ids, 1)
        return times[0]

    def decode(self, ids: list[int], count: int) -> Timed:
        times, tokens = self._generate(ids, count + 1)
        return times[1:], tokens

    def parts(self, ids: list[int], count: int) -> dict[str, float]:
        """Seconds of a token in each part of the model, the first token not counted."""
        with timed_parts(self.model) as clock:
            self._generate(ids, count + 1, after_first=clock.start)
        return {name: seconds / count for name, seconds in clock.seconds.items()}

    def close(self) -> None:
        self.model = None

    def _generate(self, ids: list[int], count: int, after_first: Callable[[], None] = lambda: None) -> Timed:
        """Seconds of each token, and the tokens, through the call that `goldsmith generate` makes."""
        from goldsmith.hf.offload import generation

        times: list[float] = []

        def arrived(row: int, text: str) -> None:
            times.append(time.perf_counter())
            if len(times) == 1:
                after_first()

        out = generation.Generation([])
        prompt = torch.tensor([ids])
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
        began = time.perf_counter()
        generation.generate(
            self.model, Numbers(), [""], generation=out, inputs=inputs, max_new_tokens=count, on_piece=arrived
        )  # type: ignore[arg-type]
        return [after - before for before, after in zip([began, *times], times)], out.outputs[0].tokens


def plain_model(options: dict[str, Any], dtype: torch.dtype, implementation: str, *, experts: bool = True) -> Any:
    """transformers' model with the numbers of a GGUF file, on the device of the options.

    experts=False leaves the experts without numbers.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from goldsmith.hf.checkpoint.loading import fill_transient_buffers

    config = Qwen3MoeConfig(**options["config"])
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(read(Path(options["path"]), dtype, experts=experts), strict=False, assign=True)
    if config.tie_word_embeddings:
        model.tie_weights()
    left = [n for n, p in model.named_parameters() if p.is_meta and (experts or ".experts." not in n)]
    if left:
        raise ValueError(f"{options['path']} lacks {left[0]}")
    fill_transient_buffers(model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with contextlib.suppress(AttributeError):
        model.set_experts_implementation(implementation)
    return model.eval().to(options["device"]) if options.get("whole") else model.eval()


class Numbers:
    """A tokenizer of numbers: the model has no text."""

    eos_token_id = pad_token_id = None

    def decode(self, ids: list[int], **options: object) -> str:
        return "".join(f" {i}" for i in ids)
