"""Events: each kind as the API takes it, what is left out of a flood, and that nothing waits for the API."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from pipelinerl.errors import ServiceError
from pipelinerl.kube import events as kube_events
from pipelinerl.kube.client import CREATE_EVENTS, LIST_PODS, TRAINER, KubeBackoff, KubeClient, Pod
from pipelinerl.kube.events import MOST_KEYS, QUEUE_SIZE, EventRateLimiter, EventRecorder
from pipelinerl.service.lifecycle import StartStopped
from pipelinerl.service.settings import TrainerSettings
from services.trainer.checkpoint.checkpointer import WrittenCheckpoint
from services.trainer.reporting import events as run_events_module
from services.trainer.reporting.events import REASONS, RunEvents, run_events
from services.trainer.weight_sync.coordinator import Member
from services.trainer.weight_sync.membership import MemberChange
from tests.kube.api_server import NAMESPACE, SOON_S, ApiServer

ROOT = Path(__file__).resolve().parents[2]
TRAINER_POD = Pod("pipelinerl-trainer-0", "t-uid")
ACTOR = Member("actor-x", "p1", pod_uid="a-uid")
SHORT = KubeBackoff(first_s=0.01, most_s=0.02, denied_s=1000.0)


@asynccontextmanager
async def recording(client: KubeClient, **options: Any) -> AsyncIterator[EventRecorder]:
    options = {"component": "pipelinerl-trainer", "instance": "t-0"} | options
    recorder = EventRecorder(client, **options)
    task = asyncio.create_task(recorder.run())
    try:
        with patch.object(kube_events, "BACKOFF", SHORT):
            yield recorder
            assert not task.done()
    finally:
        task.cancel()


IN_ORDER = [
    "RunStarted", "RunResumed", "ActorJoined", "ActorLeft", "ActorEvicted", "UpdateFailed", "SequenceForged",
    "ActorQuarantined", "CheckpointWritten", "RunFinished", "RunStopped", "RunFailed",
]  # fmt: skip


def say_everything(events: RunEvents) -> None:
    """One of each kind."""
    events.started(0, 200, incarnation=1)
    events.started(20, 200, incarnation=2)
    events.member(MemberChange("joined", ACTOR, 1, 0), 1)
    events.member(MemberChange("left", ACTOR, 1, 3, "its pod is being deleted"), 2)
    events.member(MemberChange("evicted", ACTOR, 4, 3, "deadline passed while sending"), 0)
    events.update_failed(8, 3, "", "connection reset")
    events.alarm("SequenceForged", "message 7 of the sequence log is refused")
    events.alarm("ActorQuarantined", "actor 'actor-x' is quarantined")
    events.checkpoint_written(WrittenCheckpoint(Path("run/checkpoints/step-20"), 20, 5, 3.14))
    events.ended(200, 200, finished=True)
    events.ended(57, 200, finished=False)
    events.failed(ExceptionGroup("tasks", [ServiceError("no actor is left")]))


async def test_every_kind_arrives_about_the_right_pod(api: ApiServer, trainer: KubeClient) -> None:
    async with recording(trainer) as recorder:
        say_everything(RunEvents("demo", TRAINER_POD, recorder))
        await recorder.drained()
    stored = list(api.events.values())
    assert [event["reason"] for event in stored] == IN_ORDER
    assert {event["reason"]: event["type"] for event in stored} == REASONS
    actors = {"ActorJoined", "ActorLeft", "ActorEvicted"}
    for event in stored:
        about = event["involvedObject"]
        expected = ("actor-x", "a-uid") if event["reason"] in actors else ("pipelinerl-trainer-0", "t-uid")
        assert (about["kind"], about["namespace"], about["name"], about["uid"]) == ("Pod", NAMESPACE, *expected)
        assert event["metadata"]["namespace"] == NAMESPACE
        assert "count" not in event
        assert event["reportingComponent"] == event["source"]["component"] == "pipelinerl-trainer"
        assert event["reportingInstance"] == "t-0"
    texts = {event["reason"]: event["message"] for event in stored}
    assert texts["RunResumed"] == "run demo goes on from version 20 of 200, incarnation 2"
    assert texts["ActorJoined"] == "actor actor-x serves version 0 of run demo; 1 actor serves the newest version now"
    assert texts["ActorLeft"] == (
        "actor actor-x leaves run demo: its pod is being deleted; 2 actors serve the newest version now"
    )
    assert "epoch 4" in texts["ActorEvicted"]
    assert "deadline passed while sending" in texts["ActorEvicted"]
    assert texts["UpdateFailed"] == "version 8 did not reach epoch 3 and is sent again: connection reset"
    assert texts["SequenceForged"] == "run demo: message 7 of the sequence log is refused"
    assert texts["CheckpointWritten"] == "checkpoint of version 20 written in 3.1 s: step-20"
    assert texts["RunFailed"] == "run demo failed: no actor is left"


async def test_an_actor_that_is_no_pod_is_told_of_at_the_trainers(api: ApiServer, trainer: KubeClient) -> None:
    async with recording(trainer) as recorder:
        RunEvents("demo", TRAINER_POD, recorder).member(MemberChange("joined", Member("laptop", "p"), 1, 0), 1)
        await recorder.drained()
    (event,) = api.events.values()
    assert event["involvedObject"]["name"] == "pipelinerl-trainer-0"
    assert "actor laptop" in event["message"]


async def test_an_event_fits_what_the_api_takes(api: ApiServer, trainer: KubeClient) -> None:
    async with recording(trainer, instance="i" * 300) as recorder:
        recorder.emit(Pod("n" * 253, ""), "RunFailed", "x" * 5000, "Warning")
        await recorder.drained()
    (body,) = api.events.values()
    assert len(body["metadata"]["name"]) == 253
    assert re.fullmatch(r"n{236}\.[0-9a-f]{16}", body["metadata"]["name"])
    assert (len(body["message"]), body["message"][-1]) == (1024, "…")
    assert len(body["reportingInstance"]) == 128
    assert body["firstTimestamp"] == body["lastTimestamp"]
    assert timedelta(0) <= datetime.now(UTC) - datetime.fromisoformat(body["lastTimestamp"]) < timedelta(minutes=1)
    assert "uid" not in body["involvedObject"]


def test_every_reason_is_documented_with_its_type() -> None:
    text = (ROOT / "docs/events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert dict(rows) == REASONS
    assert all(re.fullmatch(r"([A-Z][a-z]+){2,}", reason) for reason in REASONS)


def test_one_of_a_kind_about_an_object_passes_in_a_minute_and_the_next_says_how_many_did_not() -> None:
    bound = EventRateLimiter(every_s=60.0, burst=100)
    assert bound.passes("ActorEvicted", "a", 0.0) == 0
    assert bound.passes("ActorEvicted", "b", 1.0) == 0, "another object"
    assert bound.passes("ActorJoined", "a", 1.0) == 0, "another kind"
    assert [bound.passes("ActorEvicted", "a", at) for at in (1.0, 30.0, 59.9)] == [None, None, None]
    assert bound.passes("ActorEvicted", "a", 60.0) == 3
    assert bound.passes("ActorEvicted", "a", 120.0) == 0


def test_all_kinds_together_are_bounded_and_refilled() -> None:
    bound = EventRateLimiter(every_s=60.0, burst=3, refill_s=10.0)
    passed = [bound.passes("ActorJoined", f"a{number}", 100.0) for number in range(5)]
    assert passed == [0, 0, 0, None, None]
    assert bound.passes("ActorJoined", "a3", 109.0) is None
    assert bound.passes("ActorJoined", "a3", 110.0) == 2
    assert bound.passes("ActorJoined", "a4", 110.0) is None


def test_what_the_bound_remembers_is_bounded() -> None:
    bound = EventRateLimiter(every_s=1e9, burst=10 * MOST_KEYS)
    for number in range(2 * MOST_KEYS):
        bound.passes("ActorJoined", f"a{number}", 0.0)
    assert len(bound._last) == MOST_KEYS


async def test_an_actor_that_flaps_does_not_flood_and_the_runs_own_events_pass(api: ApiServer, trainer: KubeClient) -> None:
    now_s = [0.0]
    async with recording(trainer, limiter=EventRateLimiter(burst=4), clock=lambda: now_s[0]) as recorder:
        events = RunEvents("demo", TRAINER_POD, recorder)
        for _ in range(500):
            events.member(MemberChange("joined", ACTOR, 1, 0), 1)
            events.member(MemberChange("evicted", ACTOR, 1, 0, "too slow"), 0)
        for number in range(500):
            events.member(MemberChange("joined", Member(f"a{number}", "p", pod_uid=f"u{number}"), 1, 0), 1)
        events.ended(3, 200, finished=False)
        await recorder.drained()
        assert [event["reason"] for event in api.events.values()] == (
            ["ActorJoined", "ActorEvicted", "ActorJoined", "ActorJoined", "RunStopped"]
        )
        now_s[0] = 61.0
        events.member(MemberChange("evicted", ACTOR, 1, 0, "too slow"), 0)
        await recorder.drained()
    assert list(api.events.values())[-1]["message"].endswith("(499 more like this since the last one)")


async def test_a_denial_is_told_once_and_costs_one_call(
    api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture
) -> None:
    api.rights["trainer-token"] = TRAINER - {CREATE_EVENTS}
    now_s = [0.0]
    async with recording(trainer, clock=lambda: now_s[0]) as recorder:
        events = RunEvents("demo", TRAINER_POD, recorder)
        for version in range(3):
            events.ended(version, 9, finished=True)
        await recorder.drained()
        assert (api.asked(CREATE_EVENTS), recorder.num_dropped) == (1, 3)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "resources [events], verbs [create]" in warning
        api.rights["trainer-token"] = TRAINER
        now_s[0] = 1001.0
        events.ended(9, 9, finished=True)
        await recorder.drained()
    assert len(api.events) == 1


async def test_an_api_that_is_away_holds_nothing_up_and_gets_the_events_when_it_is_back(
    api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture
) -> None:
    await api.stop()
    async with recording(trainer) as recorder:
        for number in range(2 * QUEUE_SIZE):
            recorder.emit(TRAINER_POD, "RunFinished", str(number), always=True)
        assert recorder.num_dropped == QUEUE_SIZE
        async with asyncio.timeout(SOON_S):
            while not caplog.records:
                await asyncio.sleep(0.005)
        await api.start()
        await recorder.drained()
    messages = [int(event["message"]) for event in api.events.values()]
    assert messages == sorted(messages)
    assert messages[-1] == QUEUE_SIZE - 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def trainer_settings(account: Path, **changes: Any) -> TrainerSettings:
    where = {"run": "demo", "recipe": Path("r.yaml"), "instance": "t-0", "verifier": "v:1", "run_dir": Path("r")}
    pod = {"pod_namespace": NAMESPACE, "pod_name": "t-0", "pod_uid": "t-uid", "service_account_dir": account}
    return TrainerSettings(**(where | pod | changes))


@pytest.mark.parametrize(
    ("error", "reasons"),
    [(ServiceError("the disk is full"), ["RunStarted", "RunFailed"]), (StartStopped("before it was up"), ["RunStarted"])],
)
async def test_an_error_that_ends_the_trainer_is_the_runs_failure_and_a_stop_at_its_start_is_not(
    api: ApiServer, account: Callable[[str], Path], error: Exception, reasons: list[str]
) -> None:
    async def run() -> None:
        async with run_events(trainer_settings(account("trainer-token"))) as events:
            events.started(0, 5, incarnation=1)
            raise error

    with pytest.raises(type(error)):
        await run()
    assert [event["reason"] for event in api.events.values()] == reasons


async def test_an_api_that_does_not_answer_costs_the_trainers_end_a_bounded_time(
    api: ApiServer, account: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_events_module, "LAST_EVENTS_S", 0.1)
    api.silent = True
    async with asyncio.timeout(SOON_S):
        async with run_events(trainer_settings(account("trainer-token"))) as events:
            events.ended(5, 5, finished=True)
    assert api.events == {}


async def test_outside_kubernetes_nothing_is_sent(api: ApiServer, account: Callable[[str], Path]) -> None:
    async with run_events(trainer_settings(account("trainer-token"), pod_namespace="")) as events:
        say_everything(events)
    assert api.calls == []
    assert LIST_PODS in TRAINER
