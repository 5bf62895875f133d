"""The run's current state as plain values, for the recorder, scrapes, the page and gRPC callers.

`TrainingRun.view` makes a view on demand, on any thread. Readers depend only on the view, not on parts of the run.
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
    """Event or data that the trainer waits for; empty if it is not waiting."""
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
    """Sequences of the whole run by outcome and reason. Sequences without a reason are left out."""
    tokens: Mapping[str, int]
    """Completion tokens by outcome of their sequence, since this start."""
    tokens_arrived: int
    """Completion tokens that reached the trainer since this start."""
    position: int
    """Position of the last message read from SEQUENCES."""
    bad_messages: int
    failures: Mapping[str, str]
    """For each reason, one example message of a failed sequence or refused prompt."""
    quarantined: int
    """Number of actors in quarantine."""
    ready_groups: int
    allowance_by_version: int
    """Number of groups that the staleness bound alone would allow to issue now."""
    in_flight: int
    in_flight_limit: int | None
    holds_actors_back: bool
    """True if the freshness limit keeps actors from getting more prompts."""
    upload_waiting_s: float | None
    """Time that a checkpoint has been waiting for its upload; None without uploads."""

    @property
    def member_states(self) -> dict[str, int]:
        """Return the number of registered actors by state, for each of `MEMBER_STATES`."""
        states = list(self.states.values())
        return {state: states.count(state) for state in MEMBER_STATES}
