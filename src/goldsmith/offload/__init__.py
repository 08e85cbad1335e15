"""Experts split over CPU and GPU: a read-only store of packed experts, and what computes with it."""

from .costs import Costs
from .errors import RoutingError, StoreCorrupt, StoreError, StoreMismatch, UnsupportedModel
from .plan import Plan, plan, predict_stream
from .store import ExpertStore

__all__ = [
    "Costs",
    "ExpertStore",
    "Plan",
    "RoutingError",
    "StoreCorrupt",
    "StoreError",
    "StoreMismatch",
    "UnsupportedModel",
    "plan",
    "predict_stream",
]
