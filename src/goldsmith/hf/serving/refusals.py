"""RequestRefusal: a request that gets no text, with its HTTP status and one sentence."""

from __future__ import annotations

BAD_REQUEST, NOT_FOUND, TOO_LARGE, NO_MEMORY, UNAVAILABLE, FAILED = 400, 404, 413, 507, 503, 500


class RequestRefusal(Exception):
    """The reason why a request gets no text, or no more text."""

    def __init__(self, status: int, sentence: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.field, self.code = status, sentence, field, code

    def to_dict(self) -> dict[str, object]:
        """The body of the answer, in the form of OpenAI's API."""
        fault = "server_error" if self.status >= FAILED else "invalid_request_error"
        kind = "not_found_error" if self.status == NOT_FOUND else fault
        error = {"message": self.sentence, "type": kind, "param": self.field, "code": self.code or self.status}
        return {"error": error}
