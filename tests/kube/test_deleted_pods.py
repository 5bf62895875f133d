"""Actors' pods that are deleted: real processes, NATS and Gloo groups around an API server; heartbeats that expire in an hour,
and actors that may be as slow as they like.

A departure that is noticed here was therefore noticed through the API.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.light_members import LightMember
from pipelinerl.kube.client import TRAINER
from pipelinerl.service.settings import TrainerSettings
from services.trainer.run import watch_actor_pods
from tests.faults.stage import SETTINGS, FaultStage, fault_stage
from tests.kube.api_server import NAMESPACE, SELECTOR, ApiServer
from tests.unit.builders import RUN

Account = Callable[[str], Path]
NEVER_EXPIRE = replace(SETTINGS, member_ttl_s=3600, deadline_s=3600, stall_timeout_s=3600)


def trainer_settings(folder: Path, account: Path, **changes: Any) -> TrainerSettings:
    where = {"run": RUN, "recipe": folder / "r.yaml", "instance": "t-0", "run_dir": folder}
    pod = {"pod_namespace": NAMESPACE, "service_account_dir": account, "actor_selector": SELECTOR}
    return TrainerSettings(**(where | pod | changes))


@asynccontextmanager
async def watched_stage(folder: Path, account: Account, api: ApiServer) -> AsyncIterator[FaultStage]:
    """A trainer that watches pods; nothing else tells it that an actor has left."""
    settings = trainer_settings(folder, account("trainer-token"))
    async with fault_stage(folder, settings=NEVER_EXPIRE) as stage:
        watching = asyncio.create_task(watch_actor_pods(settings, stage.updater))
        try:
            yield stage
            assert not watching.done()
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def served_by(stage: FaultStage, api: ApiServer, *names: str) -> list[LightMember]:
    """Actors in pods, all serving version 0."""
    for name in names:
        api.add_pod(name)
    started = await stage.start_all(*names, pods=True)
    await api.watched()
    await stage.update(0)
    return started


def told(stage: FaultStage, actor: str) -> list[str]:
    return [change.kind for change in stage.history.changes if change.member.actor == actor]


async def test_the_successor_of_a_deleted_pods_actor_joins(tmp_path: Path, account: Account, api: ApiServer) -> None:
    async with watched_stage(tmp_path, account, api) as stage:
        a, b = await served_by(stage, api, "a", "b")
        api.terminate("b")
        await stage.until(lambda: list(stage.updater.members) == ["a"])
        assert b.is_running, "it still has its grace period"
        await stage.update(1)
        await stage.all_on(1, [a])
        assert b.version == 0
        b.send(signal.SIGKILL)
        api.remove("b")
        api.add_pod("b", "uid-second")
        second = await stage.start("b", pod_uid="uid-second")
        await stage.all_on(1, [second])
        await stage.update(2)
        await stage.all_on(2, [a, second])
        assert told(stage, "b") == ["joined", "left", "joined"]
        assert stage.updater.evictions == 0
        assert set(api.calls) <= TRAINER


@pytest.mark.parametrize(
    ("changes", "says"), [({"pod_namespace": ""}, ""), ({"actor_selector": ""}, "PIPELINERL_ACTOR_SELECTOR is empty")]
)
async def test_where_there_is_nothing_to_watch_it_says_so_and_ends(
    tmp_path: Path, api: ApiServer, caplog: pytest.LogCaptureFixture, changes: dict[str, str], says: str
) -> None:
    async with fault_stage(tmp_path) as stage:
        await watch_actor_pods(trainer_settings(tmp_path, tmp_path, **changes), stage.updater)
    assert says in caplog.text
    assert api.calls == []
