"""Ends of pods are told once each, whatever becomes of the API server meanwhile."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from pipelinerl.kube import client as kube_client
from pipelinerl.kube.client import LIST_PODS, TRAINER, WATCH_PODS, KubeClient, PodEnd, PodWatch
from pipelinerl.service.retry import Backoff
from tests.kube.api_server import SELECTOR, SOON_S, ApiServer, line, status
from tests.support.machine import until

DELETING, DELETED = "its pod is being deleted", "its pod was deleted"
UNSEEN = "its pod was deleted, or relabelled"


@dataclass
class Told:
    ends: list[PodEnd] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, end: PodEnd) -> None:
        self.ends.append(end)
        self._changed.set()

    async def until(self, *names: str) -> None:
        """Exactly these have been told, in this order."""
        async with asyncio.timeout(SOON_S):
            while len(self.ends) < len(names):
                self._changed.clear()
                await self._changed.wait()
        assert [end.name for end in self.ends] == list(names)


@asynccontextmanager
async def watching(client: KubeClient) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(PodWatch(client, SELECTOR, told.hear, without="only heartbeats tell").run())
    try:
        with patch.object(kube_client, "BACKOFF", Backoff(first_s=0.01, most_s=0.05)):
            yield told
            assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("pipelinerl.")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


async def test_a_deleted_pod_is_told_when_it_is_told_to_end_and_when_it_is_gone(api: ApiServer, trainer: KubeClient) -> None:
    api.add_pod("a", "u1")
    api.add_pod("other", labels={"app.kubernetes.io/component": "trainer"})
    async with watching(trainer) as told:
        await api.watched()
        api.add_pod("b", "u2")
        api.terminate("other")
        api.terminate("a")
        await told.until("a")
        api.set_phase("a", "Running")  # it is still being deleted
        api.remove("a")
        api.add_pod("a", "u3")
        api.remove("b")
        await told.until("a", "a", "b")
    assert told.ends == [
        PodEnd("a", "u1", DELETING, still_running=True),
        PodEnd("a", "u1", DELETED, still_running=False),
        PodEnd("b", "u2", UNSEEN, still_running=False, final=False),
    ]


async def test_the_end_of_a_pod_before_anybody_watched_is_told_once(api: ApiServer, trainer: KubeClient) -> None:
    for name in "abcd":
        api.add_pod(name)
    api.terminate("a")
    api.set_phase("b", "Failed", "Evicted")
    async with watching(trainer) as told:
        await told.until("a", "b")
        await api.watched()
        api.set_phase("c", "Succeeded")
        api.terminate("c")
        api.remove("c")
        api.remove("d")
        await told.until("a", "b", "c", "d")
    assert [end.still_running for end in told.ends] == [True, False, False, False]
    assert told.ends[1].reason == "its pod is in phase Failed (Evicted)"


async def test_a_watch_that_ends_lists_all_again(api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abc":
        api.add_pod(name)
    async with watching(trainer) as told:
        await api.watched()
        api.end_watches()
        await api.watched(0)
        api.remove("a")
        api.terminate("b")
        await told.until("a", "b")
        await api.watched()
        api.drop_watches()
        api.remove("b")
        await told.until("a", "b", "b")
        for nonsense in (line("ERROR", status(410, "Expired", "too old resource version")), b"half a line and\n"):
            await api.watched()
            lists = api.asked(LIST_PODS)
            api.say(nonsense)
            await api.until(lambda before=lists: api.asked(LIST_PODS) > before)
        await api.watched()
        api.terminate("c")
        await told.until("a", "b", "b", "c")
        assert warnings(caplog) == []
    assert [end.reason for end in told.ends] == [UNSEEN, DELETING, DELETED, DELETING]


async def test_an_unreachable_api_is_waited_for(api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await api.stop()
    api.rights["trainer-token"] = frozenset()
    async with watching(trainer) as told:
        await until(lambda: warnings(caplog))
        await asyncio.sleep(0.1)  # several tries
        await api.start()
        await api.until(lambda: len(api.refused) >= 2)
        api.rights["trainer-token"] = TRAINER
        api.add_pod("a")
        await api.watched()
        api.terminate("a")
        await told.until("a")
    away, denied = warnings(caplog)
    assert "no answer" in away
    assert "only heartbeats tell" in away
    assert "status 403" in denied
    assert f"managed to watch the pods {SELECTOR}" in caplog.text


@pytest.mark.parametrize(("missing", "asked"), [(LIST_PODS, "list"), (WATCH_PODS, "watch")])
async def test_a_missing_right_is_named_once_and_tried_again_rarely(
    api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture, missing: object, asked: str
) -> None:
    api.rights["trainer-token"] = TRAINER - {missing}
    async with watching(trainer) as told:
        await api.until(lambda: len(api.refused) >= 3)
        (warning,) = warnings(caplog)
        assert f"verbs [{asked}]" in warning
        assert "only heartbeats tell" in warning
        api.rights["trainer-token"] = TRAINER
        await api.watched()
        api.add_pod("a")
        api.terminate("a")
        await told.until("a")
