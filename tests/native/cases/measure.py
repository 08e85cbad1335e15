"""Every probe that the level has, on more threads than one, for sanitizers to see."""

from goldsmith.core import BackendUnavailable, native

for probe in native.PROBES:
    try:
        assert native.measure(probe, threads=2, seconds=0.001, megabytes=2, rows=64) > 0, probe
    except BackendUnavailable as error:
        assert "has no such instruction" in str(error)
