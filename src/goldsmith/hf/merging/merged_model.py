"""merge: base + adapter = a model's folder, streamed from the base's files; keys and shapes stay those of the base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.json_values import parse_json
from ..adapter.fitting import fitted
from ..checkpoint.files import default_dtype, weight_files
from ..checkpoint.gguf.files import gguf_file
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.reader import ModelCheckpoint
from ..checkpoint.source import WeightSource
from ..experts_spec import experts_modules, spec_of
from ..model_class import class_of, config_of, empty_model
from .codes import CODES, FLOATS, Survival, copied_format
from .gguf_base import GgufMerge
from .merged_tensors import OP, MergeWork, Progress
from .shards import ShardWriter, check_output


@dataclass(frozen=True)
class MergeReport:
    """What `merge` wrote. survival: what of the adapter is left after rounding to `format`."""

    output: Path
    format: str
    tensors: int
    merged: int
    nbytes: int
    survival: Survival

    def to_dict(self) -> dict[str, object]:
        worst = self.survival.worst
        return {
            "output": str(self.output), "format": self.format, "tensors": self.tensors, "merged": self.merged,
            "bytes": self.nbytes, "share": self.survival.share, "along": self.survival.along,
            "noise": self.survival.noise,
            "worst_layer": None if worst is None else {"layer": worst[0], "along": worst[1]},
        }  # fmt: skip


def merge(
    model: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    format: str = "auto",
    progress: Progress | None = None,
) -> MergeReport:
    """Writes W + s B A of every weight that the adapter covers, and all others unchanged, as a model's folder

    model     a folder with safetensors files, the name of a cached hub model, or a GGUF file, whose numbers are decoded
    adapter   the folder of a peft adapter
    output    a folder that does not exist yet, or is empty
    format    "auto": the base's own. "bf16", "fp16", "fp32": floats, also from a quantised base. "int4"
              (compressed-tensors, groups of 32) and "fp8_block" (blocks of 128 x 128): the experts as codes, the rest
              as it is
    progress  called with (tensors done, tensors in total, name)

    In the base's own float format the result equals peft's `merge_and_unload` bit for bit. One layer is in memory at a
    time. Raises ValueError, with nothing written, for an adapter that does not fit, an output that exists, and a
    format that the base does not allow.
    """
    from ..offload.adapters import adapter_folder
    from ..offload.generation import save_tokenizer
    from ..offload.loading import folder

    check_output(Path(output))
    source = folder(model)
    config, file = config_of(source), gguf_file(source)
    dtype = torch.float32 if file is not None else default_dtype(weight_files(source, config), config)
    empty = empty_model(config, dtype)
    checkpoint = open_checkpoint(source, empty)
    chosen = _format(checkpoint, format)
    specs = {path: spec_of(module) for path, module in experts_modules(empty)}
    fit = fitted(empty, specs, adapter_folder(adapter), OP)
    if isinstance(checkpoint, ModelCheckpoint):
        work = MergeWork(checkpoint, empty, specs, fit, chosen)
        content = parse_json((source / "config.json").read_text())
    else:
        work = GgufMerge(checkpoint, empty, specs, fit, chosen)
        content = config.to_dict() | {"architectures": [class_of(config).__name__]}
    with ShardWriter(Path(output)) as writer:
        for tensors, layer_done in work.pieces(progress):
            writer.add(tensors)
            if layer_done:
                writer.close_layer()
        writer.finish(source if source.is_dir() else None, work.config(content))
        if file is not None and not (writer.folder / "tokenizer.json").is_file():
            save_tokenizer(source, writer.folder)
    return MergeReport(Path(output), chosen or "as the base", work.written, work.merged, writer.total, work.survival)


def _format(checkpoint: WeightSource, format: str) -> str | None:
    """The format to write, None for the base's own floats. Raises ValueError for one that is not possible."""
    known = ("auto", *FLOATS, *CODES)
    if format not in known:
        raise ValueError(f"{OP}: format={format!r}, expected one of {', '.join(known)}")
    if format != "auto":
        return format
    if checkpoint.method is None:
        return None
    schemes = checkpoint.schemes if isinstance(checkpoint, ModelCheckpoint) else []
    own = copied_format(checkpoint) if isinstance(checkpoint, ModelCheckpoint) else None
    if own is None:
        kind = " and ".join(dict.fromkeys(scheme.label for scheme in schemes)) or checkpoint.method
        raise ValueError(
            f"{OP}: {checkpoint.label} holds codes ({kind}), which cannot be written again: give format= one of "
            f"{', '.join((*FLOATS, *CODES))}"
        )
    return own
