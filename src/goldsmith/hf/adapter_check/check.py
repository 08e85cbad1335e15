"""check: the effect of an adapter in every runtime, against its effect in the trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...offload.attach import from_pretrained
from ..offload.adapters import adapter_folder
from ..offload.generation import tokenizer_of
from ..offload.loading import folder as model_folder
from . import runtimes
from .mistakes import ARRIVES, MISTAKES, variants
from .runtimes import RUNTIMES, Rows, RuntimeMissing, freed, log_probabilities

LENGTH, ROWS = 96, 4  # tokens of a row, and number of rows
TEXT = (
    "The quick brown fox jumps over the lazy dog. Shall I compare thee to a summer's day? Thou art more lovely and "
    "more temperate. def add(a, b): return a + b. In 1969 two people walked on the moon; they came back with 21 kg of "
    "rock. Whether it is nobler in the mind to suffer the slings and arrows of outrageous fortune is another question. "
)
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
LEAST = 0.9  # a smaller share of the effect is reported
UNEXPLAINED = 0.5  # a mistake that leaves a larger share of the effect unexplained is not named


@dataclass(frozen=True)
class RuntimeFinding:
    """What a runtime does with the adapter

    verdict   "arrives", "partly" (less than 0.9 of the effect), a key of MISTAKES, "unclear" (nothing explains half of
              the effect), "failed" or "missing"
    share     the runtime's effect along the trained model's: 1 if all of it arrives, 0 if none does
    error     the norm of the difference of both effects over the norm of the trained model's
    text      one sentence
    """

    runtime: str
    verdict: str
    share: float | None
    error: float | None
    text: str

    @property
    def wrong(self) -> bool:
        return self.verdict not in (ARRIVES, "missing")


@dataclass(frozen=True)
class AdapterCheck:
    """All findings; effect: the mean absolute change of a token's log-probability in the trained model."""

    tokens: int
    effect: float
    findings: tuple[RuntimeFinding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.wrong for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "tokens": self.tokens,
            "effect": self.effect,
            "runtimes": list(map(asdict, self.findings)),
        }


def check(
    model: str | Path,
    adapter: str | Path,
    *,
    which: Sequence[str] = tuple(RUNTIMES),
    text: str | None = None,
    merged: str | Path | None = None,
    begin: Callable[[str], None] = lambda name: None,
) -> AdapterCheck:
    """Runs the same tokens through the trained model and every runtime, without and with the adapter

    which    names of RUNTIMES
    text     the text to use; default: a few sentences
    merged   a merged model's folder to check in place of a merge made here
    begin    called with the name of each runtime before it runs

    Raises ValueError for an adapter that does not fit, and for one that changes nothing on this text.
    """
    unknown = [name for name in which if name not in RUNTIMES]
    if unknown:
        raise ValueError(f"runtime {unknown[0]!r} is unknown; known: {', '.join(RUNTIMES)}")
    base, folder = model_folder(model), adapter_folder(adapter)
    rows = rows_of(base, TEXT if text is None else text)
    begin("trained")
    with freed():
        candidates = _mistakes(base, folder, rows)
    with freed():
        without, with_adapter = runtimes.trained(base, folder, rows)
    wanted = with_adapter - without
    if not float(wanted.abs().max()):
        raise ValueError(f"{folder}: it changes no log-probability of the {len(wanted)} tokens of this text")
    findings = []
    for name in which:
        begin(name)
        findings.append(_finding(name, base, folder, rows, merged, wanted, candidates))
    return AdapterCheck(len(wanted), float(wanted.abs().mean()), tuple(findings))


def rows_of(folder: Path, text: str) -> Rows:
    """The text as rows of token ids."""
    ids = tokenizer_of(folder)(text)["input_ids"]
    rows = [ids[at : at + LENGTH] for at in range(0, min(len(ids), ROWS * LENGTH), LENGTH)]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise ValueError("the text has fewer than two tokens; give a longer one")
    return rows


def judge(name: str, effect: Tensor, wanted: Tensor, candidates: dict[str, Tensor]) -> RuntimeFinding:
    """The finding for a runtime with this effect; candidates: the effects of the known mistakes."""
    if not bool(torch.isfinite(effect).all()):
        return RuntimeFinding(name, "failed", None, None, "gives NaN or Inf")
    size = float(wanted.norm())
    share = float(effect @ wanted) / size**2
    distances = {ARRIVES: float((effect - wanted).norm())}
    distances |= {mistake: float((effect - other).norm()) for mistake, other in candidates.items()}
    nearest = min(distances, key=distances.__getitem__)
    error = distances[ARRIVES] / size
    if nearest != ARRIVES and distances[nearest] > UNEXPLAINED * max(size, float(candidates[nearest].norm())):
        text = (
            "cannot be told: its numbers are near neither the trained model's nor a known mistake's. The adapter may "
        )
        return RuntimeFinding(name, "unclear", share, error, text + "change less than this runtime's rounding")
    if nearest != ARRIVES:
        return RuntimeFinding(name, nearest, share, error, MISTAKES[nearest][0])
    if share < LEAST:
        return RuntimeFinding(name, "partly", share, error, f"applies {share:.2f} of the adapter's effect")
    return RuntimeFinding(name, ARRIVES, share, error, "applies the adapter")


def _finding(
    name: str, base: Path, folder: Path, rows: Rows, merged: str | Path | None, wanted: Tensor,
    candidates: dict[str, Tensor],
) -> RuntimeFinding:  # fmt: skip
    try:
        with freed():
            if name == "merged" and merged is not None:
                pair = log_probabilities(runtimes._plain(base), rows), runtimes.merged_folder(Path(merged), rows)
            else:
                pair = RUNTIMES[name](base, folder, rows)
    except RuntimeMissing as error:
        return RuntimeFinding(name, "missing", None, None, str(error))
    except REFUSALS as error:  # a refusal by another program's loader is the finding
        brief = " ".join(str(error).split())[:300] or type(error).__name__
        return RuntimeFinding(name, "failed", None, None, f"refuses the adapter, {type(error).__name__}: {brief}")
    return judge(name, pair[1] - pair[0], wanted, candidates)


def _mistakes(base: Path, folder: Path, rows: Rows) -> dict[str, Tensor]:
    """{mistake: its effect}, computed by the engine from the adapter with that mistake."""
    effects: dict[str, Tensor] = {}
    with from_pretrained(base, adapter={ARRIVES: folder}) as offloaded:
        attached = offloaded._attached
        layers = {layer.index: (layer.path, layer.spec) for layer in attached.layers}
        adapters = attached.adapters
        offloaded.set_adapter(None)
        without = log_probabilities(offloaded.model, rows)
        for mistake, (experts, others) in variants(adapters.fitted(ARRIVES), layers).items():
            offloaded.set_adapter(ARRIVES if others else None)
            offloaded.engine.adapters.put("mistake", experts)
            offloaded.engine.set_adapter("mistake")
            effects[mistake] = log_probabilities(offloaded.model, rows) - without
    return effects
