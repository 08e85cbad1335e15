"""Other projects' weights: exact round trips, the same function, and clear errors for refused conversions."""

import pytest
import torch

from goldsmith import assay, router
from router import peers

STATES = {
    "omnimoe": (peers.omnimoe_state, {}, router.from_omnimoe, router.to_omnimoe, {"k": 4}),
    "omnimoe_no_square": (peers.omnimoe_state, {"rows": 30}, router.from_omnimoe, router.to_omnimoe, {"k": 4}),
    "peer": (peers.peer_state, {}, router.from_peer_pytorch, router.to_peer_pytorch, {"k": 3, "heads_compete": True}),
    "peer_separate": (
        peers.peer_state, {"separate": True, "rms": False}, router.from_peer_pytorch, router.to_peer_pytorch,
        {"k": 3, "heads_compete": False},
    ),
    "memory": (
        peers.memory_state, {}, router.from_product_key_memory, router.to_product_key_memory, {"k": 3},
    ),
    "memory_norms": (
        peers.memory_state, {"pre": True, "out": True}, router.from_product_key_memory, router.to_product_key_memory,
        {"k": 3, "compete": False},
    ),
    "memory_batch": (
        peers.memory_state, {"batch": True}, router.from_product_key_memory, router.to_product_key_memory, {"k": 3},
    ),
}  # fmt: skip
everyone = pytest.mark.parametrize("name", list(STATES))


def converted(name, dtype=torch.float32):
    make, sizes, load, save, options = STATES[name]
    state = {key: t.to(dtype) if t.is_floating_point() else t for key, t in make(**sizes).items()}
    return state, load(state, **options), save, options


@everyone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_round_trip_is_the_same_bit_for_bit(name, dtype):
    state, module, save, _ = converted(name, dtype)
    back = save(module)
    assert set(back) == set(state)
    for key, value in state.items():
        assert back[key].shape == value.shape and torch.equal(back[key].to(value.dtype), value), key
        of_batches = value.is_floating_point() and ("norm_" in key or "norm.fn" in key)
        assert back[key].dtype == (torch.float32 if of_batches else value.dtype), "a BatchNorm stays in float32"
    assert all(not p.is_meta for p in module.parameters()) and all(not b.is_meta for b in module.buffers())


def check_equivalent(state, ours, theirs, *shape):
    """Compares our module in float32, converted from a state, with their function of that state in float64.

    The assay gets the state's keys with "__" for dots; tensors that are not floating point are constants.
    """
    integers = {key: value for key, value in state.items() if not value.is_floating_point()}
    floats = {key.replace(".", "__"): value for key, value in state.items() if key not in integers}

    def named(tensors):
        return {key.replace("__", "."): value for key, value in tensors.items()} | integers

    def candidate(h, **tensors):
        module = ours(named(tensors)).eval()
        module.backend = "reference"
        return module(h)

    def golden(h, **tensors):
        return theirs(named(tensors), h)

    inputs = {"h": torch.randn(*shape), **floats}
    assay.check(assay.Target(candidate, golden, cases=inputs, grads=("h",)), probes=("values", "ensemble"))


@everyone
def test_our_module_computes_what_the_other_project_computes(name):
    state, _, _, options = converted(name)
    load = STATES[name][2]
    own = {"omnimoe": peers.omnimoe, "peer": peers.peer, "memory": peers.memory}[name.partition("_")[0]]
    theirs = {"heads_compete": "compete", "compete": "compete", "k": "k"}
    arguments = {theirs[key]: value for key, value in options.items()}
    if name.startswith("memory"):
        arguments.setdefault("compete", True)
    check_equivalent(state, lambda s: load(s, **options), lambda s, h: own(s, h, **arguments), 40, 12)


@everyone
def test_converted_modules_and_states_share_no_tensors(name):
    state, module, save, _ = converted(name)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    for value in [*state.values(), *save(module).values()]:
        value.zero_()
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_rows_beyond_the_square_are_kept_and_never_chosen():
    state, module, _, _ = converted("omnimoe_no_square")
    module.backend = "reference"
    assert module.w_in.shape[0] == 30 and module.sizes == (5, 5)
    routed = module.eval()(torch.randn(300, 12), return_router=True)[1]
    assert routed.indices.max() == 24


