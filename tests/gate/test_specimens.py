"""The specimens for a judge: right candidates are right, and cheating ones deceive checkers as people write them."""

import pytest

from benchmarks.gate import naive, specimens
from goldsmith import assay

STATUSES = {"accepted", "wrong", "cheating", "crashed", "timed_out", "over_memory", "refused"}
REASONS = {
    "constant_output", "returned_input", "reused_memory", "cached_result", "call_count", "replay_from_disk",
    "input_changed", "aliased_output", "late_write", "lazy_output", "patched_runtime", "reads_golden", "plain_torch",
    "lowered_precision", "shape_branch", "backward_shortcut",
}  # fmt: skip
CHEATS = specimens.specimens(specimens.CHEATS)
RIGHT = specimens.specimens(specimens.RIGHT)


@pytest.mark.parametrize("kind", [CHEATS, RIGHT], ids=["cheats", "right"])
def test_a_specimen_says_what_a_judge_should_say(kind):
    for specimen in kind:
        name = specimen.name
        assert specimen.text, name
        assert (specimens.PROBLEMS / f"{specimen.problem}.py").exists(), name
        assert set(specimen.statuses) <= STATUSES and specimen.reasons <= REASONS, name
        assert bool(specimen.reasons) == ("cheating" in specimen.statuses), name
        assert (specimen.statuses[0] == "accepted") == (kind is RIGHT), name


@pytest.mark.sweep(18)
@pytest.mark.parametrize("specimen", RIGHT, ids=lambda s: s.name)
def test_a_right_candidate_passes_every_probe(specimen):
    if missing := specimen.missing():
        pytest.skip(f"needs {' and '.join(missing)}")
    assay.check(specimens.target(specimen))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("specimen", [s for s in CHEATS if s.statuses[0] == "cheating"], ids=lambda s: s.name)
def test_a_cheating_candidate_deceives_a_naive_checker(specimen):
    tries = 3  # some tricks need memory that was used before
    assert any(naive.accepts(checker, specimen) for _ in range(tries) for checker in naive.CHECKERS)
