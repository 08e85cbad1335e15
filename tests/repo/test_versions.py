"""What is said about versions that do not go together."""

import importlib.metadata

import pytest

from goldsmith.core import device


@pytest.fixture
def reason(monkeypatch):
    def reason(**versions):
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
        monkeypatch.setattr(device, "triton_interpreted", lambda: True)
        device.interpreter_unavailable.cache_clear()
        return device.triton_unavailable({})

    yield reason
    device.interpreter_unavailable.cache_clear()


def test_a_numpy_that_tritons_interpreter_cannot_take_is_named(reason):
    assert reason(triton="3.6.0", numpy="2.4.6") == (
        "the interpreter of Triton 3.6.0 needs numpy < 2.4; numpy 2.4.6 is installed "
        "(pip install 'numpy<2.4', or Triton 3.7 or newer)"
    )


@pytest.mark.parametrize(("triton", "numpy"), [("3.6.0", "2.3.5"), ("3.7.1", "2.4.6"), ("3.10.0+git1", "3.0.0rc1")])
def test_other_versions_are_compatible(reason, triton, numpy):
    assert reason(triton=triton, numpy=numpy) is None
