"""What is true of a run at this moment: for who asks over gRPC, for its page and for its metrics. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipelinerl.rl.ledger import Outcome
from pipelinerl.v1 import trainer_pb2
from services.trainer.data.actor_client import ActorLoad
from services.trainer.data.tracker import SequenceTracker
from services.trainer.loop import OptimizerLoop
from services.trainer.reporting.board import member_rows
from services.trainer.reporting.metrics import bounded
from services.trainer.weight_sync.updater import WeightUpdater


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
        loads: Callable[[], Mapping[str, ActorLoad]],
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
