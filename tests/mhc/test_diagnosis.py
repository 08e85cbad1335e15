"""`diagnose` names the cause and its coefficient for past bugs of this family, in kernels without stages."""

import pytest

from goldsmith.assay.diagnosis.driver import diagnose
from mhc.test_history import backward_target

pytestmark = pytest.mark.sweep(2)


@pytest.mark.parametrize(
    "fault, tensor, cause, params",
    [
        ("bias_sums_the_scaled_gradient", "dbias", "wrong_factor", {"factor": "alpha[2]", "where": "res"}),
        ("kappa_missing", "dx", "missing_term", {"term": "rms"}),
    ],
)
def test_the_cause_is_named(fault, tensor, cause, params):
    diagnosis = diagnose(backward_target(fault), probes="quick")
    assert (diagnosis.first_wrong_stage, diagnosis.causes[0].id) == (tensor, cause), str(diagnosis)
    assert {name: diagnosis.causes[0].params[name] for name in params} == params
