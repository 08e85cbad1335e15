"""The family's own history, diagnosed: the cause is named, with its coefficient, from kernels that name no stage."""

import pytest

from goldsmith.assay.diagnosis.diagnosis import diagnose
from mhc.test_history import backward_target


@pytest.mark.parametrize(
    "fault, tensor, cause, params",
    [
        ("bias_sums_the_scaled_gradient", "dbias", "wrong_factor", {"factor": "alpha[2]", "where": "res"}),
        ("kappa_missing", "dx", "missing_term", {"term": "rms", "coefficient": pytest.approx(-1)}),
    ],
)
def test_the_cause_is_named(fault, tensor, cause, params):
    found = diagnose(backward_target(fault), probes="quick")
    assert (found.first_wrong_stage, found.causes[0].id) == (tensor, cause), str(found)
    assert {name: found.causes[0].params[name] for name in params} == params
