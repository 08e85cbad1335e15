"""Quantised checkpoints, built here bit by bit, and the float models that they represent."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf import layouts, models

GROUP = 16
NIBBLES = torch.arange(0, 32, 4)
SETTINGS = {
    "k2": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "group_size": GROUP, "strategy": "group", "symmetric": True}}
        },
        "ignore": ["lm_head"],
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}


def words(nibbles):
    """int32 [...] of numbers 0..15 [..., 8]: number i in bits 4i..4i+3."""
    packed = (nibbles.long() << NIBBLES).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def k2(out, inputs, generator):
    """The parts and the weight: q + 8 in nibbles along the inputs."""
    q = torch.randint(-8, 8, (out, inputs), generator=generator)
    scale = (0.02 + 0.05 * torch.rand(out, inputs // GROUP, generator=generator)).bfloat16()
    parts = {
        "weight_packed": words((q + 8).view(out, -1, 8)),
        "weight_scale": scale,
        "weight_shape": torch.tensor([out, inputs], dtype=torch.int32),
    }
    return parts, q * scale.float().repeat_interleave(GROUP, 1)


def awq(out, inputs, generator):
    """Parts and the weight: input-major, columns of a word in AutoAWQ's order."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    q = torch.randint(0, 16, (inputs, out), generator=generator)
    z = torch.randint(0, 16, (inputs // GROUP, out), generator=generator)
    scale = (0.02 + 0.05 * torch.rand(inputs // GROUP, out, generator=generator)).half()
    parts = {
        "qweight": words(q.view(inputs, -1, 8)[..., order]),
        "qzeros": words(z.view(inputs // GROUP, -1, 8)[..., order]),
        "scales": scale,
    }
    return parts, ((q - z.repeat_interleave(GROUP, 0)) * scale.float().repeat_interleave(GROUP, 0)).T


def fp8(out, inputs, generator):
    """Parts and the weight: one block, its edges partial."""
    codes = torch.randn(out, inputs, generator=generator).to(torch.float8_e4m3fn)
    scale = 0.1 + 0.1 * torch.rand(-(-out // 128), -(-inputs // 128), generator=generator)
    grown = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:out, :inputs]
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * grown


def mxfp4(experts, out, inputs, generator):
    """blocks, scales and the weights [E, out, in] of a stack: low nibble first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(0, 16, (experts, out, inputs // 32, 32), generator=generator)
    exponents = torch.randint(121, 125, (experts, out, inputs // 32), generator=generator)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    numbers = values[codes % 8] * torch.where(codes < 8, 1.0, -1.0) * 2.0 ** (exponents - 127.0)[..., None]
    return blocks, exponents.to(torch.uint8), numbers.flatten(2)


KINDS = {"k2": k2, "awq": awq, "fp8": fp8} | layouts.KINDS
SETTINGS |= layouts.SETTINGS


def write(folder, config, tensors, shards=2):
    """A checkpoint of several shards with its index."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    index = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        shard = {name: tensors[name].contiguous().clone() for name in names[number::shards]}
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def quantised(folder, kind, family="deepseek_v3", **options):
    """A checkpoint of this kind in `folder`, and the eager float32 model that it represents."""
    changes = {"intermediate_size": 32} if kind == "mxfp4" else {"moe_intermediate_size": 32, "intermediate_size": 48}
    plain = models.model(family, **(changes | options))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    with torch.no_grad():
        for name, weight in plain.state_dict().items():
            stem = name.removesuffix(".weight")
            linear = weight.dim() == 2 and stem.endswith("proj") and kind in KINDS
            if ".experts." in name and weight.dim() == 3:
                (_stacked if kind == "mxfp4" else _by_expert)(tensors, name, weight, kind, generator)
            elif linear and not any(size % layouts.STEPS.get(kind, GROUP) for size in weight.shape):
                parts, value = KINDS[kind](*weight.shape, generator)
                weight.copy_(value)
                tensors |= {f"{stem}.{part}": tensor for part, tensor in parts.items()}
            else:
                tensors[name] = weight.clone()
    config = plain.config.to_dict() | {"quantization_config": SETTINGS[kind], "architectures": [type(plain).__name__]}
    return write(folder, config, tensors), plain


def _by_expert(tensors, name, weight, kind, generator):
    path, _, which = name.rpartition(".")
    names = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
    for expert in range(weight.shape[0]):
        for projection, rows in zip(names, weight[expert].chunk(len(names))):
            parts, value = KINDS[kind](*rows.shape, generator)
            rows.copy_(value)
            tensors |= {f"{path}.{expert}.{projection}.{part}": tensor for part, tensor in parts.items()}


def _stacked(tensors, name, weight, kind, generator):
    blocks, scales, value = mxfp4(weight.shape[0], weight.shape[2], weight.shape[1], generator)
    weight.copy_(value.mT)
    tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}


def add(folder, name, tensor):
    """Adds a tensor in a file of its own."""
    path = Path(folder) / "model.safetensors.index.json"
    save_file({name: tensor}, Path(folder) / "added.safetensors", {"format": "pt"})
    index = json.loads(path.read_text())
    index["weight_map"][name] = "added.safetensors"
    path.write_text(json.dumps(index))
