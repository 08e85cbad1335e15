"""The table of an ablation."""

from benchmarks.kernelfault.ablation import table


def test_a_kind_that_no_other_kind_replaces_is_counted_alone():
    rows = [
        {"explained": True, "true": True, "first": ["scans"], "kinds": ["scans"]},
        {"explained": True, "true": False, "first": ["scans"], "kinds": ["masks", "scans"]},
        {"explained": False},
    ]
    head, _, line = table(rows)
    assert head == "2 of 3 faults explained"
    assert line.split() == ["scans", "2", "1", "1"]
