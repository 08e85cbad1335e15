"""What goes wrong in sharded computations, in the words of people who train, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankCause:
    """One kind of fault; `advice` says where to look first."""

    id: str
    title: str
    advice: str


CAUSES = {
    cause.id: cause
    for cause in (
        RankCause(
            "gradient_on_one_rank",
            "a gradient that not every rank has",
            "Give zeros instead of None on ranks that did not use the parameter, and reduce over all ranks.",
        ),
        RankCause(
            "double_count",
            "a double count",
            "Something is summed over ranks although they have it all: look for a second reduction, for a missing "
            "division by the ranks (or the expert-parallel size), and for replicas that count once per rank.",
        ),
        RankCause(
            "average_for_sum",
            "an average where a sum belongs",
            "Look for ReduceOp.AVG, for DDP's and FSDP's own mean, and for a loss that every rank divides by its own "
            "number of tokens.",
        ),
        RankCause(
            "missing_reduction",
            "a missing reduction",
            "Sum it over the ranks: all_reduce or reduce_scatter, also in the backward. If the sum comes later, "
            "say Partial() in `placements`.",
        ),
        RankCause(
            "own_bias",
            "a rank that saw other data",
            "Look at how rows, weights and seeds reach the ranks: sampler, broadcast, order of ranks in a gather.",
        ),
        RankCause(
            "sentinel_leak",
            "sentinel rows that leak",
            "Mask the slots of other ranks' experts before they are used, in the backward too: 0 times NaN is NaN.",
        ),
        RankCause(
            "differs_between_ranks",
            "a tensor that differs between ranks",
            "Broadcast it from one rank after initialisation, draw it from one seed, and update it alike everywhere.",
        ),
    )
}


@dataclass(frozen=True)
class RankFinding:
    """A cause with its evidence. proven: the edited golden reproduces the ranks' numbers within the proven bounds."""

    cause: str
    tensor: str
    text: str
    proven: bool
    case: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "cause": self.cause,
            "title": CAUSES[self.cause].title,
            "tensor": self.tensor,
            "text": self.text,
            "proven": self.proven,
            "case": self.case,
            "advice": CAUSES[self.cause].advice,
        }

    def __str__(self) -> str:
        start = CAUSES[self.cause].title
        start = start if self.proven else f"probably {start} (not proven)"
        return f"{start[0].upper()}{start[1:]}: {self.text}. {CAUSES[self.cause].advice}"
