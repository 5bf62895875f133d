"""A run's throughput out of its steps, for both writers of summary.json. Knows the keys of metrics.jsonl, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class ThroughputTotals:
    """Sums over the steps that tell; `add` each step's record."""

    compute_s: float = 0.0
    tokens_trained: int = 0
    tokens_computed: int = 0
    known_s: float = 0.0
    """Compute seconds of the steps whose MFU is known."""
    utilized_s: float = 0.0
    """Σ MFU · compute seconds."""
    idle_s: float = 0.0
    idle_steps: int = 0
    memory_peak_gib: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """One step, as metrics.jsonl holds it; a key that it lacks is left out of the sums."""
        seconds = (record.get("step_s") or {}).get("compute")
        if seconds is not None and "tokens_computed" in record:
            self.compute_s += seconds
            self.tokens_trained += record.get("tokens_trained") or 0
            self.tokens_computed += record["tokens_computed"]
        if seconds is not None and record.get("mfu") is not None:
            self.known_s += seconds
            self.utilized_s += record["mfu"] * seconds
        if record.get("idle_s") is not None:
            self.idle_s += record["idle_s"]
            self.idle_steps += 1
        if record.get("memory_peak_gib") is not None:
            self.memory_peak_gib = max(self.memory_peak_gib or 0.0, record["memory_peak_gib"])

    @property
    def tokens_per_s(self) -> dict[str, float | None]:
        """Tokens of all steps over the seconds that they took."""
        return {
            "trained": _ratio(self.tokens_trained, self.compute_s),
            "computed": _ratio(self.tokens_computed, self.compute_s),
        }

    @property
    def mfu_mean(self) -> float | None:
        """Over compute time, not over steps."""
        return _ratio(self.utilized_s, self.known_s)

    @property
    def idle_s_mean(self) -> float | None:
        return _ratio(self.idle_s, self.idle_steps)


def _ratio(amount: float, per: float) -> float | None:
    return amount / per if per else None
