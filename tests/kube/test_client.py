"""Calls to the API: what goes over the wire and what a refusal says. Ends of pods are told once each, whatever becomes of the
API server meanwhile.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest

from pipelinerl.kube import client as kube_client
from pipelinerl.kube.client import LIST_PODS, TRAINER, WATCH_PODS, KubeClient, KubeError, PodEnd, PodWatch
from pipelinerl.service.retry import Backoff
from pipelinerl.service.settings import TrainerSettings
from services.trainer.run import watch_actor_pods
from tests.kube.api_server import NAMESPACE, SELECTOR, ApiServer, line, status
from tests.support.certificates import Authority
from tests.support.machine import until
from tests.unit.builders import RUN

Account = Callable[[str], Path]


async def test_the_trainer_has_the_rights_that_it_needs(api: ApiServer, trainer: KubeClient, account: Account) -> None:
    """Its rights are the exported permissions."""
    api.add_pod("a")
    version = (await trainer.call(LIST_PODS, label_selector=SELECTOR))["metadata"]["resourceVersion"]
    (await trainer.watch_pods(SELECTOR, version)).close()
    assert set(api.calls) == TRAINER
    async with KubeClient(NAMESPACE, account("actor-token"), request_s=60) as actor:
        with pytest.raises(KubeError) as raised:
            await actor.items(LIST_PODS, SELECTOR)
    assert raised.value.denied


async def test_a_token_that_is_no_longer_accepted_is_read_again_at_once(api: ApiServer, account: Account) -> None:
    folder = account("trainer-token")
    async with KubeClient(NAMESPACE, folder, request_s=60) as client:
        await client.items(LIST_PODS, SELECTOR)
        api.rights = {"second-token": TRAINER}
        with pytest.raises(KubeError, match="does not accept the account's token"):
            await client.items(LIST_PODS, SELECTOR)
        (folder / "token").write_text("second-token")
        version = (await client.call(LIST_PODS, label_selector=SELECTOR))["metadata"]["resourceVersion"]
        (await client.watch_pods(SELECTOR, version)).close()
        assert api.refused == [401, 401, 401]


async def test_no_answer_is_an_error_within_the_limit(api: ApiServer, account: Account, tmp_path: Path) -> None:
    with pytest.raises(KubeError, match="token file does not exist"):
        await KubeClient(NAMESPACE, tmp_path).items(LIST_PODS, SELECTOR)
    folder = account("trainer-token")
    async with KubeClient(NAMESPACE, folder, request_s=0.2) as client:
        api.silent = True
        with pytest.raises(KubeError, match="no answer: TimeoutError") as raised:
            await client.items(LIST_PODS, SELECTOR)
        assert raised.value.status == 0
        with pytest.raises(KubeError, match="no answer"):
            await client.watch_pods(SELECTOR, "1")
        await api.stop()
        with pytest.raises(KubeError, match="no answer"):
            await client.items(LIST_PODS, SELECTOR)


async def test_another_ca_is_not_trusted(api: ApiServer, account: Account) -> None:
    folder = account("trainer-token")
    Authority("another CA").write_ca(folder)
    async with KubeClient(NAMESPACE, folder, request_s=60) as client:
        with pytest.raises(KubeError, match="certificate verify failed"):
            await client.items(LIST_PODS, SELECTOR)
    assert api.calls == []


DELETING, DELETED = "its pod is being deleted", "its pod was deleted"
UNSEEN = "its pod was deleted, or relabelled"


def settings(folder: Path, account: Path, **changes: Any) -> TrainerSettings:
    where = {"run": RUN, "recipe": folder / "r.yaml", "instance": "t-0", "run_dir": folder}
    pod = {"pod_namespace": NAMESPACE, "service_account_dir": account, "actor_selector": SELECTOR}
    return TrainerSettings(**(where | pod | changes))


class Told:
    """What the trainer's updater is told."""

    def __init__(self) -> None:
        self.ends: list[PodEnd] = []

    def pod_ends(self, end: PodEnd) -> None:
        self.ends.append(end)

    async def until(self, *names: str) -> None:
        """Exactly these have been told, in this order."""
        await until(lambda: len(self.ends) >= len(names))
        assert [end.name for end in self.ends] == list(names)


@asynccontextmanager
async def watching(source: KubeClient | TrainerSettings) -> AsyncIterator[Told]:
    """As the trainer does with these settings, or with a client of more patience."""
    told = Told()
    if isinstance(source, KubeClient):
        run = PodWatch(source, SELECTOR, told.pod_ends, without="only heartbeats tell").run()
    else:
        run = watch_actor_pods(source, cast("Any", told))
    task = asyncio.create_task(run)
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


async def test_a_deleted_pod_is_told_when_it_is_told_to_end_and_when_it_is_gone(
    api: ApiServer, account: Account, tmp_path: Path
) -> None:
    api.add_pod("a", "u1")
    api.add_pod("other", labels={"app.kubernetes.io/component": "trainer"})
    async with watching(settings(tmp_path, account("trainer-token"))) as told:
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


@pytest.mark.parametrize(("missing", "asked"), [(LIST_PODS, "list"), (WATCH_PODS, "watch")])
async def test_an_unreachable_api_is_waited_for_and_a_missing_right_is_named_once(
    api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture, missing: object, asked: str
) -> None:
    caplog.set_level(logging.INFO)
    await api.stop()
    api.rights["trainer-token"] = TRAINER - {missing}
    async with watching(trainer) as told:
        await until(lambda: warnings(caplog))
        await api.start()
        await api.until(lambda: len(api.refused) >= 3)
        away, denied = warnings(caplog)
        assert "no answer" in away
        assert "only heartbeats tell" in away
        assert f"verbs [{asked}]" in denied
        api.rights["trainer-token"] = TRAINER
        await api.watched()
        api.add_pod("a")
        api.terminate("a")
        await told.until("a")
    assert f"managed to watch the pods {SELECTOR}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "says"), [({"pod_namespace": ""}, ""), ({"actor_selector": ""}, "PIPELINERL_ACTOR_SELECTOR is empty")]
)
async def test_where_there_is_nothing_to_watch_it_says_so_and_ends(
    tmp_path: Path, api: ApiServer, caplog: pytest.LogCaptureFixture, changes: dict[str, str], says: str
) -> None:
    await watch_actor_pods(settings(tmp_path, tmp_path, **changes), cast("Any", Told()))
    assert says in caplog.text
    assert api.calls == []
