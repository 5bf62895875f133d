"""The run's present state as plain values, for the recorder, scrapes, the page and gRPC callers.

`TrainingRun.view` makes one on demand, on any thread; a reader knows no part of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipelinerl.rl.ledger import LedgerCounts, Outcome
from services.trainer.weight_sync.membership import MEMBER_STATES


@dataclass(frozen=True, kw_only=True)
class RunView:
    """State of a run at one moment."""

    version: int
    """Optimizer steps taken."""
    waiting_for: str
    """Empty while the trainer waits for nothing."""
    served_version: int | None
    """Newest version that every member serves; None before the first."""
    epoch: int
    num_members: int
    """Members of the epoch."""
    states: Mapping[str, str]
    """State of each registered actor, one of `MEMBER_STATES`."""
    serving: Collection[str]
    """Actors that serve the newest served version."""
    evictions: int
    counts: LedgerCounts
    reasons: Mapping[Outcome, Mapping[str, int]]
    """Sequences of the whole run by outcome and reason; those without a reason are not counted."""
    tokens: Mapping[str, int]
    """Completion tokens by outcome of their sequence, since this start."""
    tokens_arrived: int
    """Completion tokens since this start."""
    position: int
    """Last message of SEQUENCES that was read."""
    bad_messages: int
    failures: Mapping[str, str]
    """An example of a failed sequence or refused prompt for each reason."""
    quarantined: int
    """Number of actors in quarantine."""
    ready_groups: int
    allowance_by_version: int
    """Groups that the staleness bound alone would allow to be issued."""
    in_flight: int
    in_flight_limit: int | None
    holds_actors_back: bool
    """The freshness limit keeps actors from getting more prompts."""
    upload_waiting_s: float | None
    """Time that a checkpoint has been waiting for its upload; None without uploads."""

    @property
    def member_states(self) -> dict[str, int]:
        """Return the number of registered actors by state, for each of `MEMBER_STATES`."""
        states = list(self.states.values())
        return {state: states.count(state) for state in MEMBER_STATES}
