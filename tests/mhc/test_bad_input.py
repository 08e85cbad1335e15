"""Bad input raises before any computation; the message names the argument, its value, what is wanted and a remedy."""

import pytest
import torch

from goldsmith import ShapeError, mhc
from mhc.calls import ALPHA, BIAS, DIM, H_POST, H_RES, PHI, F, N, X, post, pre, says


def listed(rows):
    """The message's lines of name, given shape and expected shape of each argument, in columns."""
    first, second = (max(len(row[i]) for row in rows) + 1 for i in (0, 1))
    return [f"  {name + ':':{first}} {value + ',':{second}} expected {wanted}" for name, value, wanted in rows]


def shapes(**changed):
    """The lines about pre's arguments, with gamma if it is among the changed ones."""
    arguments = {"x": "[2, 4, 7]", "phi": "[24, 28]", "alpha": "[3]", "bias": "[24]"} | changed
    wanted = {"x": "[*batch, 4, 7]", "phi": "[24, 28]", "alpha": "[3]", "bias": "[24]"}
    wanted["gamma"] = "[4, 7]" if arguments.get("gamma", "").count(",") else "[28]"
    return listed([(name, shape, wanted[name]) for name, shape in arguments.items()])


def post_shapes(x="[2, 4, 7]", f="[2, 7]", h_post="[2, 4]", h_res="[2, 4, 4]"):
    arguments = {"x": (x, "n, dim"), "f": (f, "dim"), "h_post": (h_post, "n"), "h_res": (h_res, "n, n")}
    return listed([(name, value, f"[*batch, {wanted}]") for name, (value, wanted) in arguments.items()])


def test_phi_of_the_wrong_shape():
    says(
        ShapeError,
        lambda: pre(phi=PHI.T),
        "mhc.pre: phi has size 28 where 24 is needed",
        *shapes(phi="[28, 24]"),
        "transposed",
        "use mhc.from_liger or phi.T",
    )
    says(
        ShapeError,
        lambda: pre(phi=torch.randn(25, 28)),
        "mhc.pre: phi has size 25 where 24 is needed",
        *shapes(phi="[25, 28]"),
        "25 rows",
        "3 (n=1), 8 (n=2), 15 (n=3), 24 (n=4), 80 (n=8)",
    )
    says(
        ShapeError,
        lambda: pre(phi=torch.randn(15, 28)),
        "mhc.pre: phi has size 15 where 24 is needed",
        *shapes(phi="[15, 28]"),
        "15 rows",
        "n=3, but x has n=4",
    )
    says(
        ShapeError,
        lambda: pre(phi=torch.randn(24, 27)),
        "mhc.pre: phi has size 27 where 28 is needed",
        *shapes(phi="[24, 27]"),
        "4*7 channels of x",
    )


def test_streams_innermost():
    says(
        ShapeError,
        lambda: pre(x=X.mT),
        "mhc.pre: phi has size 24 where 63 is needed",
        "  x:     [2, 7, 4], expected [*batch, 7, 4]",
        "  phi:   [24, 28],  expected [63, 28]",
        "  alpha: [3],       expected [3]",
        "  bias:  [24],      expected [63]",
        "use mhc.streams_from_te",
    )

    says(
        ShapeError,
        lambda: post(x=X.mT),
        "mhc.post: f has dim=7, but x has dim=4",
        *post_shapes(x="[2, 7, 4]"),
        "use mhc.streams_from_te",
    )


def test_alpha_that_is_not_a_vector_of_three():
    says(
        ShapeError,
        lambda: pre(alpha=torch.tensor(1.0)),
        "mhc.pre: alpha has 0 dimensions, expected 1",
        *shapes(alpha="[]"),
        "alpha = [pre, post, res]",
    )
    says(TypeError, lambda: pre(alpha=1.0), "mhc.pre: alpha is a float, expected a tensor [3]")
    says(
        TypeError,
        lambda: pre(alpha=tuple(ALPHA)),
        "mhc.pre: alpha is a tuple of 3",
        "torch.stack(alpha)",
    )


def test_bias_in_the_layout_of_transformer_engine():
    says(
        ShapeError,
        lambda: pre(bias=BIAS[None]),
        "mhc.pre: bias has 2 dimensions, expected 1",
        *shapes(bias="[1, 24]"),
        "use mhc.from_te or bias.squeeze(0)",
    )


def test_gamma_of_one_stream_or_transposed():
    lines = "gamma.repeat(4)"
    wrong = "mhc.pre: gamma has size 7 where 28 is needed"
    says(ShapeError, lambda: pre(gamma=torch.ones(7)), wrong, *shapes(gamma="[7]"), lines)
    wrong = "mhc.pre: gamma has size 7 where 4 is needed"
    says(ShapeError, lambda: pre(gamma=torch.ones(7, 4)), wrong, *shapes(gamma="[7, 4]"), lines)


