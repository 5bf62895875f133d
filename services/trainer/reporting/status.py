"""What is true of a run at this moment: for callers over gRPC, for its page and for its metrics. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl.rl.ledger import Outcome
from pipelinerl.v1 import trainer_pb2
from pipelinerl.v1.actor_pb2 import ActorState
from services.trainer.data.tracker import SequenceTracker
from services.trainer.loop import OptimizerLoop
from services.trainer.reporting.metrics import bounded
from services.trainer.weight_sync.updater import WeightUpdater

MOST_MEMBERS = 256
"""That are listed; a run with more is better watched on a dashboard."""


def member_rows(
    states: Mapping[str, str], served_version: int, loads: Mapping[str, ActorState]
) -> list[dict[str, Any]]:
    """Each registered actor in order of its name, with its state. An actor that is serving serves `served_version`;
    of the others, the version is known that they named when they were asked last."""
    rows = []
    for name, state in sorted(states.items(), key=lambda item: natural(item[0])):
        load = loads.get(name)
        known = served_version if state == "serving" else load.policy_version if load else None
        in_progress = load.sequences_in_progress if load else None
        rows.append({"name": name, "state": state, "version": known, "in_progress": in_progress})
    return rows[:MOST_MEMBERS]


def natural(name: str) -> list[tuple[int, str]]:
    """Key by which actor-10 comes after actor-9, whatever is in the name and however long its numbers are."""
    parts = [part.lstrip("0") if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", name))]
    return [(len(part), part) if index % 2 else (-1, part) for index, part in enumerate(parts)]


class RunStatus:
    """`loads()`: the newest answer of each actor. The phase is set by the run as it goes."""

    def __init__(
        self,
        run: str,
        total_steps: int,
        incarnation: int,
        loop: OptimizerLoop,
        books: SequenceTracker,
        updater: WeightUpdater,
        loads: Callable[[], Mapping[str, ActorState]],
    ) -> None:
        self._run, self._total_steps, self._incarnation = run, total_steps, incarnation
        self._loop, self._books, self._updater, self._loads = loop, books, updater, loads
        self._phase = trainer_pb2.TRAINER_PHASE_WAITING_FOR_ACTORS
        self.ended = ""
        """How: `finished` or `stopped`; empty before."""

    def training(self) -> None:
        self._phase = trainer_pb2.TRAINER_PHASE_TRAINING

    def end(self, *, finished: bool) -> None:
        """`finished`: the run came to its last step; otherwise it was stopped, or failed."""
        self._phase = trainer_pb2.TRAINER_PHASE_FINISHED
        self.ended = "finished" if finished else "stopped"

    @property
    def phase(self) -> trainer_pb2.TrainerPhase:
        if self._phase == trainer_pb2.TRAINER_PHASE_TRAINING and self._loop.waiting_for:
            return trainer_pb2.TRAINER_PHASE_WAITING_FOR_SEQUENCES
        return self._phase

    def message(self) -> trainer_pb2.TrainerStatus:
        """As the trainer's gRPC service answers."""
        phase = self.phase
        waiting_for = "" if phase == trainer_pb2.TRAINER_PHASE_FINISHED else self._loop.waiting_for
        return trainer_pb2.TrainerStatus(
            run=self._run,
            phase=phase,
            policy_version=self._loop.version,
            incarnation=self._incarnation,
            total_steps=self._total_steps,
            sequences=trainer_pb2.SequenceCounts(**self._books.ledger.counts.as_dict()),
            members=len(self._updater.members),
            epoch=self._updater.epoch,
            message=f"waiting for {waiting_for}" if waiting_for else "",
        )

    def for_page(self) -> dict[str, Any]:
        """What the live page shows of this moment."""
        status, ledger, updater = self.message(), self._books.ledger, self._updater
        served = updater.served_version
        return {
            "phase": trainer_pb2.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower(),
            "message": status.message,
            "ended": self.ended,
            "version": status.policy_version,
            "served_version": served if served >= 0 else None,
            "incarnation": self._incarnation,
            "epoch": updater.epoch,
            "members": member_rows(updater.states, served, self._loads()),
            "sequences": ledger.counts.as_dict(),
            "reasons": {outcome.value: bounded(ledger.reasons(outcome)) for outcome in Outcome},
        }
