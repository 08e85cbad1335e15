"""The rule of strategy="auto" against measured times."""

import importlib
import json

import pytest
import torch

from goldsmith import Op, router
from goldsmith.router._common import FLOATS
from repo.tree import ROOT

SLOWER = 1.25  # of the faster strategy's time: closer to the crossing either is fine


@pytest.fixture
def strategies(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("strategies")


def wrong(measured, both_ways):
    """The measured cases in which auto chooses the slower strategy."""
    mistakes = []
    for place, times in measured.items():
        total = {name: both_ways(both) for name, both in times.items()}
        sizes = place.tokens, place.k, place.num_experts, place.hidden
        strategy = router.choose_strategy(*sizes, getattr(torch, place.dtype), place.device)
        if total[strategy] > SLOWER * min(total.values()):
            mistakes.append(f"{place}: {total}")
    return mistakes


def test_auto_chooses_the_faster_strategy_where_both_were_timed(strategies):
    assert wrong(strategies.measured(), strategies.both_ways) == []


def test_on_a_gpu_dense_is_chosen_only_in_dtypes_for_which_it_was_measured_faster(strategies):
    ahead = set()
    for place, times in strategies.measured().items():
        total = {name: strategies.both_ways(both) for name, both in times.items()}
        if place.device == "cuda" and total["dense"] < total["gather"]:
            ahead.add(getattr(torch, place.dtype))
    dtypes = {d for d in FLOATS if router.choose_strategy(2**20, 4096, 4096, 1024, d, "cuda") == "dense"}
    assert dtypes == ahead != set()


@pytest.mark.parametrize("per_pair, right", [(1e-3, True), (1e-2, False), (1e-4, False)])
def test_measured_rows_reveal_a_wrong_choice_of_auto(strategies, tmp_path, per_pair, right):
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
