"""GPTQ, as AutoGPTQ and GPTQModel write it: w = (q - z) s, with the inputs of a layer along the first dimension.

qweight int32 [in / n, out] (n codes in a word), qzeros int32 [groups, out / n], scales [groups, out], g_idx [in]: the
group of each input. Format "gptq" stores z - 1, "gptq_v2" stores z.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....experts.packed.formats import Codes
from .scheme import Parts, Scheme, check_dtype, check_shape, groups_of
from .words import fields, signed, unsigned

BITS = (2, 4, 8)


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """The scheme of a "gptq" quantization_config; raises ValueError for one that is not supported."""
    bits, layout = settings.get("bits"), settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if bits not in BITS:
        raise ValueError(f"GPTQ with {bits} bits; supported are {', '.join(map(str, BITS[:-1]))} and {BITS[-1]}")
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise ValueError(f"GPTQ in the format {layout!r} of another kernel; supported are 'gptq' and 'gptq_v2'")
    if settings.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise ValueError(f"GPTQ with words of {settings['pack_dtype']}; supported is int32")
    for pattern, changes in (settings.get("dynamic") or {}).items():
        if not str(pattern).startswith("-:") and {"bits", "group_size", "sym", "desc_act"} & set(changes or {}):
            raise ValueError(f"GPTQ with other settings for some layers ({pattern!r}); supported is one for all")
    group = settings.get("group_size", 128)
    group = None if group in (None, -1) else group
    symmetric, ordered = bool(settings.get("sym", True)), bool(settings.get("desc_act", False))
    label = f"GPTQ ({bits} bits{', act-order' if ordered else ''})"
    read = partial(_read, bits=bits, group=group, offset=int(layout == "gptq"), symmetric=symmetric, ordered=ordered)
    parts, optional = ("qweight", "qzeros", "scales"), ("g_idx",)
    if ordered:
        reason = "the inputs of a group are not next to each other (desc_act)"
        return Scheme(label, (*parts, "g_idx"), read, reason=reason)
    if bits == 8 and not symmetric:
        return Scheme(label, parts, read, reason="int8 has no zero points", optional=optional)
    form = "int8" if bits == 8 else "int4" if symmetric else "int4_asym"
    return Scheme(label, parts, read, form, group, optional=optional)


def _read(parts: Parts, *, bits: int, group: int | None, offset: int, symmetric: bool, ordered: bool) -> Codes | Tensor:
    words, scales = parts["qweight"], parts["scales"]
    for name in ("qweight", "qzeros"):
        check_dtype(name, parts[name], torch.int32)
    check_dtype("scales", scales, torch.float16, torch.bfloat16, torch.float32)
    per_word, actual = 32 // bits, f"qweight {list(words.shape)}"
    inputs, out = words.shape[0] * per_word, words.shape[1]
    groups = groups_of(inputs, group, actual)
    check_shape("scales", scales, (groups, out), actual)
    check_shape("qzeros", parts["qzeros"], (groups, -(-out // per_word)), actual)
    q = fields(words.t(), bits)  # [out, in]
    stored = fields(parts["qzeros"], bits)[:, :out].t().to(torch.int16)
    if offset and bool((stored == (1 << bits) - 1).any()):
        raise ValueError(
            f"qzeros holds {(1 << bits) - 1}, which format 'gptq' stores for both 0 and {1 << bits}: save the model in "
            "format 'gptq_v2'"
        )
    z = stored + offset
    if symmetric and bool((z != 1 << (bits - 1)).any()):
        raise ValueError(f"qzeros holds other zero points than {1 << (bits - 1)}, but the config says sym")
    index = parts.get("g_idx")
    if index is not None:
        check_shape("g_idx", index, (inputs,), actual)
    if ordered and index is not None:
        if index.numel() and not (0 <= int(index.min()) and int(index.max()) < groups):
            raise ValueError(f"g_idx holds {int(index.max())}, but there are {groups} groups")
        places = index.long()
        return (q.float() - z.float()[:, places]) * scales.t().float()[:, places]
    if index is not None and not torch.equal(index.long(), torch.arange(inputs) // (group or inputs)):
        raise ValueError("g_idx has other groups than group_size, but the config has no desc_act")
    s = scales.t().contiguous()
    if bits == 8 and not symmetric:
        return ((q.view(out, groups, -1).float() - z.float().unsqueeze(-1)) * s.float().unsqueeze(-1)).view(out, -1)
    if symmetric:
        return Codes(signed(q, bits), s)
    return Codes(unsigned(q), s, z.to(torch.uint8).contiguous())
