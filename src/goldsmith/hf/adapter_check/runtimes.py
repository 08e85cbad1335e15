"""Runtimes that compute a model with an adapter: each gives the log-probability of every token of some texts.

A runtime is a function (model folder, adapter folder, rows of token ids) -> (without the adapter, with it), two flat
float64 tensors with one number for each token after the first of each row.
"""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.json_values import parse_json
from ...offload.attach import from_pretrained
from ...offload.memory.transport import free_memory
from ..adapter.files import CONFIG
from ..adapter.loading import load_adapter
from ..checkpoint.files import default_dtype, weight_files
from ..checkpoint.foreign_errors import of_the_model
from ..checkpoint.formats.modelopt import settings_beside
from ..checkpoint.gguf.files import gguf_file
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.reader import ModelCheckpoint
from ..convert import convert
from ..converted_experts import converted_modules
from ..experts_spec import experts_modules
from ..merging.codes import copied_format
from ..merging.merged_model import merge
from ..model_class import class_of, config_of, empty_model
from ..offload.generation import check_ids
from ..saving import plain_experts

Rows = Sequence[Sequence[int]]
Pair = tuple[Tensor, Tensor]
Runtime = Callable[[Path, Path, Rows], Pair]
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM allows for max_lora_rank


class RuntimeMissing(Exception):
    """A runtime cannot run here; the text says why."""


