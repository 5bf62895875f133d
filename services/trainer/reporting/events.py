"""The run's history as Kubernetes Events: what a person sees in `kubectl get events` and `kubectl describe pod`.

Each method takes what has happened and returns at once. The run's own Events are about the trainer's pod, those of an actor
about the actor's. Outside Kubernetes nothing is sent. docs/events.md lists them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pipelinerl.kube.client import Pod, in_cluster
from pipelinerl.kube.events import EventRecorder, EventType
from pipelinerl.service.lifecycle import StartStopped, sole_error
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.weight_sync.membership import MemberChange

COMPONENT = "pipelinerl-trainer"
LAST_EVENTS_S = 1.5
"""For what is still to be sent at the trainer's end."""

REASONS: dict[str, EventType] = {
    "RunStarted": "Normal",
    "RunResumed": "Normal",
    "ActorJoined": "Normal",
    "ActorLeft": "Normal",
    "ActorEvicted": "Warning",
    "UpdateFailed": "Warning",
    "CheckpointWritten": "Normal",
    "SequenceForged": "Warning",
    "ActorQuarantined": "Warning",
    "RunFinished": "Normal",
    "RunStopped": "Normal",
    "RunFailed": "Warning",
}
"""Every reason, with its type."""
ONCE = frozenset({"RunStarted", "RunResumed", "RunFinished", "RunStopped", "RunFailed"})
"""Never left out: each happens once in a trainer's life."""


class RunEvents:
    """`recorder` None: outside Kubernetes."""

    def __init__(self, run: str, trainer: Pod, recorder: EventRecorder | None = None) -> None:
        self._run, self._trainer, self._recorder = run, trainer, recorder

    def started(self, version: int, steps: int, incarnation: int) -> None:
        """`incarnation`: 1 where the run begins."""
        if incarnation == 1:
            self._emit("RunStarted", f"run {self._run} starts: {steps} optimizer steps to take")
        else:
            text = f"run {self._run} goes on from version {version} of {steps}, incarnation {incarnation}"
            self._emit("RunResumed", text)

    def member(self, change: MemberChange, num_serving: int) -> None:
        """`num_serving`: actors that serve the run's newest version, after the change."""
        actor, run = change.member.actor, self._run
        reason, text = {
            "joined": ("ActorJoined", f"actor {actor} serves version {change.version} of run {run}"),
            "left": ("ActorLeft", f"actor {actor} leaves run {run}: {change.reason}"),
            "evicted": (
                "ActorEvicted",
                f"actor {actor} is put out of epoch {change.epoch} of run {run}: {change.reason}; it is brought back when its "
                "heart beats",
            ),
        }[change.kind]
        now = f"{num_serving} {'actor serves' if num_serving == 1 else 'actors serve'} the newest version now"
        member = change.member  # an actor that is no pod of this cluster is told of at the trainer's
        pod = Pod(actor, member.pod_uid) if member.pod_uid else self._trainer
        self._emit(reason, f"{text}; {now}", pod)

    def update_failed(self, version: int, epoch: int, actor: str, reason: str) -> None:
        """`actor`: the one whose side group it was; empty: all of the epoch."""
        to = f"actor {actor}" if actor else f"epoch {epoch}"
        self._emit("UpdateFailed", f"version {version} did not reach {to} and is sent again: {reason}")

    def checkpoint_written(self, written: WrittenCheckpoint) -> None:
        text = f"checkpoint of version {written.version} written in {written.seconds:.1f} s: {written.folder.name}"
        self._emit("CheckpointWritten", text)

    def alarm(self, reason: str, text: str) -> None:
        self._emit(reason, f"run {self._run}: {text}")

    def ended(self, version: int, steps: int, *, finished: bool) -> None:
        """In order: to its last step, or stopped before."""
        if finished:
            self._emit("RunFinished", f"run {self._run} is finished at version {version}")
        else:
            text = f"run {self._run} is stopped at version {version} of {steps}; started again, it goes on"
            self._emit("RunStopped", text)

    def failed(self, error: BaseException) -> None:
        self._emit("RunFailed", f"run {self._run} failed: {sole_error(error)}")

    def _emit(self, reason: str, message: str, about: Pod | None = None) -> None:
        if self._recorder is not None:
            self._recorder.emit(about or self._trainer, reason, message, REASONS[reason], always=reason in ONCE)


@asynccontextmanager
async def run_events(settings: TrainerSettings) -> AsyncIterator[RunEvents]:
    """For the time of the block. An error that leaves it is the run's failure, unless the trainer was told to stop before
    it was up; what is not sent yet gets `LAST_EVENTS_S`."""
    client, pod = in_cluster(settings), settings.pod_name or settings.instance
    trainer = Pod(pod, settings.pod_uid)
    if client is None:
        yield RunEvents(settings.run, trainer)
        return
    recorder = EventRecorder(client, component=COMPONENT, instance=pod)
    events, sending = RunEvents(settings.run, trainer, recorder), asyncio.create_task(recorder.run())
    try:
        yield events
    except StartStopped:
        raise
    except Exception as error:
        events.failed(error)
        raise
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                await recorder.drained()
        sending.cancel()
        await client.close()