def test_heads_that_do_not_compete_choose_one_expert_for_any_k():
    assert converted("peer_separate")[1].k == 1
    with pytest.raises(TypeError, match="heads_compete"):
        router.from_peer_pytorch(peers.peer_state(), k=3)


@everyone
def test_missing_and_unknown_keys_are_listed(name):
    state, _, _, options = converted(name)
    load = STATES[name][2]
    first = "keys" if "keys" in state else "up_embed.weight"
    changed = {key: value for key, value in state.items() if key != first} | {"extra.bias": torch.zeros(1)}
    with pytest.raises(ValueError, match=f"missing: {first}; unknown: extra.bias"):
        load(changed, **options)
    with pytest.raises(TypeError, match="state_dict is a list, expected a mapping"):
        load([], **options)


INTEGERS = torch.zeros(25, 12, dtype=torch.int64)


@pytest.mark.parametrize(
    "text, call",
    [
        ("from_peer_pytorch: weight_up_embed.weight is int64, expected one of: bfloat16, float16, float32, float64",
         lambda: router.from_peer_pytorch(
             peers.peer_state() | {"weight_up_embed.weight": INTEGERS}, k=3, heads_compete=True)),
        ("from_omnimoe: down_embed.weight is bfloat16, but up_embed.weight is float32; convert one: down_embed.weight",
         lambda: router.from_omnimoe(peers.omnimoe_state() | {"down_embed.weight": INTEGERS.bfloat16()}, k=3)),
        ("from_omnimoe: router_norm_y.running_var is float16, but up_embed.weight is float32; convert one",
         lambda: router.from_omnimoe(
             peers.omnimoe_state() | {"router_norm_y.running_var": torch.ones(5).half()}, k=3)),
        ("from_omnimoe: router_norm_x.num_batches_tracked is float32, expected one of: int64",
         lambda: router.from_omnimoe(
             peers.omnimoe_state() | {"router_norm_x.num_batches_tracked": torch.tensor(7.0)}, k=3)),
        ("from_product_key_memory: norm.bias is float64, but values.weight is float32; convert one: norm.bias.to",
         lambda: router.from_product_key_memory(
             peers.memory_state() | {"norm.bias": torch.ones(4, dtype=torch.float64)}, k=3)),
    ],
)  # fmt: skip
def test_tensors_of_a_wrong_dtype_are_reported_by_name(text, call):
    with pytest.raises(TypeError, match=f"^router.{text}"):
        call()


