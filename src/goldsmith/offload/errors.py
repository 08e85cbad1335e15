"""The exceptions of stores, calls and models; each names the place of the error."""

from __future__ import annotations


class StoreError(ValueError):
    """A file that cannot be used as a store of experts; the text says why and what to do."""


class StoreCorrupt(StoreError):
    """A store's bytes are not those that were written: damaged, truncated, or not a store's

    layer, expert, section    the place, as far as known; None for the whole file or its header
    """

    def __init__(
        self, text: str, *, layer: int | None = None, expert: int | None = None, section: str | None = None
    ) -> None:
        super().__init__(text)
        self.layer, self.expert, self.section = layer, expert, section


class StoreMismatch(StoreError):
    """A store holds other weights than the model; the text names the first difference

    layer, expert    the place; None for the whole store
    """

    def __init__(self, text: str, *, layer: int | None = None, expert: int | None = None) -> None:
        super().__init__(text)
        self.layer, self.expert = layer, expert


class RoutingError(ValueError):
    """An expert index out of range; the text names layer, row, column, value and range."""


class UnsupportedModel(ValueError):
    """A model whose experts the Engine cannot compute; the text names the class and the property."""
