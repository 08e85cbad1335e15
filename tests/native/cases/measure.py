"""Runs every probe of the level on two threads, under the sanitizers."""

from goldsmith.core import BackendUnavailable, native

for probe in native.PROBES:
    try:
        assert native.measure(probe, threads=2, seconds=0.001, megabytes=2, rows=64) > 0, probe
    except BackendUnavailable as error:
        assert "has no such instruction" in str(error)