def test_dtypes():
    floats = "bfloat16, float16, float32, float64"
    says(TypeError, lambda: pre(x=X.int()), f"mhc.pre: x is int32, expected one of: {floats}")
    says(TypeError, lambda: pre(phi=PHI.int()), f"mhc.pre: phi is int32, expected one of: {floats}")
    fp8 = PHI.to(torch.float8_e4m3fn).requires_grad_()
    says(TypeError, lambda: pre(phi=fp8), f"mhc.pre: phi is float8_e4m3fn, expected one of: {floats}")
    says(
        TypeError,
        lambda: pre(phi=PHI.double()),
        "mhc.pre: phi is float64, but x is float32",
        "use phi.float() or x.double()",
    )
    full = "expected float32"
    says(TypeError, lambda: pre(alpha=ALPHA.bfloat16()), f"mhc.pre: alpha is bfloat16, {full}")
    says(TypeError, lambda: pre(gamma=torch.ones(28).half()), f"mhc.pre: gamma is float16, {full}")
    says(TypeError, lambda: post(h_post=H_POST.bfloat16()), f"mhc.post: h_post is bfloat16, {full}")
    says(TypeError, lambda: post(h_res=H_RES.double()), f"mhc.post: h_res is float64, {full}")
    says(TypeError, lambda: post(f=F.int()), "mhc.post: f is int32, expected one of: bfloat16, float16, float32")
    says(TypeError, lambda: mhc.sinkhorn(H_RES.int()), f"mhc.sinkhorn: logits is int32, expected one of: {floats}")
    says(TypeError, lambda: mhc.expand(F.int()), f"mhc.expand: x is int32, expected one of: {floats}")


def test_arguments_that_are_not_tensors():
    says(TypeError, lambda: pre(x=[1.0]), "mhc.pre: x is a list, expected a torch.Tensor")
    says(TypeError, lambda: post(f=None), "mhc.post: f is a NoneType, expected a torch.Tensor")


def test_required_tensors_cannot_be_none():
    says(TypeError, lambda: pre(bias=None), "mhc.pre: bias is a NoneType, expected a tensor [24]")
    saved = {"inv_rms": torch.ones(2), "h_mix": torch.ones(2, 24), "h_pre": H_POST, "h_post": H_POST}

    def backward(grad_h_in, **more):
        return mhc.pre_backward(grad_h_in, H_POST, H_RES, X, PHI, ALPHA, **saved, **more)

    name, floats = "mhc.pre_backward", "bfloat16, float16, float32, float64"
    says(TypeError, lambda: backward(None), f"{name}: grad_h_in is a NoneType, expected a torch.Tensor")
    says(TypeError, lambda: backward(F.int()), f"{name}: grad_h_in is int32, expected one of: {floats}")
    says(TypeError, lambda: backward(F, grad_x_post=3), f"{name}: grad_x_post is an int, expected a torch.Tensor")


def test_sparse_tensors():
    dense = "expected a dense tensor"
    says(TypeError, lambda: pre(x=X.to_sparse()), f"mhc.pre: x is sparse_coo, {dense}: x.to_dense()")
    says(TypeError, lambda: pre(bias=BIAS.to_sparse()), f"mhc.pre: bias is sparse_coo, {dense}: bias.to_dense()")
    says(TypeError, lambda: post(f=F.to_sparse()), f"mhc.post: f is sparse_coo, {dense}: f.to_dense()")


def test_a_head_with_the_weights_of_a_connection():
    says(
        ShapeError,
        lambda: mhc.head(X, PHI, ALPHA[:1], BIAS[:4]),
        "mhc.head: phi has size 24 where 4 is needed",
        "  x:     [2, 4, 7], expected [*batch, 4, 7]",
        "  phi:   [24, 28],  expected [4, 28]",
        "  alpha: [1],       expected [1]",
        "  bias:  [4],       expected [4]",
        "24 rows belongs to a hyper-connection",
    )


def test_too_few_dimensions():
    wanted = "expected [*batch, n, dim] with n >= 1 and dim >= 1"
    says(ShapeError, lambda: pre(x=X[0, 0]), f"mhc.pre: x is [7], {wanted}")
    says(ShapeError, lambda: pre(x=X[..., :0]), f"mhc.pre: x is [2, 4, 0], {wanted}")
    says(ShapeError, lambda: mhc.expand(torch.tensor(1.0)), "mhc.expand: x is [], expected [*batch, dim]")


