"""Steps of a small model: rows, padding, parts of the attention, packed weights, calls between phases, bad input."""

import tempfile
from pathlib import Path

import torch

from goldsmith import experts
from goldsmith.offload import Engine, ExpertStore
from goldsmith.offload.decoding._native import DecodeStep
from goldsmith.offload.decoding.cache import SequenceCache, SequenceRows, StepCache
from goldsmith.offload.decoding.model import DecoderLayer, DecoderModel, LinearLayer

H, HEADS, KV, D, E, K, V = 40, 4, 2, 16, 5, 3, 21
STORE = Path(tempfile.mkdtemp()) / "a.store"
ExpertStore.build(
    {layer: {"gate_up": torch.randn(E, 48, H), "down": torch.randn(E, H, 24)} for layer in range(2)}, STORE
)


def linear(rows, columns, dtype, format=None, rank=0):
    weight = (torch.randn(rows, columns) * columns**-0.5).to(dtype)
    packed = experts.pack_matrix(weight, format=format) if format else weight
    lora = (torch.randn(rank, columns) * columns**-0.5, torch.randn(rows, rank)) if rank else None
    return LinearLayer(packed, torch.randn(rows).to(dtype), lora)


def model_of(dtype, format=None, rank=0):
    def layer(index):
        norms = {name: torch.rand(H).to(dtype) for name in ("input_norm", "experts_norm")}
        products = {
            "query": linear(HEADS * D, H, dtype, format, rank), "key": linear(KV * D, H, dtype),
            "value": linear(KV * D, H, dtype, format, 2 * rank), "output": linear(H, HEADS * D, dtype, None, rank),
            "router": LinearLayer(torch.randn(E, H).to(dtype)),
        }  # fmt: skip
        heads = {"query_norm": torch.rand(D).to(dtype), "key_norm": torch.rand(KV * D).to(dtype)}
        return DecoderLayer(index=index, **norms, **products, **heads)

    speeds = torch.rand(D)

    def rotary(positions):
        angles = torch.arange(positions)[:, None] * speeds
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return DecoderModel(
        layers=(layer(0), layer(1)), embedding=torch.randn(V, H).to(dtype), final_norm=torch.rand(H).to(dtype),
        head=linear(V, H, dtype, format, rank), heads=HEADS, kv_heads=KV, head_dim=D, epsilon=1e-6, scaling=D**-0.5,
        experts_per_token=K, normalised=True, float_weights=False, rotary=rotary,
    )  # fmt: skip


def cache_of(rows, cached, dtype):
    keys, values = ([torch.randn(rows, KV, cached, D).to(dtype) for _ in range(2)] for _ in range(2))
    return StepCache(keys, values, torch.arange(rows).clamp(max=cached - 1))


FORMS = ((torch.float32, None, 0), (torch.bfloat16, None, 3), (torch.float32, "int8", 2))


def steps_are_finite_and_repeat():
    torch.manual_seed(0)
    with ExpertStore.open(STORE) as store, Engine(store, device="cpu", threads=2) as engine:
        for dtype, format, rank in FORMS:
            step = DecodeStep(engine, model_of(dtype, format, rank), 2)
            for rows, cached in ((1, 3), (2, 511), (8, 7), (5, 255), (1, 1100)):
                texts = []
                for direct in (True, False):
                    torch.manual_seed(rows)
                    cache, kept = cache_of(rows, cached, dtype), step._calls
                    tokens, logits = torch.arange(rows) % V, []
                    for _ in range(3):
                        if not direct:
                            step._calls = None
                        logits.append(step(tokens, cache))
                        tokens = logits[-1].argmax(-1)
                    step._calls = kept if not direct else step._calls
                    texts.append(torch.stack(logits))
                assert torch.isfinite(texts[0]).all() and cache.length == cached + 3
                assert torch.equal(*texts), (dtype, format, rows)


def sequences_do_not_depend_on_each_other():
    """Each has the bits that it has alone, while others come, go and grow longer."""
    torch.manual_seed(1)
    lengths = (700, 3, 511, 40, 1, 5, 6, 7)
    with ExpertStore.open(STORE) as store, Engine(store, device="cpu", threads=2) as engine:
        for dtype, format, rank in FORMS:
            step = DecodeStep(engine, model_of(dtype, format, rank), 2)
            pairs = [[torch.randn(2, KV, length, D).to(dtype) for _ in range(2)] for length in lengths]

            def sequence(row, pairs=pairs):
                return SequenceCache(*zip(*pairs[row], strict=True), lengths[row] + 3)

            alone = []
            for row in range(len(lengths)):
                one = sequence(row)
                alone.append([step(torch.tensor([row + at]), SequenceRows([one]))[0] for at in range(3)])
            caches, at = [sequence(row) for row in range(len(lengths))], [0] * len(lengths)
            for rows in ([0, 1, 2], [3, 1, 0], [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7], [7, 6, 0, 2]):
                logits = step(
                    torch.tensor([row + at[row] for row in rows]), SequenceRows([caches[row] for row in rows])
                )
                for row, value in zip(rows, logits, strict=True):
                    assert torch.equal(value, alone[row][at[row]]), (dtype, format, rank, rows, row)
                    at[row] += 1
            try:
                step(torch.tensor([0]), SequenceRows([caches[1]]))
            except ValueError as error:
                assert "no room for more than 6 positions" in str(error)
            else:
                raise AssertionError("no error")


def rows_of_eight_tokens_do_not_depend_on_each_other():
    """All tokens go to the same experts, as rows of them."""
    torch.manual_seed(2)
    x, ids = torch.randn(8, 96), torch.arange(2).expand(8, 2)
    for format in ("fp32", "bf16", "int8", "int4"):
        base = experts.pack(torch.randn(2, 64, 96), torch.randn(2, 96, 32), format=format)
        for dtype in (torch.float32, torch.bfloat16):
            tokens = x.to(dtype)
            rows = experts.slots(tokens, ids, base)
            alone = [experts.slots(token[None], ids[:1], base) for token in tokens]
            assert torch.equal(rows, torch.cat(alone)), (format, dtype)


def bad_input_is_refused():
    with ExpertStore.open(STORE) as store, Engine(store, device="cpu", threads=2) as engine:
        step, cache = DecodeStep(engine, model_of(torch.float32), 2), cache_of(2, 4, torch.float32)
        for token in (-1, V, 2**40):
            try:
                step(torch.tensor([0, token]), cache)
            except ValueError as error:
                assert f"row 1 has token {token}, expected tokens below {V}" in str(error)
            else:
                raise AssertionError("no error")
        assert cache.length == 4 and torch.isfinite(step(torch.tensor([0, 1]), cache)).all()


if __name__ == "__main__":
    steps_are_finite_and_repeat()
    sequences_do_not_depend_on_each_other()
    rows_of_eight_tokens_do_not_depend_on_each_other()
    bad_input_is_refused()
