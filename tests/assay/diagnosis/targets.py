"""Small plain-torch targets whose wrong stage is known: a layer of three stages, and a low-rank adapter's backward."""

import torch

from goldsmith import assay
from goldsmith.assay import probes
from goldsmith.assay.diagnosis.search import search
from goldsmith.assay.judge.examination import Examination
from goldsmith.assay.probes import values


def session_of(target, selected=("values", "ensemble", "poison", "alias"), dtype=torch.float32, seed=0, device="cpu"):
    """An examination after its first probe, as a diagnosis begins with."""
    case = target.cases[0]
    examination = Examination(
        target, case, dtype, device, seed, frozenset(selected) & probes.select("default"), case.name
    )
    values.run(examination)
    return examination


def explain(examination, tensor, got, own, *, causes=None, spent=lambda: False):
    """The changes that a full search finds, the best first; `spent` ends it early."""
    session = search(examination, tensor, got, own, causes=causes)
    return [] if session is None else session.run(spent)


def best(kernel, golden, cases, tensor="y", **more):
    """What explains a tensor of the kernel's best."""
    target = assay.Target(kernel, golden, cases=cases, **({"backward": None} | more))
    examination = session_of(target, ("values", "ensemble"))
    got = next(t for n, _, t in examination.first.results() if n == tensor)
    changes = explain(examination, tensor, got, examination.first)
    assert changes, f"nothing explains {tensor}"
    return changes[0]


@assay.case(T=[6], D=[20], E=[12])
def layer_case(make, T, D, E):
    return {"x": make.normal(T, D), "w": make.normal(D, E), "b": make.normal(E)}


def layer_golden(x, w, b):
    h = assay.stage("h", x @ w)
    z = assay.stage("z", h + b)
    return assay.stage("p", torch.softmax(z, -1)) * 2


def layer(fault=None, names=("h", "z", "p"), ignore=(), double=False):
    """The golden's stages with one fault; `ignore`: its stages are told, but not taken back."""

    def tell(name, value):
        if name not in names:
            return value
        output = assay.stage(name, value)
        return value if name in ignore else output

    def kernel(x, w, b):
        k = 16 if fault == "h" else w.shape[0]
        h = tell("h", x[:, :k] @ w[:k])
        if fault == "otherwise":  # twice the golden's h, and halved where it is read
            h = tell("h2", h) / 2 * 2
        z = tell("z", h - b if fault == "z" else h + b)
        p = tell("p", torch.sigmoid(z) if fault == "p" else torch.softmax(z, -1))
        if fault == "p" and double:
            return p * 3
        return p * (2.5 if fault == "y" else 2)

    return assay.Target(kernel, layer_golden, cases=layer_case, name=f"layer, {fault}")


def scaled_inside(fault=None):
    """h is told at twice the golden's scale, and rightly used: only z may be blamed."""

    def kernel(x, w, b):
        h = assay.stage("h", 2 * (x @ w))
        z = assay.stage("z", h / 2 - b if fault == "z" else h / 2 + b)
        return assay.stage("p", torch.softmax(z, -1)) * 2

    return assay.Target(kernel, layer_golden, cases=layer_case, name=f"scaled inside, {fault}")


@assay.case(T=[6], D=[10], R=[4], E=[8])
def adapter_case(make, T, D, R, E):
    return {
        "x": make.normal(T, D), "w": make.normal(D, E), "a": make.normal(D, R), "b": make.normal(R, E), "scale": 0.3
    }  # fmt: skip


def adapter_golden(x, w, a, b, scale):
    low = assay.stage("low", x @ a)
    return x @ w + scale * (low @ b)


def adapter_golden_backward(x, w, a, b, scale, grad_y):
    low = x @ a
    base = assay.stage("base", grad_y @ w.mT)
    dlow = assay.stage("dlow", scale * (grad_y @ b.mT))
    return {"x": base + dlow @ a.mT, "w": x.mT @ grad_y, "a": x.mT @ dlow, "b": scale * low.mT @ grad_y}


def adapter(fault=None, named=True):
    """A LoRA-like product with a backward of its own, and one fault in it."""
    tell = assay.stage if named else lambda name, value: value

    def forward(x, w, a, b, scale):
        low = tell("low", x @ a)
        kept = low.abs() if fault == "saved" else low
        return x @ w + scale * (low @ b), kept

    def backward(x, w, a, b, scale, low, grad_y):
        base = tell("base", grad_y @ w.mT)
        dlow = tell("dlow", (1 if fault == "dlow" else scale) * (grad_y @ b.mT))
        dx = dlow @ a.mT if fault == "missing" else base + dlow @ a.mT
        da = torch.zeros_like(a) if fault == "not_computed" else x.mT @ dlow
        return {"x": dx, "w": x.mT @ grad_y, "a": da, "b": scale * low.mT @ grad_y}

    return assay.Target(
        forward, adapter_golden, cases=adapter_case, name=f"adapter, {fault}", outputs=("y", "low"), saved=("low",),
        backward=backward, golden_backward=adapter_golden_backward,
    )  # fmt: skip
