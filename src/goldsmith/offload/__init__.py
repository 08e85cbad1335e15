"""Mixture-of-experts layers whose experts are split over CPU and GPU: a read-only store of experts, and the Engine."""

from .attach import Offloaded, from_pretrained, offload
from .calibrate import calibrate
from .calibration.calibration import Calibration
from .engine import Engine
from .errors import RoutingError, StoreCorrupt, StoreError, StoreMismatch, UnsupportedModel
from .explanation import Explanation
from .guard.report import NumericsError, NumericsReport, NumericsWarning
from .observe.statistics import Stats
from .planning.costs import Costs
from .planning.plan import Plan, plan, predict_stream
from .store.expert_store import ExpertStore

__all__ = [
    "Calibration",
    "Costs",
    "Engine",
    "ExpertStore",
    "Offloaded",
    "Explanation",
    "NumericsError",
    "NumericsReport",
    "NumericsWarning",
    "Plan",
    "RoutingError",
    "Stats",
    "StoreCorrupt",
    "StoreError",
    "StoreMismatch",
    "UnsupportedModel",
    "calibrate",
    "from_pretrained",
    "offload",
    "plan",
    "predict_stream",
]
