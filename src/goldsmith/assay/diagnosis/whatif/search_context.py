"""SearchContext: the part of a search that the modules with changes may use; `engine.Search` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from ...execute.records import CandidateRun
from ...judge.examination import Examination
from ..edits.golden_edit import NamedEdit
from ..graph.golden import Golden
from ..graph.node import Changed
from .judge import Judge


class SearchContext(Protocol):
    """What the changes may ask about the search for one wrong tensor.

    behind: operators that the wrong tensor depends on; left_out: kinds of changes that were not tried -> the error.
    """

    examination: Examination
    tensor: str
    judge: Judge
    own: CandidateRun
    golden: Golden
    leaves: dict[str, Tensor]
    behind: set[int]
    left_out: dict[str, str]
    numbers: dict[str, float]

    def allows(self, change: NamedEdit) -> bool: ...

    def explains_other_draws(self, change: NamedEdit) -> bool: ...

    def values_after(
        self, changes: Mapping[int, Changed], until: str, leaves: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor] | None: ...
