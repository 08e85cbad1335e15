"""Diagnosis of a failing case: collects evidence, isolates the first wrong stage, and ranks the causes that fit.

Imports only torch, numpy and the assay.
"""

from .causes.rank import Cause
from .driver import diagnose
from .report.bundle import Bundle, load_bundle
from .report.rendering import Diagnosis
from .report.replay import replay

__all__ = ["Bundle", "Cause", "Diagnosis", "diagnose", "load_bundle", "replay"]
