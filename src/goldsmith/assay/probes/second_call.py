"""Again: on dirty memory, the backward twice; another call between forward and backward; the first inputs again.

Finds what a first call on fresh memory hides: accumulators that expect zeros, workspaces that are not reset, results
kept by shape, weights copied once, gradients that a backward destroys. In a graph that calls a kernel twice both
forwards come before both backwards, as they do here: what a backward needs may not lie where the next forward writes.

    forward A, forward B, backward B, backward A        each held to its own golden
"""

from __future__ import annotations

from ..execute.memory import DIRT_FILL
from ..execute.run import CandidateRun, Material, RunSettings
from ..judge.agreement import Difference, difference
from ..judge.examination import Session
from ..report.results import CERTAIN, STATISTICAL
from . import decisions, maps, values

NAME = "second_call"
DIRTY = "the second call with the same inputs, on memory that holds other bytes, gives another result"
BETWEEN = "with a call of other inputs between forward and backward the result is another: state that calls share"
BACK = "after a call with other inputs, the first inputs give another result"


def run(session: Session) -> None:
    dirty = session.execute(NAME, NAME, RunSettings(fill=DIRT_FILL, backward_twice=True, fresh=False))
    if session.raised(NAME, "the second call, same inputs", dirty):
        return
    agree(session, NAME, NAME, dirty, DIRTY)
    if dirty.second_grads is not None:
        _backward_twice(session, dirty)
    _interleaved(session)
    back = session.execute(NAME, "back", RunSettings(fresh=False))
    if not session.raised(NAME, "the first inputs again, after others", back):
        agree(session, NAME, "back", back, BACK)
    session.repeated += 2 if session.target.reset is not None else 3  # none of these was fresh


def _interleaved(session: Session) -> None:
    """A whole call with other inputs between forward and backward of the first ones; that call is judged, too."""
    material, made = session.variant(1), _Between(session)
    how = RunSettings(fresh=False, before_backward=lambda: made.call(material))
    done = session.execute(NAME, "interleaved", how)
    if made.error is not None:
        raise made.error
    if made.run is not None:
        _others(session, material, made.run)
    for name, apart in made.lost.items():
        where = None if apart.mask is None else session.locate(name, apart.mask)
        text = f"a later call overwrote what the first returned: {apart.text}"
        session.find(CERTAIN, NAME, name, text, where=where)
    told = "the first inputs, with a call of other inputs between forward and backward"
    if not session.raised(NAME, told, done):
        agree(session, NAME, "interleaved", done, BETWEEN)


class _Between:
    """The run in between; an exception of the assay's own is kept, since within a run all are the candidate's.

    lost: outputs and gradients of the very first run whose memory holds other numbers then.
    """

    def __init__(self, session: Session):
        self.session = session
        self.run: CandidateRun | None = None
        self.error: Exception | None = None
        self.lost: dict[str, Difference] = {}

    def call(self, material: Material) -> None:
        try:
            self.run = self.session.execute(NAME, "other inputs", RunSettings(fresh=False), material)
            self.lost = _lost(self.session.first)
        except Exception as error:  # noqa: BLE001
            self.error = error


def agree(session: Session, probe: str, label: str, done: CandidateRun, text: str) -> bool:
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


def _lost(first: CandidateRun) -> dict[str, Difference]:
    """What the first call returned, and its backward, must survive later calls; before the same inputs come again."""
    known = {**first.outputs, **{n: g for n, g in first.grads.items() if g is not None}}
    live = {n: t for n, t in {**first.live_outputs, **first.live_grads}.items() if n not in first.overwritten}
    apart = {n: difference(known[n], t, None) for n, t in live.items()}
    return {n: found for n, found in apart.items() if not found.equal}


def _backward_twice(session: Session, done: CandidateRun) -> None:
    for name, grad in done.grads.items():
        again = (done.second_grads or {}).get(name)
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


def _others(session: Session, material: Material, done: CandidateRun) -> None:
    """Other values of the same shapes, judged by their own golden: a result kept by shape shows here."""
    if session.raised(NAME, "other inputs of the same shapes", done):
        return
    plain = session.references(material, done)
    settled = decisions.settle(session, done, plain)
    values.judge(session, done, settled, NAME, "other inputs", noise=False, repeat=None, skip=frozenset(session.bad))
