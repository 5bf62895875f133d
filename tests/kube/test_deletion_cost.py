"""What stopping an actor would cost: counted from what it holds, told when it matters, and never in the way."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.kube.client import ACTOR, PATCH_PODS, KubeBackoff, KubeClient
from services.actor import membership
from services.actor.hand_over import HeldGroups
from services.actor.membership import ANNOTATION, MOST, tell_deletion_cost, work_in_hand, worth_telling
from services.actor.metrics import ActorMetrics
from tests.kube.api_server import SOON_S, ApiServer
from tests.support.generation import Delivery, partial
from tests.unit.builders import make_group


@dataclass
class Progress:
    """An engine as far as it is asked here."""

    tokens: dict[str, int] = field(default_factory=dict)

    def progress(self) -> dict[str, int]:
        return self.tokens


async def test_cost_is_the_tokens_of_all_that_is_not_stored() -> None:
    """Sample 0 was begun elsewhere (3) and goes on (5), 1 is finished and not stored (7), 2 is stored, 3 not begun."""
    group, held = make_group(0, num_samples=4, partials=(partial(0, *range(3)),)), HeldGroups()
    held.take(group, Delivery())  # type: ignore[arg-type]
    held.keep(group, partial(1, *range(7)))
    held.keep(group, partial(2, *range(100)))
    progress = {group.sequence_id(0): 5, "eval-1": 1000}
    await held.published(group, 2)
    assert work_in_hand(held.unfinished(), progress) == 3 + 5 + 7
    turns = {f"{group.sequence_id(3)}.{number}": 10 for number in (0, 1)}  # of an episode that asked for two at a time
    assert work_in_hand(held.unfinished(), progress | turns) == 3 + 5 + 7 + 20
    held.count_turn(group, 3, 4)
    assert work_in_hand(held.unfinished(), progress | turns) == 3 + 5 + 7 + 20 + 4, "with a turn that is at its end"
    held.keep(group, partial(3, *range(24)))
    assert work_in_hand(held.unfinished(), progress) == 3 + 5 + 7 + 24
    assert work_in_hand([], progress | turns) == 0
    assert work_in_hand(held.unfinished(), {group.sequence_id(3): 2**40}) == MOST


@pytest.mark.parametrize(
    ("told", "cost", "worth"),
    [
        (None, 0, True),
        (0, 0, False),
        (0, 1, True),
        (1, 0, True),
        (100, 356, False),
        (100, 357, True),
        (10_000, 12_000, False),
        (10_000, 12_001, True),
        (10_000, 7_999, True),
        (10_000, 8_000, False),
    ],
)
def test_told_is_what_may_change_the_order_of_pods(told: int | None, cost: int, worth: bool) -> None:
    assert worth_telling(told, cost) is worth


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "EVERY_S", 0.005)


@dataclass
class Running:
    progress: Progress
    sequence_id: str
    metrics: ActorMetrics

    async def until_shown(self, cost: int) -> None:
        """Twice over: whatever was to be done about it has been done."""
        for _ in range(2):
            async with asyncio.timeout(SOON_S):
                while self.metrics.deletion_cost._value.get() != cost:
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def telling(client: KubeClient | None, *, uid: str = "u1", backoff: KubeBackoff | None = None) -> AsyncIterator[Running]:
    held, group, progress, metrics = HeldGroups(), make_group(0), Progress(), ActorMetrics(CollectorRegistry())
    held.take(group, Delivery())  # type: ignore[arg-type]
    told = tell_deletion_cost(client, held, progress, metrics, pod="actor-x", uid=uid)  # type: ignore[arg-type]
    task = asyncio.create_task(told)
    shortened = backoff or KubeBackoff(first_s=membership.EVERY_S, most_s=20 * membership.EVERY_S)
    try:
        with patch.object(membership, "BACKOFF", shortened):
            yield Running(progress, group.sequence_id(0), metrics)
            assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def told(api: ApiServer) -> list[str]:
    return [patch["metadata"]["annotations"][ANNOTATION] for _, patch in api.patches]


async def test_the_pod_is_annotated_with_what_matters_and_nothing_else(api: ApiServer, actor: KubeClient) -> None:
    api.add_pod("actor-x", "u1")
    async with telling(actor) as running:
        for tokens in (0, 1000, 1100, 900, 2000, 0):
            running.progress.tokens[running.sequence_id] = tokens
            await running.until_shown(tokens)
            last = 1000 if tokens in (1100, 900) else tokens
            await api.until(lambda last=last: told(api)[-1:] == [str(last)])  # type: ignore[misc]
    assert told(api) == ["0", "1000", "2000", "0"]
    assert set(api.calls) == ACTOR
    assert api.pods["actor-x"]["metadata"]["annotations"] == {ANNOTATION: "0"}


async def test_without_the_right_one_warning_says_so_and_the_gauge_goes_on(
    api: ApiServer, actor: KubeClient, caplog: pytest.LogCaptureFixture
) -> None:
    api.add_pod("actor-x", "u1")
    api.rights["actor-token"] = frozenset()
    async with telling(actor, backoff=KubeBackoff(denied_s=0.01)) as running:
        await api.until(lambda: len(api.refused) >= 3)
        running.progress.tokens[running.sequence_id] = 77
        await running.until_shown(77)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "resources [pods], verbs [patch]" in warning
        api.rights["actor-token"] = ACTOR
        await api.until(lambda: told(api) == ["77"])


async def test_a_refusal_is_not_asked_for_again_soon(api: ApiServer, actor: KubeClient) -> None:
    api.rights["actor-token"] = frozenset()
    async with telling(actor, backoff=KubeBackoff(denied_s=1000.0)) as running:
        await api.until(lambda: len(api.refused) == 1)
        for tokens in (500, 5000, 0):
            running.progress.tokens[running.sequence_id] = tokens
            await running.until_shown(tokens)
    assert api.asked(PATCH_PODS) == 1


async def test_outside_kubernetes_the_gauge_shows_it() -> None:
    async with telling(None) as running:
        running.progress.tokens[running.sequence_id] = 12
        await running.until_shown(12)
