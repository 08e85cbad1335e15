"""EleutherAI's lm-evaluation-harness on an offloaded model: the harness's model "goldsmith".

    python -m goldsmith.hf.evaluation run --model goldsmith --model_args pretrained=DIR,gpu_budget=8GiB --tasks ...

runs the harness's own command after `register_lm_eval`. Needs lm-eval: pip install lm-eval.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from ..offload.attach import from_pretrained
from .offload.generation import tokenizer_of
from .offload.loading import folder

NAME = "goldsmith"


@cache
def register_lm_eval() -> type:
    """Registers the model "goldsmith" with lm-eval, and returns its class

    A harness model of this class is transformers' own HFLM over `offload.from_pretrained(pretrained, ...)`. Keywords
    of HFLM (batch_size, max_length, add_bos_token, prefix_token_id, ...) go there, all others to `from_pretrained`:
    adapter, gpu_budget, store, exact, cpu_format, device, dtype, threads. `close()` frees the experts.

        harness = register_lm_eval()
        lm_eval.simple_evaluate(model=harness("DIR", adapter="ADAPTER"), tasks=[...])

    Raises ImportError without lm-eval, and ValueError and TypeError as `offload.from_pretrained` does.
    """
    if find_spec("lm_eval") is None:
        raise ImportError("goldsmith.hf.evaluation needs lm-eval, which is not installed: pip install lm-eval")
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    own = (
        "batch_size", "max_batch_size", "max_length", "truncation", "logits_cache", "add_bos_token", "prefix_token_id",
        "softmax_dtype", "think_end_token", "enable_thinking", "chat_template_args",
    )  # fmt: skip

    @register_model(NAME)
    class HarnessModel(HFLM):
        """lm-eval's HFLM over an offloaded model."""

        def __init__(
            self, pretrained: str, device: str | None = None, dtype: torch.dtype | str = "auto", **options: Any
        ) -> None:
            place = folder(pretrained)
            harness = {name: options.pop(name) for name in own if name in options}
            self.offloaded = from_pretrained(pretrained, device=device or "auto", dtype=_dtype(dtype), **options)
            super().__init__(self.offloaded.model, tokenizer=tokenizer_of(place), **harness)

        def close(self) -> None:
            self.offloaded.close()

    return HarnessModel


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    """None for "auto"; the command line gives the name of a dtype."""
    if not isinstance(given, str):
        return given
    if given == "auto":
        return None
    dtype = getattr(torch, given.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"goldsmith.hf.evaluation: dtype={given!r}; expected auto, float32, bfloat16 or float16")
    return dtype


def main() -> None:
    """lm-eval's command line, with the model "goldsmith"."""
    try:
        register_lm_eval()
    except ImportError as error:
        sys.exit(str(error))
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
