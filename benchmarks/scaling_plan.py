"""What a training step sends, on paper: the collectives of a large mHC + OmniMoE model on 64 and 1,024 ranks.

    python -m benchmarks.scaling_plan

Nothing is measured here. Bytes follow from the sizes below, and seconds from the assumed rates. A rank is a GPU; a host
has 8. "inside" is traffic among the GPUs of a host, "between" is traffic among hosts; both count what one rank sends.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, DIM, STREAMS = 32, 4096, 4
EXPERTS, CHOSEN = 262_144, 64  # experts of a layer, each one row of w_in and one of w_out; a token visits CHOSEN
SHARED = 4 * DIM  # the intermediate size of the shared expert
TOKENS, MICROBATCHES = 8_192, 8  # of a rank: tokens of a batch, and batches of a step
HOST = 8
INSIDE, BETWEEN, FLOPS = 450e9, 50e9, 400e12  # assumed: bytes/s of NVLink and of one network card, bfloat16 FLOP/s

DENSE = LAYERS * (4 * DIM * DIM + 3 * DIM * SHARED)  # attention and the shared expert
CONNECTIONS = 2 * LAYERS * STREAMS * (STREAMS + 2) * STREAMS * DIM  # fn of two hyper-connections in a layer
TABLES = LAYERS * 2 * EXPERTS * DIM


@dataclass(frozen=True)
class Sent:
    """One kind of collective: bytes that a rank sends in a step, inside its host and between hosts."""

    name: str
    inside: float
    between: float


def share(ranks: int) -> float:
    """The part of a tensor that a rank sends in an all-gather or a reduce-scatter over `ranks`, as a ring does."""
    return (ranks - 1) / ranks


def gathered_everywhere(ranks: int) -> list[Sent]:
    """FSDP2 over all ranks, tables included."""
    return [
        Sent("all-gather of bf16 weights, twice a batch", 0, 2 * MICROBATCHES * 2 * (DENSE + TABLES) * share(ranks)),
        Sent("reduce-scatter of float32 gradients", 0, MICROBATCHES * 4 * (DENSE + TABLES) * share(ranks)),
    ]


def experts_in_a_host(ranks: int) -> list[Sent]:
    """FSDP2 within a host and replicas between hosts; the tables over the 8 GPUs of a host, by ExpertParallel.

    Weights are gathered and gradients scattered inside the host. Only at the end of a step do hosts sum gradients: each
    rank its eighth, of the dense weights and of the tables.
    """
    hosts = ranks // HOST
    tokens = TOKENS * (HOST - 1) * DIM * 2  # of all other ranks of the host, bfloat16, once
    return [
        Sent("all-gather of bf16 dense weights, twice a batch", 2 * MICROBATCHES * 2 * DENSE * share(HOST), 0),
        Sent("reduce-scatter of float32 dense gradients", MICROBATCHES * 4 * DENSE * share(HOST), 0),
        Sent("tokens to the experts and back, both ways", 4 * MICROBATCHES * LAYERS * tokens, 0),
        Sent("sum of dense gradients over hosts", 0, 2 * 4 * DENSE / HOST * share(hosts)),
        Sent("sum of table gradients over hosts", 0, 2 * 4 * TABLES / HOST * share(hosts)),
    ]


def sharded_tables(ranks: int) -> list[Sent]:
    """The same, but bfloat16 sums over hosts, and each host updates its share of the rows (ZeRO-1)."""
    hosts = ranks // HOST
    plan = experts_in_a_host(ranks)[:3]
    whole = (DENSE + TABLES) / HOST
    return [*plan, Sent("bf16 reduce-scatter and all-gather over hosts", 0, 2 * 2 * whole * share(hosts))]


NUMBERS = DENSE + CONNECTIONS + TABLES
PLANS = {  # and bytes of weights, gradients and AdamW's moments on a rank
    "FSDP2 over all ranks": (gathered_everywhere, lambda ranks: 16 * NUMBERS / ranks),
    "experts over a host, float32 sums": (experts_in_a_host, lambda ranks: 16 * NUMBERS / HOST),
    "experts over a host, bf16 sums": (sharded_tables, lambda ranks: NUMBERS / HOST * (4 + 12 * HOST / ranks)),
}


def compute_seconds() -> float:
    """Of one rank and step: 6 FLOP for each weight that a token visits."""
    visited = DENSE + CONNECTIONS + LAYERS * 2 * CHOSEN * DIM
    return 6 * visited * TOKENS * MICROBATCHES / FLOPS


def main() -> None:
    print(f"{(DENSE + CONNECTIONS) / 1e9:.1f}e9 dense weights, {TABLES / 1e9:.1f}e9 in tables of experts")
    print(f"a step of {TOKENS * MICROBATCHES:,} tokens a rank computes for {compute_seconds():.1f} s")
    for ranks in (64, 1024):
        for name, (plan, state) in PLANS.items():
            sent = plan(ranks)
            inside, between = sum(s.inside for s in sent), sum(s.between for s in sent)
            seconds = inside / INSIDE + between / BETWEEN
            compute = compute_seconds()
            print(f"\n{ranks:,} ranks, {name}: {state(ranks) / 1e9:.0f} GB of state on a rank")
            for one in sent:
                print(f"  {one.name:50}{one.inside / 1e9:8.1f} GB inside{one.between / 1e9:9.1f} GB between")
            overlapped = max(compute, inside / INSIDE, between / BETWEEN)
            print(
                f"  {seconds:.1f} s of traffic; efficiency {compute / (compute + seconds):.0%} without overlap, "
                f"{compute / overlapped:.0%} with all of it hidden"
            )


if __name__ == "__main__":
    main()
