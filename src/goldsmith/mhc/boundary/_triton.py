"""mhc.boundary on a GPU: post, then pre. The last pass of pre's backward adds the gradient of x_next; post's follows.

Elements moved per token at n = 4: forward 9D + 9D; backward 5D (dots) + 13D (x_next) + 4D (dphi) + 14D (post). A single
kernel that passes x_next's gradient to post's backward in registers saves 9D but is slower: its 20 dots per token do
not fit in registers with the tiles (760 us against 330 + 319 at T = 8192, D = 4096, H100).
"""

from __future__ import annotations

from torch import Tensor

from ...core.tracing import stage, tracing
from .._kernels import pipeline
from .._kernels.few_tokens import are_few, mixed_chunks
from .._kernels.launch import dense, rows, shaped, streams, unsupported_dtype
from .._kernels.mix import mix_backward, mix_forward

LAUNCHES_ONLY = True


def unsupported(tensors: dict, options: dict) -> str | None:
    return pipeline.unsupported(tensors, options) or unsupported_dtype(tensors["f"])


def forward(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None,
    *, form: str, orientation: str, **options: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = x.shape[-2]
    flat = streams(x)
    T = flat.shape[0]
    f, h_post, h_res = rows(f), dense(h_post, T, n), dense(h_res, T, n, n)
    names = {"h_pre": "h_pre_next", "h_post": "h_post_next", "h_res": "h_res_next"}
    outputs = ("h_in", "h_post", "h_res", "inv_rms", "h_mix")
    if are_few(flat) and not tracing("x_next"):
        gamma = None if gamma is None else gamma.reshape(-1).contiguous()
        options.pop("rms_form")
        y, part = mixed_chunks(flat, phi.contiguous(), gamma, f=f, h_post=h_post, h_res=h_res, orientation=orientation)
        results = pipeline.few_tokens(x, y, part, alpha, bias, names, True, "h_in", **options)
        return shaped(y, x.shape), *(results[name] for name in outputs)
    x_next = stage("x_next", shaped(mix_forward(flat, f, h_post, h_res, orientation), x.shape))
    results = pipeline.forward(x_next, phi, alpha, bias, gamma, collapsed=True, names=names, **options)
    return x_next, *(results[name] for name in outputs)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    n = tensors["x"].shape[-2]
    below = pipeline.backward(
        {**tensors, "x": tensors["x_next"]}, options, u=grads["h_in"],
        h_post=grads["h_post_next"], h_res=grads["h_res_next"], grad=grads["x_next"], output="dx_next",
    )  # fmt: skip
    above = mix_backward(
        streams(below.pop("x")), streams(tensors["x"]), rows(tensors["f"]), dense(tensors["h_post"], -1, n),
        dense(tensors["h_res"], -1, n, n), options["orientation"], needs_dx="x" in needs,
    )  # fmt: skip
    names = {"f": "df", "h_post": "dh_post", "h_res": "dh_res", "x": "dx_post"}
    above = {name: stage(names[name], shaped(grad, tensors[name].shape)) for name, grad in above.items()}
    return above | below
