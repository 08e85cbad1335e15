"""What a candidate sets in torch and leaves so: it is noticed, and undone after the run."""

import pytest
import torch

from goldsmith import assay
from goldsmith.assay.settings import restored

INPUTS = {"x": torch.arange(12.0)}


def widens(x):
    torch.set_default_dtype(torch.float64)
    return x * 2


def takes_threads(x):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return x * 2


@pytest.mark.parametrize("kernel, said", [
    (widens, "torch's default dtype, which was float32, is float64 after a run (values), for all that runs later"),
    (takes_threads, "torch's number of threads, which was {}, is {} after a run (values), for all that runs later"),
])  # fmt: skip
def test_what_a_kernel_sets_is_noticed_and_undone(kernel, said):
    before = torch.get_default_dtype(), torch.get_num_threads()
    report = assay.check(assay.Target(kernel, lambda x: x * 2, cases=INPUTS, backward=None), probes="quick")
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
    (note,) = [n for n in report.notes if n.id == "settings"]
    assert note.text == said.format(before[1], before[1] + 1) and note.text in " ".join(str(report).split())


def test_it_is_undone_where_the_kernel_raises():
    changed = []
    with pytest.raises(ValueError), restored(changed):
        torch.set_default_dtype(torch.float64)
        raise ValueError
    assert torch.get_default_dtype() == torch.float32 and len(changed) == 1


def test_a_kernel_that_sets_nothing_is_not_noted():
    report = assay.check(assay.Target(lambda x: x * 2, lambda x: x * 2, cases=INPUTS, backward=None), probes="quick")
    assert not [n for n in report.notes if n.id == "settings"]
