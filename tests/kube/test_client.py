"""Calls to the API: what goes over the wire, what a refusal says, and that a pod outlives its token."""

from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl.kube.client import LIST_PODS, TRAINER, KubeClient, KubeError
from tests.kube.api_server import NAMESPACE, SELECTOR, ApiServer, kube_client
from tests.support.certificates import Authority


async def test_the_trainer_has_the_rights_that_it_needs(api: ApiServer, actor: KubeClient, trainer: KubeClient) -> None:
    """Its rights are the exported permissions."""
    api.add_pod("a")
    version = (await trainer.call(LIST_PODS, label_selector=SELECTOR))["metadata"]["resourceVersion"]
    (await trainer.watch_pods(SELECTOR, version)).close()
    assert set(api.calls) == TRAINER
    with pytest.raises(KubeError) as raised:
        await actor.items(LIST_PODS, SELECTOR)
    assert raised.value.denied


async def test_a_token_that_is_no_longer_accepted_is_read_again_at_once(api: ApiServer, account: Callable[[str], Path]) -> None:
    folder = account("trainer-token")
    async with kube_client(folder) as client:
        await client.items(LIST_PODS, SELECTOR)
        api.rights = {"second-token": TRAINER}
        with pytest.raises(KubeError, match="does not accept the account's token"):
            await client.items(LIST_PODS, SELECTOR)
        (folder / "token").write_text("second-token")
        version = (await client.call(LIST_PODS, label_selector=SELECTOR))["metadata"]["resourceVersion"]
        (await client.watch_pods(SELECTOR, version)).close()
        assert api.refused == [401, 401, 401]


async def test_a_token_is_read_again(api: ApiServer, account: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class InAMinute(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=61)

    folder = account("trainer-token")
    async with kube_client(folder) as client:
        await client.items(LIST_PODS, SELECTOR)
        (folder / "token").write_text("second-token")
        await client.items(LIST_PODS, SELECTOR)
        api.rights = {"second-token": TRAINER}
        clock = SimpleNamespace(datetime=InAMinute, timedelta=timedelta)
        monkeypatch.setattr("kubernetes.aio.config.incluster_config.datetime", clock)
        await client.items(LIST_PODS, SELECTOR)
    assert api.refused == []


async def test_no_answer_is_an_error_within_the_limit(api: ApiServer, account: Callable[[str], Path]) -> None:
    async with kube_client(account("trainer-token"), request_s=0.2) as client:
        api.silent = True
        with pytest.raises(KubeError, match="no answer: TimeoutError") as raised:
            await client.items(LIST_PODS, SELECTOR)
        assert raised.value.status == 0
        with pytest.raises(KubeError, match="no answer"):
            await client.watch_pods(SELECTOR, "1")
        await api.stop()
        with pytest.raises(KubeError, match="no answer"):
            await client.items(LIST_PODS, SELECTOR)


async def test_without_a_service_account_the_error_says_what_is_missing(api: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(KubeError, match="token file does not exist"):
        await KubeClient(NAMESPACE, tmp_path).items(LIST_PODS, SELECTOR)


async def test_another_ca_is_not_trusted(api: ApiServer, account: Callable[[str], Path]) -> None:
    folder = account("trainer-token")
    Authority("another CA").write_ca(folder)
    async with kube_client(folder) as client:
        with pytest.raises(KubeError, match="certificate verify failed"):
            await client.items(LIST_PODS, SELECTOR)
    assert api.calls == []
