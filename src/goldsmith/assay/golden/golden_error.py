"""GoldenError: the golden itself raised, so the candidate is not judged."""

from __future__ import annotations

from ...core.tracing import TargetError
from ..support import memory_errors


class GoldenError(Exception):
    """The golden itself raised, which is not the candidate's fault."""


class golden_errors:
    """Turns an exception into GoldenError, so that it is never attributed to the candidate. A missing module stays an
    ImportError: the environment lacks it, and neither golden nor candidate is wrong.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GoldenError | TargetError | NotImplementedError | ImportError):
            return
        if isinstance(error, Exception) and not memory_errors.out_of_memory(error):
            raise GoldenError(f"{type(error).__name__}: {error}") from error
