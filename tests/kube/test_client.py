"""Calls to the API: what goes over the wire, what a refusal says, and that a pod outlives its token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pipelinerl.kube import client as client_module
from pipelinerl.kube.client import (
    ACTOR,
    CREATE_EVENTS,
    LIST_PODS,
    PATCH_PODS,
    TRAINER,
    WATCH_PODS,
    KubeClient,
    KubeError,
    PodChange,
    in_cluster,
)
from services.trainer.reporting.events import REASONS
from tests.kube.api_server import NAMESPACE, SELECTOR, SOON_S, ApiServer
from tests.unit.builders import RUN


async def test_an_annotation_is_merged_into_the_pod_of_that_uid(api: ApiServer, actor: KubeClient) -> None:
    api.add_pod("a", "u1")
    api.pods["a"]["metadata"]["annotations"] = {"other": "stays"}
    await actor.annotate_pod("a", "u1", {"cost": "12"})
    await actor.annotate_pod("a", "", {"cost": "13"})
    assert api.pods["a"]["metadata"]["annotations"] == {"other": "stays", "cost": "13"}
    with pytest.raises(KubeError) as raised:
        await actor.annotate_pod("a", "u2", {"cost": "14"})
    assert raised.value.status == 409


async def test_each_service_may_do_what_it_calls_and_nothing_else(
    api: ApiServer, actor: KubeClient, trainer: KubeClient
) -> None:
    """The rights of the two tokens are the exported permissions."""
    api.add_pod("a")
    await actor.annotate_pod("a", "", {"x": "1"})
    listing = await trainer.list_pods(SELECTOR)
    async with trainer.watch_pods(SELECTOR, listing.resource_version):
        await trainer.create_event({"metadata": {"name": "e"}, "involvedObject": {"namespace": NAMESPACE}})
    assert set(api.calls) == ACTOR | TRAINER
    assert frozenset() == ACTOR & TRAINER
    for refused in (
        actor.list_pods(SELECTOR),
        actor.create_event({"metadata": {}, "involvedObject": {}}),
        trainer.annotate_pod("a", "", {}),
    ):
        with pytest.raises(KubeError) as raised:
            await refused
        assert raised.value.denied


async def test_a_refusal_names_the_role_that_is_missing(api: ApiServer, trainer: KubeClient) -> None:
    api.rights["trainer-token"] = frozenset({CREATE_EVENTS})
    with pytest.raises(KubeError, match='apiGroups \\[""\\], resources \\[pods\\], verbs \\[list\\]') as raised:
        await trainer.list_pods(SELECTOR)
    assert (raised.value.status, raised.value.permission) == (403, LIST_PODS)
    with pytest.raises(KubeError, match="User cannot watch resource 'pods'"):
        async with trainer.watch_pods(SELECTOR, "1"):
            pass


async def test_an_event_that_is_stored_already_is_stored(api: ApiServer, trainer: KubeClient) -> None:
    event = {"metadata": {"name": "e1"}, "involvedObject": {"namespace": NAMESPACE}, "reason": "RunStarted"}
    await trainer.create_event(event)
    await trainer.create_event(event)
    assert list(api.events) == ["e1"]
    assert "RunStarted" in REASONS
    with pytest.raises(KubeError) as raised:
        await trainer.create_event({"metadata": {"name": "e2"}, "involvedObject": {"namespace": "other"}})
    assert raised.value.status == 422


async def test_a_token_that_is_no_longer_accepted_is_read_again_at_once(
    api: ApiServer, account: Callable[[str], Path]
) -> None:
    folder = account("trainer-token")
    client = KubeClient(NAMESPACE, folder)
    await client.list_pods(SELECTOR)
    api.rights = {"second-token": TRAINER}
    with pytest.raises(KubeError, match="does not accept the ServiceAccount's token"):
        await client.list_pods(SELECTOR)
    (folder / "token").write_text("second-token")
    listing = await client.list_pods(SELECTOR)
    async with client.watch_pods(SELECTOR, listing.resource_version):
        assert api.refused == [401, 401, 401]


async def test_the_official_client_reads_a_rotated_token_by_itself(
    api: ApiServer, account: Callable[[str], Path]
) -> None:
    """Long before the old one expires; without a refusal in between."""
    folder = account("trainer-token")
    client = KubeClient(NAMESPACE, folder)
    await client.list_pods(SELECTOR)
    api.rights["second-token"] = TRAINER
    (folder / "token").write_text("second-token")
    loader = client._api.api_client.configuration.refresh_api_key_hook.__closure__[0].cell_contents
    loader.token_expires_at -= loader._token_refresh_period
    await client.list_pods(SELECTOR)
    del api.rights["trainer-token"]
    await client.list_pods(SELECTOR)
    assert api.refused == []


async def test_no_answer_is_an_error_within_the_limit(api: ApiServer, account: Callable[[str], Path]) -> None:
    client = KubeClient(NAMESPACE, account("trainer-token"), request_s=0.2)
    api.silent = True
    with pytest.raises(KubeError, match="no answer") as raised:
        await client.list_pods(SELECTOR)
    assert raised.value.status == 0
    await api.stop()
    with pytest.raises(KubeError, match="no answer"):
        await client.create_event({"metadata": {"name": "e"}})


async def test_without_a_service_account_it_says_what_is_not_there(api: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(KubeError, match="token file does not exist"):
        await KubeClient(NAMESPACE, tmp_path).list_pods(SELECTOR)


async def test_another_ca_is_not_trusted(api: ApiServer, account: Callable[[str], Path], tmp_path: Path) -> None:
    from tests.kube.certificates import make_certificates

    other = tmp_path / "other"
    other.mkdir()
    make_certificates(other)
    folder = account("trainer-token")
    (folder / "ca.crt").write_bytes((other / "ca.crt").read_bytes())
    with pytest.raises(KubeError, match="certificate verify failed"):
        await KubeClient(NAMESPACE, folder).list_pods(SELECTOR)
    assert api.calls == []


async def test_an_answer_that_is_no_json_is_an_error(api: ApiServer, trainer: KubeClient) -> None:
    async with trainer.watch_pods(SELECTOR, "1000") as changes:
        await api.watched()
        api.say(b"half a line and\n")
        with pytest.raises(KubeError, match="no JSON object"):
            await anext(changes)


async def test_a_line_that_comes_in_pieces_is_one_change(api: ApiServer, trainer: KubeClient) -> None:
    async with trainer.watch_pods(SELECTOR, "1000") as changes:
        await api.watched()
        api.say(b'{"type": "BOOKMARK", "object": {"meta')
        api.say(b'data": {"resourceVersion": "7"}}}\n\n')
        async with asyncio.timeout(SOON_S):
            assert await anext(changes) == PodChange("BOOKMARK", None, "7")


async def test_leaving_a_silent_watch_ends_its_thread(
    api: ApiServer, trainer: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, next_line = threading.Event(), client_module._WatchStream.next_line

    def note_and_read(stream: client_module._WatchStream) -> bytes | None:
        reading.set()
        return next_line(stream)

    monkeypatch.setattr(client_module._WatchStream, "next_line", note_and_read)

    async def threads_end() -> None:
        async with asyncio.timeout(SOON_S):
            while any(thread.name == "kubernetes" for thread in threading.enumerate()):
                await asyncio.sleep(0.005)

    await threads_end()
    async with trainer.watch_pods(SELECTOR, "1000") as changes:
        waiting = asyncio.ensure_future(anext(changes))
        await api.watched()
        assert await asyncio.to_thread(reading.wait, SOON_S)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
    await threads_end()
    await api.watched(0)


def test_outside_kubernetes_there_is_no_client() -> None:
    from pipelinerl.service.settings import ActorSettings

    where = {"run": RUN, "recipe": Path("r.yaml"), "instance": "a", "verifier": "v:1"}
    assert in_cluster(ActorSettings(**where)) is None
    client = in_cluster(ActorSettings(**where, pod_namespace="train"))
    assert client is not None
    assert client.namespace == "train"


def test_permissions_are_the_least() -> None:
    assert {str(permission) for permission in ACTOR} == {"patch pods"}
    assert {str(permission) for permission in TRAINER} == {"list pods", "watch pods", "create events"}
    assert {PATCH_PODS.api_group, WATCH_PODS.api_group} == {""}
