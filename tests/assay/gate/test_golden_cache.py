"""Golden results are computed once for all candidates of a problem that return results of the same kind."""

from dataclasses import replace

from assay.gate.problems import RIGHT, candidate, problem
from goldsmith.assay import gate
from goldsmith.assay.golden import golden_cache

OPTIONS = gate.GateOptions(probes="values")


def test_a_second_candidate_finds_the_goldens_of_the_first():
    one = problem()
    options = gate.GateOptions(seed=3, probes="values")
    sources = [gate.Candidate("first", RIGHT), gate.Candidate("second", RIGHT), candidate("return x.sigmoid() * w")]
    verdicts = list(gate.judge_all(sources, one, options=options))
    assert [v.status for v in verdicts] == ["accepted", "accepted", "wrong"]
    assert one.known.hits >= 2  # one for each case, at least


def test_a_cache_is_bounded_in_bytes(monkeypatch):
    one, kept = problem(), []
    for seed in range(1, 4):
        list(gate.judge_all([gate.Candidate("a", RIGHT)], one, options=gate.GateOptions(seed=seed, probes="values")))
        monkeypatch.setattr(
            golden_cache, "_BYTES", 2 * sum(one.known.sizes.values()) if seed == 1 else golden_cache._BYTES
        )
        kept.append(sum(one.known.sizes.values()))
    assert kept[2] <= golden_cache._BYTES == 2 * kept[0]
    assert one.known.sizes.keys() == one.known.known.keys()


def test_other_inputs_and_other_results_have_other_goldens():
    def cache(*seeds):
        one = problem()
        for seed in seeds:
            (verdict,) = gate.judge_all([gate.Candidate("first", RIGHT)], one, options=replace(OPTIONS, seed=seed))
            assert verdict.ok, verdict
        return one.known

    third, fourth, both = cache(3), cache(4), cache(3, 4)
    assert third.known and not third.known.keys() & fourth.known.keys()
    assert both.hits == third.hits + fourth.hits
