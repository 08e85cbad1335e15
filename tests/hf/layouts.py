"""Linear layers in the layouts of quantised checkpoints: (tensors by part, the weight that they represent).

compressed-tensors' are made by its own library; AutoGPTQ's, AutoAWQ's and ModelOpt's as these packages document them.
"""

import math
from functools import partial

import torch

GROUP = 16


def words(numbers, bits=4):
    """int32 [..., n]: number i of a word in its bits from bits * i on; numbers [..., n, 32 / bits]."""
    packed = (numbers.long() << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def along(numbers, bits, dim):
    """Numbers packed into words along a dimension."""
    lines = numbers.movedim(dim, -1)
    return words(lines.reshape(*lines.shape[:-1], -1, 32 // bits), bits).movedim(-1, dim).contiguous()


def gptq(out, inputs, generator, *, bits=4, sym=True, ordered=False, version=1):
    """AutoGPTQ: inputs first; zero points less 1 in version 1; `ordered`: inputs in groups that are not contiguous."""
    groups = inputs // GROUP
    q = torch.randint(0, 2**bits, (inputs, out), generator=generator)
    middle = torch.full((groups, out), 2 ** (bits - 1))
    zeros = middle if sym else torch.randint(1, 2**bits, (groups, out), generator=generator)
    scales = (0.02 + 0.05 * torch.rand(groups, out, generator=generator)).half()
    index = torch.arange(inputs) // GROUP
    if ordered:
        index = index[torch.randperm(inputs, generator=generator)]
    parts = {
        "qweight": along(q, bits, 0),
        "qzeros": along(zeros - int(version == 1), bits, 1),
        "scales": scales,
        "g_idx": index.int(),
    }
    return parts, ((q - zeros[index]).float() * scales.float()[index]).T


def gemv(out, inputs, generator, group=32):
    """AutoAWQ's GEMV: a row per output, rows of zeros and scales padded."""
    groups = inputs // group
    width = 4 * math.ceil(groups / 32)  # four words at least for groups of 32
    q = torch.randint(0, 16, (out, inputs), generator=generator)
    z = torch.randint(0, 16, (out, groups), generator=generator)
    scales = (0.02 + 0.05 * torch.rand(out, groups, generator=generator)).half()
    padded = torch.nn.functional.pad(z, (0, 8 * width - groups))
    parts = {
        "qweight": along(q, 4, 1),
        "qzeros": along(padded, 4, 1),
        "scales": torch.nn.functional.pad(scales, (0, 8 * width - groups)),
    }
    return parts, (q - z.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)


def fp8_tensor(out, inputs, generator, scale="weight_scale_inv"):
    """One scale for the matrix, and an activation scale that only other runtimes use."""
    codes = torch.randn(out, inputs, generator=generator).to(torch.float8_e4m3fn)
    factor = 0.1 + 0.1 * torch.rand((), generator=generator)
    parts = {"weight": codes, scale: factor, "input_scale": torch.tensor(1.0)}
    return parts, codes.float() * factor


def modelopt_nvfp4(out, inputs, generator):
    """ModelOpt: E2M1 codes, E4M3 scales of 16 inputs, multiplied by one scale for all."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.randint(0, 16, (out, inputs), generator=generator)
    scales = (4 + 100 * torch.rand(out, inputs // 16, generator=generator)).to(torch.float8_e4m3fn)
    overall = 0.0005 + 0.001 * torch.rand((), generator=generator)
    parts = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scales,
        "weight_scale_2": overall,
    }
    return parts, values[codes] * (scales.float() * overall).repeat_interleave(16, 1)


def compressed(out, inputs, generator, *, layout, dtype=torch.float32, **arguments):
    """A random weight, quantised and decoded by the library compressed-tensors."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    weight = torch.randn(out, inputs, generator=generator) * inputs**-0.5
    overall = None
    if args.strategy == "tensor":
        ends = weight.amin().reshape(1), weight.amax().reshape(1)
    elif args.strategy == "block":
        rows, columns = args.block_structure
        tiles = weight.view(out // rows, rows, inputs // columns, columns)
        ends = tiles.amin((1, 3)), tiles.amax((1, 3))
    else:
        groups = weight.view(out, -1, args.group_size or inputs)
        ends = groups.amin(-1), groups.amax(-1)
    if args.strategy == "tensor_group":
        overall = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    scale, zeros = calculate_qparams(*ends, args, global_scale=overall)
    state = {"weight": weight.to(dtype), "weight_scale": scale.to(dtype), "weight_zero_point": zeros}
    if overall is not None:
        state["weight_global_scale"] = overall
    compressor = BaseCompressor.get_value_from_registry(layout)
    parts = compressor.compress(state, scheme)
    return parts, compressor.decompress(dict(parts), scheme)["weight"]


def settings_of(layout, **arguments):
    """The quantization_config of a checkpoint that compressed-tensors wrote."""
    weights = {"type": "int", "symmetric": True, **arguments}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": layout}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
OF_LIBRARY = {
    "ct_int4_asym": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
    "ct_int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "ct_fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "ct_fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}
# kind -> a function (out, inputs, generator) -> (parts, weight)
KINDS = {
    "gptq": gptq,
    "gptq_asym": partial(gptq, sym=False, version=2),
    "gptq_8": partial(gptq, bits=8),
    "gptq_order": partial(gptq, sym=False, ordered=True),
    "gemv": gemv,
    "fp8_tensor": fp8_tensor,
    "modelopt_fp8": partial(fp8_tensor, scale="weight_scale"),
    "modelopt_nvfp4": modelopt_nvfp4,
} | {kind: partial(compressed, layout=layout, **options) for kind, (layout, options) in OF_LIBRARY.items()}
SETTINGS = {
    "gptq": GPTQ,
    "gptq_asym": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_8": GPTQ | {"bits": 8},
    "gptq_order": GPTQ | {"sym": False, "desc_act": True},
    "gemv": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv", "zero_point": True},
    "fp8_tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt_fp8": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "modelopt_nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
} | {kind: settings_of(layout, **options) for kind, (layout, options) in OF_LIBRARY.items()}
STEPS = {"gemv": 32}  # sizes of matrices that a layout allows, if not multiples of 16
# kind -> (format that holds the codes, its group); None: decoded to float32
FORMATS = {
    "gptq": ("int4", GROUP),
    "gptq_asym": ("int4_asym", GROUP),
    "gptq_8": ("int8", GROUP),
    "gptq_order": None,
    "gemv": ("int4_asym", 32),
    "fp8_tensor": ("fp8_block", 128),
    "modelopt_fp8": ("fp8_block", 128),
    "modelopt_nvfp4": ("int8", 16),
    "ct_int4_asym": ("int4_asym", GROUP),
    "ct_int8": ("int8", None),
    "ct_fp8": None,
    "ct_fp8_tensor": ("fp8_block", 128),
}
