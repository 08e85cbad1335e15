"""Writes a model as a GGUF file, and reads one back as the numbers that it holds. Needs the package gguf."""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldsmith.cli.terminal import Failure
from goldsmith.core.processors import made_ahead, worth

from .shapes import Shape
from .weights import DENSE, EMBEDDING, EXPERTS, HEAD, NORM, PLAIN, Source, names

KINDS = {"int4": "Q4_0", "int8": "Q8_0", "bf16": "BF16", "fp32": "F32"}
FILE_TYPES = {"int4": 2, "int8": 7, "bf16": 32, "fp32": 0}
CONTEXT = 40960  # tokens, the same in every file, so that files can be kept
BLOCK = 32  # weights of a block of Q4_0 or Q8_0
AHEAD = 8  # tensors that are made before they are written, at most; each may take gigabytes
SLICES = 64  # of a tensor that is decoded: few rows at a time stay in the caches
Place = tuple[str, str, tuple[int, ...]]  # name, kind and sizes of a tensor
Progress = Callable[[int, int], None]  # bytes so far, all bytes


def missing() -> str | None:
    """Why no file can be written, or None."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        return f"the package gguf is missing ({error}): pip install 'gguf>=0.19'"
    return None


def write(
    path: Path, shape: Shape, source: Source, format: str, dense: str, *,
    progress: Progress = lambda done, whole: None,
) -> None:  # fmt: skip
    """Write the file tensor by tensor, so that memory holds one at a time; experts in `format`, matrices in `dense`."""
    import gguf

    odd = [size for size in (shape.H, shape.I, shape.heads * shape.head_dim) if size % BLOCK]
    if odd and {format, dense} & {"int4", "int8"}:
        raise Failure(f"{shape.name}: Q4_0 and Q8_0 have blocks of {BLOCK} weights, but a row has {odd[0]}: use bf16.")
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _add_fields(writer, shape)
    writer.add_file_type(FILE_TYPES[format])
    kinds: dict[str, Any] = {
        kind: gguf.GGMLQuantizationType[KINDS[name]]
        for kind, name in (("experts", format), ("dense", dense), ("plain", "fp32"))
    }
    whole = 0
    for name, kind, sizes in names(shape):
        stored = gguf.quants.quant_shape_to_byte_shape(sizes, kinds[kind])
        bytes_of = int(np.prod(stored)) if kinds[kind] != gguf.GGMLQuantizationType.F32 else 4 * int(np.prod(sizes))
        whole += bytes_of
        plain = kinds[kind] == gguf.GGMLQuantizationType.F32
        writer.add_tensor_info(
            f"{name}.weight", sizes if plain else stored, np.dtype(np.float32 if plain else np.uint8), bytes_of,
            raw_dtype=None if plain else kinds[kind],
        )  # fmt: skip
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0

        def made(place: Place) -> Any:
            return gguf.quants.quantize(source.tensor(place[0]).numpy(), kinds[place[1]])

        quantised = made_ahead(made, names(shape), min(worth(), AHEAD))
        for (_, _, sizes), blocks in zip(names(shape), quantised, strict=True):
            if len(blocks) < sizes[0]:  # the others are copies of these experts
                blocks = blocks[np.arange(sizes[0]) % len(blocks)]
            writer.write_tensor_data(np.ascontiguousarray(blocks))
            done += blocks.nbytes
            progress(done, whole)
    finally:
        writer.close()


def _add_fields(writer: Any, shape: Shape) -> None:
    writer.add_name(shape.name)
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.H)
    writer.add_feed_forward_length(shape.I * shape.k)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_freq_base(shape.theta)
    writer.add_expert_count(shape.E)
    writer.add_expert_used_count(shape.k)
    writer.add_expert_feed_forward_length(shape.I)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("none")


def read(path: Path, dtype: torch.dtype, *, experts: bool = True) -> dict[str, Tensor]:
    """The numbers in a file in `dtype`, by transformers' names; `experts`: those of the experts too."""
    import gguf

    tensors: dict[str, Tensor] = {}
    halves: dict[str, Tensor] = {}
    for entry in gguf.GGUFReader(path).tensors:
        if not experts and "_exps." in entry.name:
            continue
        tensor = _numbers(entry, dtype)
        name = entry.name.removesuffix(".weight")
        fixed = {EMBEDDING: "model.embed_tokens", NORM: "model.norm", HEAD: "lm_head"}
        if name in fixed:
            tensors[f"{fixed[name]}.weight"] = tensor
            continue
        _, layer, suffix = name.split(".")
        prefix = f"model.layers.{layer}."
        if suffix not in EXPERTS:
            tensors[f"{prefix}{(DENSE | PLAIN)[suffix]}.weight"] = tensor
        elif "down" in suffix:
            tensors[f"{prefix}mlp.experts.down_proj"] = tensor
        else:
            halves[f"{layer}.{suffix}"] = tensor
            pair = [halves.get(f"{layer}.ffn_{half}_exps") for half in ("gate", "up")]
            if pair[0] is not None and pair[1] is not None:
                tensors[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat([pair[0], pair[1]], 1)
                del halves[f"{layer}.ffn_gate_exps"], halves[f"{layer}.ffn_up_exps"]
    return tensors


def read_experts(path: Path) -> dict[str, list[Tensor]]:
    """The experts in a file in float32, by transformers' names; experts of the same bytes are one tensor."""
    import gguf

    entries: dict[str, list[Any]] = defaultdict(list)  # gate before up
    for entry in sorted(gguf.GGUFReader(path).tensors, key=lambda entry: entry.name):
        if "_exps." in entry.name:
            _, layer, suffix, _ = entry.name.split(".")
            target = "down_proj" if "down" in suffix else "gate_up_proj"
            entries[f"model.layers.{layer}.mlp.experts.{target}"].append(entry)

    def digest(place: tuple[str, int]) -> bytes:
        name, expert = place
        return b"".join(hashlib.blake2b(entry.data[expert]).digest() for entry in entries[name])

    def decode(place: tuple[str, int]) -> Tensor:
        name, expert = place
        return torch.cat([_decoded(entry, expert) for entry in entries[name]])

    places = [(name, expert) for name, parts in entries.items() for expert in range(len(parts[0].data))]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = list(threads.map(digest, places))
        distinct = dict(zip(reversed(digests), reversed(places), strict=True))
        numbers = dict(zip(distinct, threads.map(decode, distinct.values()), strict=True))
    experts: dict[str, list[Tensor]] = defaultdict(list)
    for (name, _), key in zip(places, digests, strict=True):
        experts[name].append(numbers[key])
    return dict(experts)


def _decoded(entry: Any, rows: Any) -> Tensor:
    """The numbers of some rows of a tensor, in float32."""
    import gguf

    plain = gguf.quants.dequantize(entry.data[rows], entry.tensor_type)
    return torch.from_numpy(np.array(plain, dtype=np.float32))  # a copy: the file's memory is read only


def _numbers(entry: Any, dtype: torch.dtype) -> Tensor:
    """The numbers of one tensor of a file, decoded by all cores in slices along the first axis."""
    numbers = torch.empty([int(size) for size in reversed(entry.shape)], dtype=dtype)

    def decode(rows: slice) -> None:
        with torch.inference_mode(numbers.is_inference()):  # the mode is of a thread
            numbers[rows] = _decoded(entry, rows)

    step = -(-len(numbers) // SLICES)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(decode, [slice(first, first + step) for first in range(0, len(numbers), step)]))
    return numbers
