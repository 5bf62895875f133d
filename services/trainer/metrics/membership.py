"""Who takes part and how weights reach them: members, epochs, evictions, updates."""

from __future__ import annotations

from pipelinerl.service.metric_set import MetricSet
from services.trainer.updates.attendance import MemberChange
from services.trainer.updates.coordinator import EvictionCause
from services.trainer.updates.lane import UpdateRecord
from services.trainer.updates.member_states import MEMBER_STATES
from services.trainer.updates.updater import WeightUpdater

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""From a toy model inside one machine to `weights.deadline_s`, which ends an update after minutes."""


class MembershipMetrics:
    """Counted as the updater tells of it; states are read at each scrape."""

    def __init__(self, metrics: MetricSet) -> None:
        self._members = metrics.reading(
            "members", "Registered actors by what they are doing.", {"state": MEMBER_STATES}, unit="actors"
        )
        self._epoch = metrics.reading("epoch", "Number of the weight-transfer group's membership.", unit="epoch")
        self._regroups = metrics.counter(
            "regroups_total", "Times that the group of all members was formed anew.", unit="groups of members"
        )
        self._evictions = metrics.counter(
            "evictions_total",
            "Actors that were put out of an epoch against their wish.",
            {"reason": tuple(cause.value for cause in EvictionCause)},
            unit="actors",
        )
        self._joins = metrics.counter(
            "joins_total", "Times that an actor came to serve, with an epoch or on a side group.", unit="actors"
        )
        self._join_seconds = metrics.histogram(
            "join_seconds", "Bringing one actor to the served version on a side group.", SECONDS
        )
        self._updates = metrics.counter(
            "weight_updates_total",
            "Versions that all members serve, and transfers that were begun again.",
            {"outcome": ("served", "aborted")},
            unit="updates",
        )
        self._transfer = metrics.histogram(
            "weight_update_transfer_seconds", "First to last byte of a version, at the trainer.", SECONDS
        )
        self._round_trip = metrics.histogram(
            "weight_update_round_trip_seconds", "From the offer of a version until the last member serves it.", SECONDS
        )
        self._bytes = metrics.counter("weight_update_bytes_total", "Bytes of the versions that all members serve.")

    def watch(self, updater: WeightUpdater) -> None:
        """Where to read."""
        self._members.read_each(lambda: updater.member_states)
        self._epoch.read(lambda: updater.epoch)

    def changed(self, change: MemberChange) -> None:
        if change.kind == "joined":
            self._joins.inc()

    def evicted(self, cause: EvictionCause) -> None:
        self._evictions.labels(cause.value).inc()

    def regrouped(self) -> None:
        self._regroups.inc()

    def joined(self, join_s: float) -> None:
        """On a side group."""
        self._join_seconds.observe(join_s)

    def served(self, update: UpdateRecord) -> None:
        self._updates.labels("served").inc()
        self._transfer.observe(update.transfer_s)
        self._round_trip.observe(update.round_trip_s)
        self._bytes.inc(update.num_bytes)

    def aborted(self) -> None:
        self._updates.labels("aborted").inc()
