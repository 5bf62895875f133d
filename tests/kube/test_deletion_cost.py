"""What stopping an actor would cost: counted from what it holds, told by the trainer when it matters, and never in the way."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import yaml

from pipelinerl.kube import deletion_cost
from pipelinerl.kube.client import PATCH_PODS, TRAINER, KubeBackoff, KubeClient, KubeError
from pipelinerl.kube.deletion_cost import ANNOTATION, MOST, keep_deletion_costs, worth_telling
from pipelinerl.service.settings import read_address
from services.actor.hand_over import HeldGroups
from services.actor.membership import work_in_hand
from services.trainer.data.evaluation import ActorClient
from tests.kube.api_server import SELECTOR, ApiServer
from tests.support.actor_stage import actor_stage
from tests.support.generation import Delivery, partial
from tests.unit.builders import make_group, make_recipe


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


async def test_an_actor_says_what_its_stop_would_cost_and_needs_no_kubernetes_for_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(make_recipe().model_dump(mode="json")))
    async with actor_stage(tmp_path, recipe) as one:
        actor = await one.start("x", version=1, token_s=0.005)
        await one.until(lambda: asyncio.to_thread(actor.address_file.exists))
        async with ActorClient("x", read_address(actor.address_file).grpc) as client:

            async def cost() -> int:
                return int((await client.state(timeout_s=5)).deletion_cost)

            async def is_busy() -> bool:
                return 0 < await cost() <= 4 * 200

            async def is_idle() -> bool:
                return await cost() == 0

            assert await is_idle()
            await one.issue(0, num_samples=4, max_tokens=200)
            await one.until(is_busy)
            await one.stored(4)
            await one.until(is_idle)


A, B = ("actor-a", "u1"), ("actor-b", "u2")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion_cost, "EVERY_S", 0.005)
    monkeypatch.setattr(deletion_cost, "BACKOFF", KubeBackoff(first_s=0.005, most_s=0.01, denied_s=0.01))


@asynccontextmanager
async def keeping(client: KubeClient, costs: dict[tuple[str, str], int]) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_deletion_costs(client, lambda: dict(costs)))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def told(api: ApiServer, pod: str = "actor-a") -> list[str]:
    return [patch["metadata"]["annotations"][ANNOTATION] for name, patch in api.patches if name == pod]


async def test_pods_are_annotated_with_what_matters_and_nothing_else(api: ApiServer, trainer: KubeClient) -> None:
    for name, uid in (A, B):
        api.add_pod(name, uid)
    costs = {A: 0, B: 2**40, ("actor-gone", "u3"): 5, ("actor-b", "of-an-earlier-one"): 7}
    async with keeping(trainer, costs):
        for tokens in (0, 1000, 1100, 900, 2000, 0):
            costs[A] = tokens
            last = 1000 if tokens in (1100, 900) else tokens
            seen = api.asked(PATCH_PODS)
            # Each round asks for those two that are not there: two of them later, this cost was looked at.
            await api.until(lambda seen=seen: api.asked(PATCH_PODS) >= seen + 6)  # type: ignore[misc]
            assert told(api)[-1:] == [str(last)]
    assert told(api) == ["0", "1000", "2000", "0"]
    assert told(api, "actor-b") == [str(MOST)]
    assert set(api.calls) == {PATCH_PODS}
    assert api.pods["actor-a"]["metadata"]["annotations"] == {ANNOTATION: "0"}


async def test_without_the_right_one_warning_says_so_and_it_is_asked_for_again_rarely(
    api: ApiServer, trainer: KubeClient, caplog: pytest.LogCaptureFixture
) -> None:
    for name, uid in (A, B):
        api.add_pod(name, uid)
    api.rights["trainer-token"] = frozenset()
    costs = {A: 7, B: 8}
    async with keeping(trainer, costs):
        await api.until(lambda: len(api.refused) >= 3)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert "resources [pods], verbs [patch]" in warning
        costs[A] = 77
        api.rights["trainer-token"] = TRAINER
        await api.until(lambda: (told(api)[-1:], told(api, "actor-b")) == (["77"], ["8"]))


async def test_a_refusal_ends_the_round_and_the_next_one_waits_long(
    api: ApiServer, trainer: KubeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion_cost, "BACKOFF", KubeBackoff(denied_s=1000.0))
    api.rights["trainer-token"] = frozenset()
    async with keeping(trainer, {A: 1, B: 2}):
        await api.until(lambda: len(api.refused) == 1)
        with pytest.raises(KubeError):
            await trainer.list_pods(SELECTOR)  # meanwhile a second try would have been made
    assert api.asked(PATCH_PODS) == 1