def log_probabilities(model: Any, rows: Rows) -> Tensor:
    """The log-probability of each token after the first, of all rows one after the other."""
    parts = []
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    check_ids(model, max(map(max, rows)))
    with torch.inference_mode(), of_the_model():
        for row in rows:
            ids = torch.tensor([list(row)], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
            parts.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(parts)


def trained(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """The model as `goldsmith finetune` trains it: LoRA beside a packed base, nothing rounded."""
    config, dtype = config_of(folder), _dtype(folder)
    model: Any = empty_model(config, dtype)
    model.config._name_or_path = str(folder)
    convert(model, checkpoint=folder, format="auto" if _is_coded(folder) or dtype == torch.bfloat16 else "fp32")
    model.eval()
    without = log_probabilities(model, rows)
    load_adapter(model, adapter)
    return without, log_probabilities(model.eval(), rows)


def ours(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """goldsmith.offload with `adapter=`."""
    with from_pretrained(folder, adapter={"adapter": adapter}) as offloaded:
        offloaded.set_adapter(None)
        without = log_probabilities(offloaded.model, rows)
        offloaded.set_adapter("adapter")
        return without, log_probabilities(offloaded.model, rows)


def peft(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """Stock peft over transformers' own model."""
    from peft import PeftModel

    plain = _plain(folder)
    with warnings.catch_warnings():  # peft says that it ignores patterns for parameters, and yet applies them
        warnings.filterwarnings("ignore", "The following .*_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        model: Any = PeftModel.from_pretrained(plain, str(adapter)).eval()
    with model.disable_adapter():
        without = log_probabilities(model, rows)
    return without, log_probabilities(model, rows)


def merged(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """`goldsmith merge` in the base's own format, or in floats if its codes cannot be written again."""
    form = _merge_format(folder)
    without = log_probabilities(_plain(folder), rows)
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "merged"
        merge(folder, adapter, output, format=form)
        return without, merged_folder(output, rows)


def merged_folder(folder: Path, rows: Rows) -> Tensor:
    """The log-probabilities of a merged model in a folder."""
    return log_probabilities(_plain(folder), rows)


def vllm(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """vLLM with `LoRARequest`, if it is installed."""
    _need("vllm")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    longest = max(map(len, rows))
    engine = LLM(
        model=str(folder), enable_lora=True, max_lora_rank=allowed_rank(adapter), enforce_eager=True,
        max_model_len=longest + 1, gpu_memory_utilization=0.8,
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": list(row)} for row in rows]

    def run(request: object) -> Tensor:
        numbers = []
        for row, output in zip(rows, engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)):
            numbers += [entry[token].logprob for token, entry in zip(row[1:], output.prompt_logprobs[1:])]
        return torch.tensor(numbers, dtype=torch.float64)

    return run(None), run(LoRARequest("adapter", 1, str(adapter)))


def sglang(folder: Path, adapter: Path, rows: Rows) -> Pair:
    """SGLang with `lora_paths`, if it is installed."""
    _need("sglang")
    import sglang as runtime

    engine = runtime.Engine(
        model_path=str(folder), enable_lora=True, lora_paths={"adapter": str(adapter)}, disable_cuda_graph=True,
        max_lora_rank=allowed_rank(adapter), lora_target_modules=["all"],
    )  # fmt: skip
    sampling = {"max_new_tokens": 1, "temperature": 0.0}

    def run(name: str | None) -> Tensor:
        outputs = engine.generate(
            input_ids=[list(row) for row in rows], sampling_params=sampling, return_logprob=True, logprob_start_len=0,
            lora_path=[name] * len(rows),
        )  # fmt: skip
        numbers = [entry[0] for output in outputs for entry in output["meta_info"]["input_token_logprobs"][1:]]
        return torch.tensor(numbers, dtype=torch.float64)

    try:
        return run(None), run("adapter")
    finally:
        engine.shutdown()


RUNTIMES: dict[str, Runtime] = {"ours": ours, "peft": peft, "merged": merged, "vllm": vllm, "sglang": sglang}


def allowed_rank(adapter: Path) -> int:
    """The smallest max_lora_rank for an adapter."""
    config = parse_json((adapter / CONFIG).read_text())
    rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
    return next((size for size in RANKS if size >= rank), rank)


@contextmanager
def freed() -> Iterator[None]:
    """Frees what a runtime left behind."""
    try:
        yield
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise RuntimeMissing(f"{package} is not installed here")


def _dtype(folder: Path) -> torch.dtype:
    config = config_of(folder)
    return default_dtype(None if gguf_file(folder) else weight_files(folder, config), config)


def _is_coded(folder: Path) -> bool:
    """Whether the base is quantised: its weights are codes."""
    config = config_of(folder)
    settings = (getattr(holder, "quantization_config", None) for holder in (config, config.get_text_config()))
    return gguf_file(folder) is not None or any(settings) or bool(settings_beside(folder))


def _merge_format(folder: Path) -> str:
    """The format in which the base can be merged. Raises RuntimeMissing if there is none."""
    if not _is_coded(folder):
        return "auto"
    checkpoint = open_checkpoint(folder, empty_model(config_of(folder), _dtype(folder)))
    if checkpoint.method == "mxfp4":
        raise RuntimeMissing("goldsmith merge does not write into mxfp4 codes")
    if isinstance(checkpoint, ModelCheckpoint) and copied_format(checkpoint) is not None:
        return "auto"
    return "fp32" if _dtype(folder) == torch.float32 else "bf16"


def _decoded(folder: Path) -> Any:
    """transformers' own model with the numbers that a quantised base stands for, in float32.

    transformers itself needs the library of each format, and a GPU for some.
    """
    model: Any = empty_model(config_of(folder), torch.float32)
    modules = dict(experts_modules(model))
    convert(model, checkpoint=folder)
    for path, converted in converted_modules(model).items():
        for name, tensor in plain_experts(converted, torch.float32).items():
            modules[path].register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, modules[path])
    model.set_experts_implementation("eager")
    return model.eval()


def _check_memory(size: float) -> None:
    free = free_memory()
    if free is not None and size > free:
        raise RuntimeMissing(f"the model takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of memory are free")


def _plain(folder: Path) -> Any:
    """transformers' own model, in the dtype of its files; decoded to float32 if these are quantised.

    Raises RuntimeMissing if memory is too small for it.
    """
    config = config_of(folder)
    if _is_coded(folder):
        _check_memory(4 * sum(parameter.numel() for parameter in empty_model(config, torch.float32).parameters()))
        return _decoded(folder)
    files = weight_files(folder, config)
    _check_memory(sum(path.stat().st_size for path in files.paths))
    model = class_of(config).from_pretrained(folder, dtype=default_dtype(files, config), local_files_only=True)
    return model.eval()