@pytest.mark.parametrize(
    "error, text, call",
    [
        (ValueError, "product_key_topk=2 < 3: no exact top-k", lambda: router.from_peer_pytorch(
            peers.peer_state(), k=3, heads_compete=True, product_key_topk=2)),
        (TypeError, "router.from_peer_pytorch: product_key_topk='x' is of type str, expected a whole number, or None",
         lambda: router.from_peer_pytorch(peers.peer_state(), k=3, heads_compete=True, product_key_topk="x")),
        (ValueError, "differentiable_topk is not offered", lambda: router.from_product_key_memory(
            peers.memory_state(), k=3, differentiable_topk=True)),
        (ValueError, "concat_values_and_combine is not offered", lambda: router.from_product_key_memory(
            peers.memory_state() | {"maybe_concat_combine.2.weight": torch.zeros(1)}, k=3)),
        (ValueError, r"from_omnimoe: router_gate_x.weight is \[5, 12\], expected floor\(sqrt\(40\)\) rows",
         lambda: router.from_omnimoe(peers.omnimoe_state() | {"up_embed.weight": torch.zeros(40, 12)}, k=3)),
        (ValueError, r"from_omnimoe: down_embed.weight is \[25, 9\], expected \[25, 12\]",
         lambda: router.from_omnimoe(peers.omnimoe_state() | {"down_embed.weight": torch.zeros(25, 9)}, k=3)),
        (ValueError, r"keys is \[3, 5, 4\], expected \[heads, s, 2, key_dim\]", lambda: router.from_peer_pytorch(
            peers.peer_state() | {"keys": torch.zeros(3, 5, 4)}, k=3, heads_compete=True)),
        (ValueError, r"router.from_omnimoe: k=26, but there are only 5 \* 5 experts",
         lambda: router.from_omnimoe(peers.omnimoe_state(), k=26)),
        (ValueError, r"router.from_peer_pytorch: k=26, but there are only 5 \* 5",
         lambda: router.from_peer_pytorch(peers.peer_state(), k=26, heads_compete=True)),
        (TypeError, "router.from_product_key_memory: k=True", lambda: router.from_product_key_memory(
            peers.memory_state(), k=True)),
        (ValueError, "router.from_peer_pytorch: activation='tanh' is unknown",
         lambda: router.from_peer_pytorch(peers.peer_state(), k=2, heads_compete=True, activation="tanh")),
        (ValueError, "to_omnimoe: router_norm='layer', .* only 'batch'",
         lambda: router.to_omnimoe(router.OmniMoE(8, 9, 2, intermediate_size=4))),
        (ValueError, "to_omnimoe: intermediate_size=0", lambda: router.to_omnimoe(
            router.OmniMoE.paper(8, 9, 2, intermediate_size=0))),
        (TypeError, "to_omnimoe: module is a PEER, expected a router.OmniMoE",
         lambda: router.to_omnimoe(router.PEER(8, 9, 2))),
        (ValueError, "to_peer_pytorch: k=2, .* only 1", lambda: router.to_peer_pytorch(
            router.PEER(8, 9, 2, weights="relu"))),
        (ValueError, "to_peer_pytorch: pre_norm='layer'", lambda: router.to_peer_pytorch(
            router.PEER(8, 9, 2, pre_norm="layer"))),
        (ValueError, "to_product_key_memory: query_norm='none'", lambda: router.to_product_key_memory(
            router.PEER(8, 9, 2, values_only=True))),
        (TypeError, "router.from_peer_pytorch: state_dict is a NoneType, expected a mapping of tensors",
         lambda: router.from_peer_pytorch(None, k=2, heads_compete=True)),
        (TypeError, "router.from_product_key_memory: state_dict is an int, expected a mapping",
         lambda: router.from_product_key_memory(3, k=2)),
        (ValueError, r"from_peer_pytorch: weight_down_embed.weight is \[\], expected two dimensions",
         lambda: router.from_peer_pytorch(
             peers.peer_state() | {"weight_down_embed.weight": torch.tensor(1.0)}, k=2, heads_compete=True)),
        (ValueError, r"from_omnimoe: up_embed.weight is \[\], expected two dimensions",
         lambda: router.from_omnimoe(peers.omnimoe_state() | {"up_embed.weight": torch.tensor(1.0)}, k=2)),
        (ValueError, r"from_omnimoe: gate_proj.weight is \[\], expected two dimensions",
         lambda: router.from_omnimoe(peers.omnimoe_state() | {"gate_proj.weight": torch.tensor(1.0)}, k=2)),
        (ValueError, r"from_omnimoe: router_norm_x.num_batches_tracked is \[2\], expected \[\]",
         lambda: router.from_omnimoe(
             peers.omnimoe_state() | {"router_norm_x.num_batches_tracked": torch.tensor([1, 2])}, k=2)),
    ],
)  # fmt: skip
def test_refused_conversions_say_why(error, text, call):
    with pytest.raises(error, match=text):
        call()


def functional(module):
    """The module as a function of its state."""
    return lambda state, h: torch.func.functional_call(module, state, h)


@pytest.mark.parametrize("compete", [True, False])
@pytest.mark.parametrize("separate", [True, False])
def test_agrees_with_an_installed_peer_pytorch(compete, separate):
    peer = pytest.importorskip("PEER_pytorch")
    theirs = peer.PEER(
        16, heads=2, num_experts=36, num_experts_per_head=3, dim_key=5, pre_rmsnorm=True,
        non_competing_scores=not compete, separate_embed_per_head=separate,
    )  # fmt: skip
    torch.nn.init.normal_(theirs.keys)

    def ours(state):
        return router.from_peer_pytorch(state, k=3, heads_compete=compete)

    check_equivalent(theirs.state_dict(), ours, functional(theirs), 2, 20, 16)


@pytest.mark.parametrize("compete", [True, False])
def test_agrees_with_an_installed_product_key_memory(compete):
    pkm = pytest.importorskip("product_key_memory")
    theirs = pkm.PKM(16, heads=2, num_keys=6, topk=3, dim_head=5, pre_layernorm=True, non_competitive_gates=not compete)

    def ours(state):
        return router.from_product_key_memory(state, k=3, compete=compete)

    check_equivalent(theirs.state_dict(), ours, functional(theirs), 2, 20, 16)
