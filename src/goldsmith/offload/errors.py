"""What can be wrong with a store or a call, each error with the place it is about."""

from __future__ import annotations


class StoreError(ValueError):
    """A file that cannot be used as a store of experts; the text says why and what to do."""


class StoreCorrupt(StoreError):
    """Bytes of a store are not those that were written: damaged, cut off, or of another kind

    layer, expert, section    where, as far as it is known: None where the whole file, or its header, is meant
    """

    def __init__(
        self, text: str, *, layer: int | None = None, expert: int | None = None, section: str | None = None
    ) -> None:
        super().__init__(text)
        self.layer, self.expert, self.section = layer, expert, section


class StoreMismatch(StoreError):
    """A store holds other weights than the model; the text names the first difference

    layer, expert    where it is, None where the whole store is meant
    """

    def __init__(self, text: str, *, layer: int | None = None, expert: int | None = None) -> None:
        super().__init__(text)
        self.layer, self.expert = layer, expert


class RoutingError(ValueError):
    """An expert's number that is out of range; the text names layer, row, slot, value and range."""


class UnsupportedModel(ValueError):
    """A model whose experts are not computed here; the text names the class and the property."""
