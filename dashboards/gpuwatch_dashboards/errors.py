"""What can go wrong between a page and where its numbers come from."""

from __future__ import annotations

from gpuwatch.errors import GpuwatchError


class SourceError(GpuwatchError):
    """A source of numbers does not answer, or not as agreed. Says what, where and what to do."""

    def __init__(self, what: str, where: str, remedy: str, status: int | None = None) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what
        """One sentence that names the URL, e.g. "the agent at http://127.0.0.1:9478 does not answer"."""
        self.where = where
        """The URL."""
        self.remedy = remedy
        """What to do now."""
        self.status = status
        """The HTTP status of a refusal; None when there was no answer."""
