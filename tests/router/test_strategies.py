"""The rule of auto, held to what was timed."""

import importlib
import json

import pytest
import torch

from goldsmith import Op, router
from goldsmith.router._common import FLOATS
from repo.tree import ROOT

SLOWER = 1.25  # of the quicker strategy's time: nearer the crossing either will do


@pytest.fixture
def strategies(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("strategies")


def wrong(measured, both_ways):
    """Where auto would take the strategy that was seen to be slower."""
    found = []
    for place, times in measured.items():
        total = {name: both_ways(both) for name, both in times.items()}
        sizes = place.tokens, place.k, place.num_experts, place.hidden
        taken = router.choose_strategy(*sizes, getattr(torch, place.dtype), place.device)
        if total[taken] > SLOWER * min(total.values()):
            found.append(f"{place}: {total}")
    return found


def test_auto_takes_the_quicker_strategy_where_both_were_timed(strategies):
    assert wrong(strategies.measured(), strategies.both_ways) == []


def test_dense_is_chosen_on_a_card_in_the_dtypes_alone_in_which_rows_have_it_ahead(strategies):
    ahead = set()
    for place, times in strategies.measured().items():
        total = {name: strategies.both_ways(both) for name, both in times.items()}
        if place.device == "cuda" and total["dense"] < total["gather"]:
            ahead.add(getattr(torch, place.dtype))
    taken = {d for d in FLOATS if router.choose_strategy(2**20, 4096, 4096, 1024, d, "cuda") == "dense"}
    assert taken == ahead != set()


@pytest.mark.parametrize("per_pair, right", [(1e-3, True), (1e-2, False), (1e-4, False)])
def test_rows_show_where_auto_is_wrong(strategies, tmp_path, per_pair, right):
    with (tmp_path / "rows.jsonl").open("w") as out:
        for case in (c for c in Op.get("router.atomic_experts").bench if c.sizes["T"] >= 4096):
            pairs, products = (case.sizes["T"] * case.sizes[name] for name in ("k", "N"))
            row = {
                "op": "router.atomic_experts", "peer": "goldsmith", "device": "cuda", "mode": "cold",
                "case": case.name, "sizes": dict(case.sizes), "machine": "a card", "date": "a day", "dtype": "bfloat16",
                "median_us": products * 3e-5 if "dense" in case.name else pairs * per_pair,
            }  # fmt: skip
            out.writelines(json.dumps(row | {"direction": d}) + "\n" for d in ("forward", "backward"))
    measured = strategies.measured(tmp_path)
    assert [place[-1] for place in measured] == [32, 32, 64, 256, 1024, 4096]
    assert (wrong(measured, strategies.both_ways) == []) is right
