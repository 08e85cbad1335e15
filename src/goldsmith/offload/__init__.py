"""Experts split over CPU and GPU: a read-only store of packed experts, and what computes with it."""

from .attach import Offloaded, from_pretrained, offload
from .calibrate import Calibration, calibrate
from .costs import Costs
from .engine import Engine
from .errors import RoutingError, StoreCorrupt, StoreError, StoreMismatch, UnsupportedModel
from .explanation import Explanation
from .plan import Plan, plan, predict_stream
from .report import NumericsError, NumericsReport, NumericsWarning
from .statistics import Stats
from .store import ExpertStore

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
