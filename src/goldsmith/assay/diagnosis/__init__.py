"""Diagnosis of a failing case: collects evidence, isolates the first wrong stage, and ranks the causes that fit.

Imports only torch, numpy and the assay.
"""

from .bundle import Bundle, load_bundle
from .diagnosis import diagnose
from .rank import Cause
from .rendering import Diagnosis
from .replay import replay

__all__ = ["Bundle", "Cause", "Diagnosis", "diagnose", "load_bundle", "replay"]
