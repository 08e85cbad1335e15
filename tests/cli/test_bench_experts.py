"""The experts as they are timed: the whole operator, each call other experts, and peers that compute the same."""

from dataclasses import replace

import pytest
import torch

from benchmarks.peers import ALL, kt_kernel
from goldsmith import assay, experts
from goldsmith.cli.bench import command, verifier
from goldsmith.cli.bench.experts import COMPARED, MoeInt8Subject, MoeSubject, SlotsSubject
from goldsmith.cli.bench.run import BenchRequest
from goldsmith.cli.bench.subject import MakeThere
from goldsmith.cli.terminal import console
from goldsmith.core import native
from goldsmith.core.op import Op
from goldsmith.experts import benchmarks
from goldsmith.experts._conventions import FACTORS

SIZES = {"H": 64, "I": 32, "E": 8, "k": 2}


def entry(monkeypatch, T, packed, r):
    monkeypatch.setitem(benchmarks.LAYERS, "test", SIZES)
    entry = benchmarks._entry("case", T, "test", packed, r, train=bool(r), on_cpu=True)
    return replace(entry, dtype=torch.float32) if packed != "bf16" else entry


def hold(subject, result):
    """`result()` of the subject is that of the reference with the same tensors, as far as it goes."""
    tensors, few = dict(subject.tensors), COMPARED

    def candidate(**inputs):
        subject.tensors = tensors | inputs
        return result()[:few].to(inputs["x"].dtype)

    def golden(**inputs):
        return subject.op.reference.forward(*(tensors | inputs).values(), **subject.options)[0][:few]

    inputs = {name: t for name, t in tensors.items() if t is not None}
    assay.check(assay.Target(candidate, golden, cases=inputs, grads=()), probes=("values",))


@pytest.mark.parametrize("packed", ["", "int4", "fp8_block"])
def test_the_timed_layer_has_lora_and_returns_all_gradients(monkeypatch, packed):
    subject = MoeSubject(Op.get("experts.moe"), entry(monkeypatch, 5, packed, 4), "cpu")
    ours = subject.ours("reference")
    shapes = [tuple(leaf.shape) for leaf in ours.leaves]
    assert shapes[:2] == [(5, 64), (5, 2)] and len(shapes) == 8, "x, weights and six factors; the base is frozen"
    assert all(g is not None and bool(g.any()) for g in ours.backward()())
    whole = subject.op.reference.forward(*subject.tensors.values(), **subject.options)[0]
    assert torch.equal(whole, ours.results()[0])
    hold(subject, lambda: subject.golden())


def test_a_token_uses_other_experts_at_every_call_until_all_were_used(monkeypatch):
    for kind, name in ((MoeSubject, "experts.moe"), (SlotsSubject, "experts.slots")):
        monkeypatch.setitem(benchmarks.LAYERS, "test", SIZES)
        entry = benchmarks._entry("decode", 1, "test", "int8", 0, train=False, on_cpu=True, slots=kind is SlotsSubject)
        subject = kind(Op.get(name), entry, "cpu")
        assert subject.decoding and not subject.timed_backward
        visited = torch.cat([turn.flatten() for turn in subject.turns["topk_ids"]])
        assert sorted(visited.tolist()) == list(range(8)) and len(subject.turns["topk_ids"]) == 4
        first, second = subject.ours("reference").forward, subject.turns["topk_ids"][1]
        first()
        inputs = subject.tensors | {"topk_ids": second}
        wanted = subject.op(*inputs.values(), backend="reference", **subject.options)
        assert torch.equal(first(), wanted if kind is MoeSubject else wanted[0])


def test_a_repeated_expert_is_packed_as_if_it_were_drawn(monkeypatch):
    subject = MoeSubject(Op.get("experts.moe"), entry(monkeypatch, 5, "int4", 4), "cpu")
    gate_up, down = subject.base.unpack()
    again = experts.pack(gate_up, down, format="int4")
    assert torch.equal(again.gate_up, subject.required("gate_up")) and torch.equal(again.down, subject.required("down"))
    weights = subject.weights()
    assert torch.equal(weights[0], gate_up) and torch.equal(weights[1], down)
    assert torch.equal(subject.weights([3, 6])[1], down[[3, 6]])


def test_the_bytes_of_a_case_are_those_of_its_base():
    timed = {case.name: case for case in benchmarks.MOE}
    for packed in ("bf16", "int4", "int8", "mxfp4", "fp8_block"):
        case = timed[f"decode[small,{packed}]"]
        base = MoeSubject(Op.get("experts.moe"), case, "cpu").base
        assert case.forward_bytes == pytest.approx(base.nbytes / 64 * 8, rel=0.01)


def test_the_error_in_int8_is_against_unrounded_activations():
    small = next(case for case in benchmarks.INT8 if case.name == "decode[small,T=256,int4]")
    assert small.products == ("vnni", "amx_int8") and not small.optional
    entry = replace(small, sizes={**small.sizes, "T": 8}, build=lambda **_: few)
    drawn = benchmarks.int8_inputs(MakeThere(torch.float32, "cpu", 0), T=8, **SIZES, r=0, packed="int4")
    few = drawn | {name: None for name in FACTORS}
    subject = MoeInt8Subject(Op.get("experts.moe_int8"), entry, "cpu")
    (got,) = subject.ours("reference").results()
    off = verifier.relative_error(subject.golden(), subject.ours("reference"))
    assert got.shape == (8, 64) and 1e-3 < off < 0.1, "8 bits cost about one per cent"
    exact = MoeSubject(Op.get("experts.moe"), replace(entry, build=lambda **_: few | {"save": False}), "cpu")
    assert torch.equal(exact.golden(), subject.golden())


