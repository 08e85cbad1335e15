"""Experts split over CPU and GPU: a read-only store of packed experts, and what computes with it."""

from .errors import RoutingError, StoreCorrupt, StoreError, StoreMismatch, UnsupportedModel
from .store import ExpertStore

__all__ = ["ExpertStore", "RoutingError", "StoreCorrupt", "StoreError", "StoreMismatch", "UnsupportedModel"]
