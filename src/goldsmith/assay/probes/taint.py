"""Which slices of an input have influence: the first, the last and a random one of every axis, candidate against golden.

The first and the last slice are set to NaN, the random one to a large finite number. Where the golden answers and the
candidate does not, the finite number is tried there too, since NaN alone is blind behind a maximum or a mask, and the
finite one behind saturation: a slice counts as read when either shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ladder
from ..bounds import SLACK
from ..reference import References, axis_names
from ..results import CERTAIN
from ..run import Material, Run
from ..session import Session
from .scaling import far, taken

NAME = "taint"


@dataclass(frozen=True)
class Slice:
    """One index of one axis of one input."""

    name: str
    axis: int
    index: int
    text: str

    def filled(self, session: Session, value: float | None) -> Material:
        """The inputs with this slice replaced: by `value`, or by a large finite number of random sign."""
        copy = session.material.inputs[self.name].clone(memory_format=torch.contiguous_format)
        part = copy.select(self.axis, self.index) if copy.dim() else copy
        if value is None:
            generator = torch.Generator().manual_seed(session.seed + self.axis)
            signs = torch.randint(0, 2, part.shape, generator=generator).to(part.device, part.dtype) * 2 - 1
            part.copy_(signs * far(copy))
        else:
            part.fill_(value)
        return session.material.with_inputs({self.name: copy})


def run(session: Session) -> None:
    generator = torch.Generator().manual_seed(session.seed + 11)
    for name, tensor in session.material.inputs.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        names = axis_names(tensor.shape, session.case.sizes)
        for axis in range(max(tensor.dim(), 1)):
            length = tensor.shape[axis] if tensor.dim() else 1
            label = f"axis {names[axis]}" if tensor.dim() else "the scalar"
            middle = int(torch.randint(0, length, (1,), generator=generator))
            for index in sorted({0, length - 1}):
                _nan(session, Slice(name, axis, index, f"{name}[{label} = {index}]"))
            _finite(session, Slice(name, axis, middle, f"{name}[{label} = {middle}]"))


def _results(session: Session, done: Run) -> dict[str, Tensor]:
    skip = session.bad | set(session.target.decisions)
    return {n: t for n, _, t in done.results() if t is not None and n not in skip and t.is_floating_point()}


def _ran(session: Session, material: Material, label: str) -> tuple[Run, References] | None:
    done = session.execute(NAME, label, material=material, look=False)
    if done.error is not None:  # a candidate may refuse what is not a number, or what is out of range
        return None
    return done, session.references(material, done, taken(session, done))


def _nan(session: Session, part: Slice) -> None:
    made = _ran(session, part.filled(session, float("nan")), f"taint:nan({part.text})")
    if made is None:
        return
    done, references = made
    suspects = []
    for name, tensor in _results(session, done).items():
        expected = references.values.get(name)
        if expected is None or expected.shape != tensor.shape:
            continue
        silent = torch.isnan(expected) & ~torch.isnan(tensor)
        leaking = torch.isnan(tensor) & ~torch.isnan(expected)
        if bool(silent.any()) or bool(leaking.any()):
            suspects.append((name, silent, leaking))
    if suspects:
        _second_opinion(session, part, suspects)


def _second_opinion(session: Session, part: Slice, suspects: list[tuple[str, Tensor, Tensor]]) -> None:
    """The large finite number in the same slice decides."""
    made = _ran(session, part.filled(session, None), f"taint:finite({part.text})")
    if made is None:
        return
    done, references = made
    first = {n: t for n, _, t in session.first.results()}
    for name, silent, leaking in suspects:
        tensor = _results(session, done).get(name)
        if tensor is None or name not in references.values:
            continue
        still = tensor == first[name]
        _missing(session, part, name, silent & still, tensor, references)
        unmoved = references.values[name] == session.ref.values[name]
        _extra(session, part, name, leaking & unmoved, "NaN")


def _finite(session: Session, part: Slice) -> None:
    made = _ran(session, part.filled(session, None), f"taint:finite({part.text})")
    if made is None:
        return
    done, references = made
    first = {n: t for n, _, t in session.first.results()}
    for name, tensor in _results(session, done).items():
        expected, before = references.values.get(name), session.ref.bounded.get(name)
        if expected is None or before is None or expected.shape != tensor.shape or first[name] is None:
            continue
        change = (expected - before.value).abs()
        still = tensor == first[name]
        _missing(session, part, name, still & (change > 8 * before.bound), tensor, references)
        stepped = (tensor.double() - first[name].double()).abs() > 2 * SLACK * before.bound
        _extra(session, part, name, stepped & (change == 0), "a large number")


def _missing(session: Session, part: Slice, name: str, mask: Tensor, tensor: Tensor, references: References) -> None:
    """No influence although the golden's value has left what its rounding bound allows."""
    if not bool(mask.any()):
        return
    now = references.bounded[name]
    mask = mask & ((tensor.double() - now.value).abs() > SLACK * now.bound)
    if bool(mask.any()):
        where = _where(session, name, mask)
        text = f"{part.text} has no influence on {name} ({where.text}), in the golden it has: a reduction cut short, or a wrong mask"
        session.find(CERTAIN, NAME, name, text, where=where, measured=0.0)


def _extra(session: Session, part: Slice, name: str, mask: Tensor, what: str) -> None:
    if bool(mask.any()):
        where = _where(session, name, mask)
        text = f"{what} in {part.text} reaches {name} ({where.text}), in the golden it does not: a wrong mask, or a stray read"
        session.find(CERTAIN, NAME, name, text, where=where)


def _where(session: Session, name: str, mask: Tensor):
    reference = session.ref.reference(name, "output", noise=False)
    return ladder.locate(name, mask, reference)