@pytest.mark.parametrize("name", ["transformers", "grouped_mm"])
def test_transformers_under_peft_computes_the_same_layer(monkeypatch, name):
    subject = MoeSubject(Op.get("experts.moe"), entry(monkeypatch, 7, "", 4), "cpu")
    peer = ALL[name]
    if peer.missing() is not None:
        pytest.skip(peer.missing())
    hold(subject, lambda: peer.prepare(subject).results()[0].detach())
    gradients = peer.prepare(subject).backward()()
    assert len(gradients) == 6 and all(g is not None and bool(g.any()) for g in gradients)


def test_peers_of_other_operators_and_formats_are_left_out(monkeypatch):
    quantised = MoeSubject(Op.get("experts.moe"), entry(monkeypatch, 3, "int8", 4), "cpu")
    for name in ("eager", "compile", "transformers", "grouped_mm", "product", "embedding_bag"):
        assert ALL[name].prepare(quantised) is None
    for packed, r, train in (("fp8_block", 4, True), ("bf16", 0, True), ("mxfp4", 0, False)):
        monkeypatch.setitem(benchmarks.LAYERS, "test", SIZES)
        timed_entry = benchmarks._entry("case", 3, "test", packed, r, train=train, on_cpu=True)
        assert kt_kernel.prepare(MoeSubject(Op.get("experts.moe"), timed_entry, "cpu")) is None


def test_a_layer_is_timed_with_lora_of_rank_16_and_without(monkeypatch):
    timed = {case.name: case for case in benchmarks.MOE}
    for layer in ("small", "v2-lite"):
        base, lora = (timed[f"train[{layer},T=256,bf16,r={r}]"] for r in (0, 16))
        assert base.backward_flop == base.forward_flop < lora.forward_flop < lora.backward_flop
        assert not base.optional and set(lora.optional) == set(FACTORS)
    monkeypatch.setitem(benchmarks.LAYERS, "test", SIZES)
    subject = MoeSubject(
        Op.get("experts.moe"), benchmarks._entry("t", 5, "test", "bf16", 0, train=True, on_cpu=True), "cpu"
    )
    ours = subject.ours("reference")
    assert subject.timed_backward and [tuple(leaf.shape) for leaf in ours.leaves] == [(5, 64), (5, 2)]
    assert all(g is not None and bool(g.any()) for g in ours.backward()())


def test_codes_go_to_kt_kernel_in_its_encoding():
    from goldsmith.experts.packed.formats import E2M1, Codes

    codes = torch.tensor([[0x71, 0x0F]], dtype=torch.uint8)
    scale = torch.tensor([[126]], dtype=torch.uint8)
    inputs, powers = kt_kernel._in_its_encoding(Codes(codes, scale), "mxfp4")
    assert torch.equal(inputs, codes) and powers.dtype == torch.bfloat16 and powers.item() == 0.5 and E2M1[1] == 0.5
    halves = torch.tensor([[0.25]], dtype=torch.bfloat16)
    inputs, same = kt_kernel._in_its_encoding(Codes(codes, halves), "int4")
    assert inputs.tolist() == [[0xF9, 0x87]] and same is halves


def test_a_missing_kt_kernel_is_reported_with_its_reason(monkeypatch):
    monkeypatch.setattr(kt_kernel.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps kt-kernel" in kt_kernel.missing()
    monkeypatch.setattr(kt_kernel.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(native, "reason", lambda: None)
    monkeypatch.setattr(native, "machine_isa", lambda: ("avx512_vnni", "no AVX512_BF16"))
    assert kt_kernel.missing() == "its training kernels need AVX512_BF16 or AMX; this machine has avx512_vnni"
    monkeypatch.setattr(native, "machine_isa", lambda: ("amx", ""))
    assert kt_kernel.missing() is None


@pytest.mark.parametrize(
    "options, names, place",
    [
        ({}, ["experts.moe", "experts.slots"], ("cpu", ["experts.moe", "experts.slots"])),
        ({}, ["experts.moe", "mhc.pre"], ("cuda", ["mhc.pre"])),
        ({}, ["mhc.pre"], ("cuda", ["mhc.pre"])),
        ({"backend": "native"}, ["experts.moe"], ("cpu", ["experts.moe"])),
        ({"backend": "cuda_grouped"}, ["experts.moe"], ("cuda", ["experts.moe"])),
        ({"backend": "reference"}, ["experts.moe"], ("cuda", ["experts.moe"])),
        ({"device": "cuda"}, ["experts.moe", "mhc.pre"], ("cuda", ["experts.moe", "mhc.pre"])),
    ],
)
def test_kernels_of_the_cpu_are_not_timed_as_a_reference_on_a_gpu(monkeypatch, capsys, options, names, place):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command._device_and_names(BenchRequest(**options), names, console(stderr=True)) == place
    message = " ".join(capsys.readouterr().err.split())
    if place[0] == "cpu":
        assert f"{', '.join(names)}: timed on the CPU" in message and "--device cuda times the GPU" in message
    elif place[1] != names:
        assert "left out: experts.moe" in message and "CPUs" in message and "--device" in message
    else:
        assert not message
