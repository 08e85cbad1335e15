"""Stages have the same names and shapes on every backend."""

import pytest
import torch

from goldsmith import Op
from goldsmith.assay.execute.tracer import Tracer
from goldsmith.core.tracing import listening

OPS = {name: op for name, op in Op.all().items() if name.startswith("mhc.")}
KERNELS = {name: op for name, op in OPS.items() if "triton" in op.backends}
GPU = torch.cuda.is_available()


def stages(op, backend, case, dtype, device="cpu"):
    """{stage: shape} of one forward and backward."""
    values = case.build(dtype, device)
    tensors = [values.get(name) for name in op.inputs]
    leaves = [t for name, t in zip(op.inputs, tensors, strict=True) if name in op.grads and t is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    tracer = Tracer(debug=True)
    with listening(tracer):
        results = op.all_results(*tensors, **{o: values[o] for o in op.options}, backend=backend)
        if leaves:
            outputs = [results[name] for name in op.outputs]
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
    return {name: tuple(value.shape) for name, value in tracer.records.items()}


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_reference_exposes_every_declared_stage(op):
    exposed = [stages(op, "reference", case, torch.float64) for case in op.cases if "large" not in case.tags]
    assert {name for shapes in exposed for name in shapes} == set(op.stages)


@pytest.mark.parametrize("op", KERNELS.values(), ids=list(KERNELS))
def test_triton_exposes_the_same_stages_as_the_reference(op):
    """Kernels work on flat tokens; their stages have the leading dimensions of x."""
    case = next(case for case in op.cases if case.name == "leading_dimensions")
    device = "cuda" if GPU else "cpu"
    values = case.build(torch.float32, device)
    reason = op.why_not("triton", *(values.get(name) for name in op.inputs), **{o: values[o] for o in op.options})
    if reason is not None:
        pytest.skip(reason)
    reference, triton = (stages(op, backend, case, torch.float32, device) for backend in ("reference", "triton"))
    assert triton == {name: reference.get(name) for name in triton}


def test_the_stages_of_a_connection_and_their_shapes():
    """For T = 2 * 3 tokens, n = 4, dim = 5, M = 24, K = 20."""
    batch = (2, 1, 3)
    streams, mixes = (*batch, 4, 5), (*batch, 24)
    forward = {"inv_rms": batch, "h_mix": mixes, "h_pre": (*batch, 4), "h_post": (*batch, 4), "h_in": (*batch, 5)}
    forward |= {"h_res_logits": (*batch, 4, 4), "h_res": (*batch, 4, 4)}
    backward = {"dh_pre": (*batch, 4), "dh_post": (*batch, 4), "dlogits": mixes, "dm": mixes, "dx": streams}
    backward |= {addend: streams for addend in ("projection", "rms", "collapse")}
    backward |= {"dphi": (24, 20), "dalpha": (3,), "dbias": (24,), "dgamma": (4, 5)}
    case = next(case for case in OPS["mhc.pre"].cases if case.name == "leading_dimensions")
    assert stages(OPS["mhc.pre"], "reference", case, torch.float32) == forward | backward
    case = next(case for case in OPS["mhc.post"].cases if case.name == "leading_dimensions")
    post = {"mix": streams, "inject": streams, "x_next": streams}
    post |= {"df": (*batch, 5), "dh_post": (*batch, 4), "dh_res": (*batch, 4, 4), "dx_post": streams}
    assert stages(OPS["mhc.post"], "reference", case, torch.float32) == post
