"""GLM-5's classes with hyper-connections, computed by goldsmith.mhc. The head is a mean, which torch computes."""

from __future__ import annotations

from transformers.models.glm5_next import modeling_glm5_next as plain

from .class_names import under_its_name
from .indexed_layer import IndexedLayer
from .stream_forms import SinkhornConnection


@under_its_name
class AppliedGlm5NextTextHyperConnection(SinkhornConnection, plain.Glm5NextTextHyperConnection):
    """mhc.pre with the parameters of transformers' module."""


@under_its_name
class AppliedGlm5NextTextDecoderLayer(IndexedLayer, plain.Glm5NextTextDecoderLayer):
    """Attention and MLP, each between mhc.pre and mhc.post with a joint backward."""
