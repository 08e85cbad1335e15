"""From a failing case to its cause: evidence, the stage that goes wrong first, and what kind of mistake makes it.

Imports torch and the assay alone.
"""

from .bundle import Bundle, load_bundle
from .diagnosis import diagnose
from .rank import Cause
from .rendering import Diagnosis
from .replay import replay

__all__ = ["Bundle", "Cause", "Diagnosis", "diagnose", "load_bundle", "replay"]
