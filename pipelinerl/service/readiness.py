"""Whether a process can do its work now, and if not, why: what /readyz answers."""

from __future__ import annotations


class Readiness:
    """Starts not ready. Read and written from any thread: one attribute, replaced whole."""

    def __init__(self, reason: str = "starting") -> None:
        assert reason, "a process that is not ready says why"
        self._reason = reason

    @property
    def reason(self) -> str:
        """Why it is not ready; empty when it is."""
        return self._reason

    def set_ready(self) -> None:
        self._reason = ""

    def set_not_ready(self, reason: str) -> None:
        assert reason, "a process that is not ready says why"
        self._reason = reason
