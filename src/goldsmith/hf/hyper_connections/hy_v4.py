"""HY-V4's classes with hyper-connections of the independent form (no matrix between streams)."""

from __future__ import annotations

from transformers.models.hy_v4 import modeling_hy_v4 as plain

from .class_names import under_its_name
from .indexed_layer import IndexedLayer
from .stream_forms import IndependentConnection, SigmoidHead


@under_its_name
class AppliedHYV4HyperConnection(IndependentConnection, plain.HYV4HyperConnection):
    """mhc.independent_pre with the parameters of transformers' module."""


@under_its_name
class AppliedHYV4HyperHead(SigmoidHead, plain.HYV4HyperHead):
    """mhc.head with the parameters of transformers' module."""


@under_its_name
class AppliedHYV4DecoderLayer(IndexedLayer, plain.HYV4DecoderLayer):
    """Attention and MLP, each between mhc.independent_pre and mhc.inject with a joint backward."""