def test_tensors_on_two_devices():
    move = "move them to one device"
    says(ValueError, lambda: pre(bias=BIAS.to("meta")), f"mhc.pre: bias is on meta, but x is on cpu; {move}")
    says(ValueError, lambda: post(f=F.to("meta")), f"mhc.post: f is on meta, but x is on cpu; {move}")


def test_a_layer_output_or_coefficients_of_the_wrong_shape():
    says(
        ShapeError,
        lambda: post(f=X),
        "mhc.post: f has batch=[2, 4], but x has batch=[2]",
        *post_shapes(f="[2, 4, 7]"),
        "f has a stream dimension",
    )
    says(
        ShapeError,
        lambda: post(f=F[:, :5]),
        "mhc.post: f has dim=5, but x has dim=7",
        *post_shapes(f="[2, 5]"),
        "needs 7 channels per token",
        "has 5",
    )
    says(
        ShapeError,
        lambda: post(h_res=H_RES[:, :3, :3]),
        "mhc.post: h_res has n=3, but x has n=4",
        *post_shapes(h_res="[2, 3, 3]"),
        "one row per stream of x",
    )
    says(
        ShapeError,
        lambda: post(h_res=H_RES.flatten(-2)),
        "mhc.post: h_res has batch=[], but x has batch=[2]",
        *post_shapes(h_res="[2, 16]"),
        "h_res.unflatten(-1, (4, 4))",
    )


@pytest.mark.parametrize("name, value", [("f", F[:1]), ("h_post", H_POST[:1]), ("h_res", H_RES[:1])])
def test_leading_dimensions_are_never_broadcast(name, value):
    says(
        ShapeError,
        lambda: post(**{name: value}),
        f"mhc.post: {name} has batch=[1], but x has batch=[2]",
        *post_shapes(**{name: str(list(value.shape))}),
        "nothing is broadcast",
    )


def test_matrices_that_are_not_square():
    says(
        ShapeError,
        lambda: mhc.sinkhorn(torch.randn(3, 4)),
        "mhc.sinkhorn: logits has n=3 and n=4, which must be equal",
        "  logits: [3, 4], expected [*batch, n, n]",
        "square",
    )


def test_pre_backward_checks_its_shapes():
    saved = {"inv_rms": torch.ones(2), "h_mix": torch.ones(2, 23), "h_pre": H_POST, "h_post": H_POST}
    says(
        ShapeError,
        lambda: mhc.pre_backward(F, H_POST, H_RES, X, PHI, ALPHA, **saved),
        "mhc.pre_backward: h_mix has mixes=23, but phi has mixes=24",
        "  x:           [2, 4, 7], expected [*batch, n, dim]",
        "  phi:         [24, 28],  expected [mixes, features]",
        "  grad_h_in:   [2, 7],    expected [*batch, dim]",
        "  grad_h_post: [2, 4],    expected [*batch, n]",
        "  grad_logits: [2, 4, 4], expected [*batch, n, n]",
        "  inv_rms:     [2],       expected [*batch]",
        "  h_mix:       [2, 23],   expected [*batch, mixes]",
        "  h_pre:       [2, 4],    expected [*batch, n]",
        "  h_post:      [2, 4],    expected [*batch, n]",
    )


@pytest.mark.parametrize("where", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_token(where, value):
    x = torch.randn(4, N, DIM)
    clean = [*mhc.pre(x, PHI, ALPHA, BIAS), mhc.head(x, PHI[:N], ALPHA[:1], BIAS[:N])]
    f, others = torch.randn(4, DIM), torch.arange(4) != where
    clean.append(mhc.post(x, f, clean[1], clean[2]))
    x[where, 1, 2] = value
    dirty = [*mhc.pre(x, PHI, ALPHA, BIAS), mhc.head(x, PHI[:N], ALPHA[:1], BIAS[:N])]
    dirty.append(mhc.post(x, f, dirty[1], dirty[2]))
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(before[others], after[others])
    assert not dirty[-1][where].isfinite().all()


def test_no_tokens_give_empty_results_and_zero_gradients():
    leaves = [t.clone().requires_grad_() for t in (X[:0], PHI, ALPHA, BIAS, torch.ones(N * DIM))]
    h_in, h_post, h_res = mhc.pre(*leaves[:4], gamma=leaves[4])
    x_next = mhc.post(leaves[0], h_in, h_post, h_res)
    assert [t.shape for t in (h_in, h_post, h_res, x_next)] == [(0, 7), (0, 4), (0, 4, 4), (0, 4, 7)]
    x_next.sum().backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()
