"""Again: with the same inputs on dirty memory, the backward twice, then other inputs, then the first ones.

Finds what a first call on fresh memory hides: accumulators that expect zeros, workspaces that are not reset, results
kept by shape, weights copied once, gradients that a backward destroys.
"""

from __future__ import annotations

from ..compare import difference
from ..memory import DIRT_FILL
from ..results import CERTAIN, STATISTICAL
from ..run import How, Run
from ..session import Session
from . import decisions, maps, values

NAME = "second_call"
DIRTY = "the second call with the same inputs, on memory that holds other bytes, gives another result"
BACK = "after a call with other inputs, the first inputs give another result"


def run(session: Session) -> None:
    first = session.first
    dirty = session.execute(NAME, NAME, How(fill=DIRT_FILL, twice=True, fresh=False))
    if session.raised(NAME, "the second call, same inputs", dirty):
        return
    agree(session, NAME, NAME, dirty, DIRTY)
    if dirty.again is not None:
        _backward_twice(session, dirty)
    _others(session)
    _workspace(session, first)
    back = session.execute(NAME, "back", How(fresh=False))
    if not session.raised(NAME, "the first inputs again, after others", back):
        agree(session, NAME, "back", back, BACK)
    session.repeated += 2


def agree(session: Session, probe: str, label: str, done: Run, text: str) -> bool:
    """Hold a run of the same inputs to the first one: bit for bit, or within the noise (a note). True when it is."""
    if not session.same_decisions(done):
        settled = decisions.settle(session, done, session.references(session.material, done))
        skip = frozenset(session.bad)
        return not values.judge(session, done, settled, probe, label, noise=False, repeat=None, skip=skip)
    names = {n: t for n, _, t in session.first.results()}
    good = True
    for name, kind, tensor in done.results():
        if name in session.bad:
            continue
        reference = session.ref.reference(name, kind)
        apart = difference(names.get(name), tensor, reference)
        if apart.equal:
            continue
        if apart.lawful:
            said = f"{name} differs between runs, within the noise of legal orders ({apart.text})"
            session.note("order_nondeterminism", name, said)
            continue
        good = False
        where = None if apart.mask is None else session.locate(name, apart.mask)
        rung = CERTAIN if apart.certain else STATISTICAL
        said = f"{text}: {apart.text} ({label})"
        session.find(rung, probe, name, said, where=where, measured=apart.measured, limit=apart.limit)
        if tensor is not None:
            maps.draw_one(session, label, kind, tensor, session.ref, name)
    return good


def _workspace(session: Session, first: Run) -> None:
    """What the first call returned must survive the next."""
    for name, live in first.live.items():
        apart = difference(first.outputs[name], live, None)
        if not apart.equal and name not in first.overwritten:
            where = None if apart.mask is None else session.locate(name, apart.mask)
            session.find(
                CERTAIN, NAME, name, f"a later call overwrote what the first returned: {apart.text}", where=where
            )


def _backward_twice(session: Session, done: Run) -> None:
    for name, grad in done.grads.items():
        again = (done.again or {}).get(name)
        apart = difference(grad, again, session.ref.reference(name, "grad"))
        if not apart.equal and not apart.lawful and name not in session.bad:
            where = None if apart.mask is None else session.locate(name, apart.mask)
            session.find(
                CERTAIN,
                NAME,
                name,
                f"the backward run twice on one graph gives another gradient: {apart.text}",
                where=where,
            )
            if again is not None:
                maps.draw_one(session, "backward twice", "grad", again, session.ref, name)


def _others(session: Session) -> None:
    """Other values of the same shapes, judged by their own golden: a result kept by shape shows here."""
    material = session.variant(1)
    others = session.execute(NAME, "other inputs", How(fresh=False), material)
    if session.raised(NAME, "other inputs of the same shapes", others):
        return
    plain = session.references(material, others)
    settled = decisions.settle(session, others, plain)
    values.judge(session, others, settled, NAME, "other inputs", noise=False, repeat=None, skip=frozenset(session.bad))
