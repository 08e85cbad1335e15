"""The same values in other layouts: transposed, stepped, off by one element, and expanded with stride 0.

A clean exception is a refusal: accepted for inputs of a target with layouts="contiguous", never for output gradients,
since autograd sends them (`y.sum().backward()` sends stride 0).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..compare import same_bits
from ..memory import LAYOUTS, strides_for
from ..results import CERTAIN
from ..run import How, Material, Run
from ..session import Session
from . import decisions, values

NAME = "layouts"
REFUSALS = (ValueError, TypeError, RuntimeError)


def run(session: Session) -> None:
    inputs = tuple(session.material.inputs)
    sent = tuple(f"grad_{n}" for n in session.first.cotangents)
    contiguous_only = session.target.layouts == "contiguous"
    for layout in LAYOUTS:
        names = [n for n in (*inputs, *sent) if _differs(session, n, layout)]
        if contiguous_only and layout != "offset":
            refused = [n for n in names if n in inputs]
            names = [n for n in names if n in sent]
            if refused:
                _refused(session, layout, refused)
        if names:
            _tried(session, layout, names)
    if sent:
        _expanded_gradients(session)
    if not contiguous_only:
        _expanded_inputs(session)


def _value(session: Session, name: str) -> Tensor:
    return (
        session.material.inputs[name]
        if name in session.material.inputs
        else session.first.cotangents[name.removeprefix("grad_")]
    )


def _differs(session: Session, name: str, layout: str) -> bool:
    """Whether the layout changes anything for this tensor."""
    value = _value(session, name)
    return value.numel() > 0 and strides_for(value, layout) != strides_for(value, None)


def _tried(session: Session, layout: str, names: list[str]) -> None:
    """All tensors in this layout at once; when that fails, one at a time, to name the one that matters."""
    if _agrees(session, layout, names, report=len(names) == 1):
        return
    if len(names) > 1 and all([_agrees(session, layout, [n], report=True) for n in names]):
        _agrees(session, layout, names, report=True)


def _agrees(session: Session, layout: str, names: list[str], *, report: bool) -> bool:
    label = f"layout:{layout}({', '.join(names)})"
    how = How(layouts=dict.fromkeys(names, layout))
    done = session.execute(NAME, label, how)
    if done.error is not None:
        if report:
            session.raised(NAME, label, done)
        return False
    first = {n: t for n, _, t in session.first.results()}
    if all(same_bits(first.get(n), t) for n, _, t in done.results()):
        return True
    findings = list(session.findings)
    reference = session.ref
    if not session.same_decisions(done):
        reference = decisions.settle(session, NAME, done, session.references(session.material, done))
    failed = values.judge(
        session,
        done,
        reference,
        NAME,
        label,
        noise="ensemble" in session.selected,
        repeat=how,
        skip=frozenset(session.bad),
    )
    if not report:
        session.findings = findings
    return not failed


def _refused(session: Session, layout: str, names: list[str]) -> None:
    """layouts="contiguous": the candidate must say no, with an exception, or be right all the same."""
    label = f"layout:{layout}({', '.join(names)})"
    done = session.execute(NAME, label, How(layouts=dict.fromkeys(names, layout)))
    if isinstance(done.error, REFUSALS):
        session.note(
            "refused_layout", ", ".join(names), f"{layout} inputs are refused, as declared: {_first_line(done.error)}"
        )
    elif done.error is not None:
        session.raised(NAME, label, done)
    else:
        values.judge(session, done, session.ref, NAME, label, noise=False, repeat=None, skip=frozenset(session.bad))


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _expanded_gradients(session: Session) -> None:
    """One number sent to every element, as `y.sum().backward()` does."""
    cotangents = {
        n: c.flatten()[:1].reshape([1] * c.dim()).expand(c.shape)
        for n, c in session.first.cotangents.items()
        if c.numel() > 1
    }
    if not cotangents:
        return
    label = f"layout:stride0({', '.join(f'grad_{n}' for n in cotangents)})"
    done = session.execute(NAME, label, How(cotangents=cotangents))
    _judge_expanded(session, label, session.material, done)


def _expanded_inputs(session: Session) -> None:
    """Every floating input with its first row repeated by a stride of 0."""
    inputs = session.material.inputs
    changed = {n: _repeat_first(t) for n, t in inputs.items() if t.is_floating_point() and t.numel() > 1}
    changed = {n: t for n, t in changed.items() if n not in session.target.mutates}
    if not changed:
        return
    label = f"layout:stride0({', '.join(changed)})"
    material = replace(session.material, inputs={**inputs, **changed})
    done = session.execute(NAME, label, material=material)
    if done.error is None or not session.target.mutates:
        _judge_expanded(session, label, material, done)


def _repeat_first(t: Tensor) -> Tensor:
    axis = next(i for i, n in enumerate(t.shape) if n > 1)
    return t.narrow(axis, 0, 1).expand(t.shape)


def _judge_expanded(session: Session, label: str, material: Material, done: Run) -> None:
    if done.error is not None:
        text = f"{label} is refused: {_first_line(done.error)}"
        session.find(CERTAIN, NAME, done.phase, text)
        return
    settled = decisions.settle(session, NAME, done, session.references(material, done))
    values.judge(session, done, settled, NAME, label, noise=False, repeat=None, skip=frozenset(session.bad))
