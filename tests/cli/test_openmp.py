"""Torch's threads soon sleep between operations where the experts' kernels take turns with them."""

import subprocess
import sys

import pytest

from goldsmith.cli import doctor, openmp

COMMAND = """
import os, sys, types
command = types.ModuleType("goldsmith.cli.{name}.command")
said = "GOMP_SPINCOUNT", "KMP_BLOCKTIME"
command.run = lambda *a, **k: print(*map(os.environ.get, said), "torch" in sys.modules) or 0
sys.modules[command.__name__] = command
from goldsmith.cli import app
app({arguments!r})
"""
ARGUMENTS = {"finetune": ["finetune", "model", "--data", __file__], "generate": ["generate", "model", "--prompt", "a"]}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_variables_are_set_before_torch_is_loaded(name, monkeypatch):
    for variable in openmp.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    code = COMMAND.format(name=name, arguments=ARGUMENTS[name])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["10000", "1", "False"], done


@pytest.mark.parametrize("variable", openmp.VARIABLES)
def test_variables_that_the_user_set_stay(variable, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for each in openmp.VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(variable, "ACTIVE")
    before = dict(openmp.os.environ)
    openmp.spin_briefly()
    assert dict(openmp.os.environ) == before


def test_nothing_is_set_once_torch_is_loaded(monkeypatch):
    for each in openmp.VARIABLES:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setitem(sys.modules, "torch", sys)
    openmp.spin_briefly()
    assert not set(openmp.VARIABLES) & set(openmp.os.environ)


@pytest.mark.parametrize(
    "variables, awake",
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "300000"}, True),
        ({"GOMP_SPINCOUNT": "0"}, False),
        ({"GOMP_SPINCOUNT": "10000"}, False),
        ({"GOMP_SPINCOUNT": "infinite"}, True),
        ({"KMP_BLOCKTIME": "0"}, False),
        ({"KMP_BLOCKTIME": "200"}, True),
    ],
)
def test_doctor_says_how_long_threads_spin(variables, awake, monkeypatch):
    for each in openmp.VARIABLES:
        monkeypatch.delenv(each, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert openmp.spins_for_long() is awake
    text = doctor._threads({"torch": 4, "awake_for_long": awake})
    assert ("GOMP_SPINCOUNT=10000" in text) is awake
