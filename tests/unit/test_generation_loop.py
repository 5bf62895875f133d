"""The actor's loop over an in-memory bus, with an engine and a verifier made for the test."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from pipelinerl.errors import BusError
from pipelinerl.messages.sequences import Completion, PolicyVersion, PromptGroup, VersionSpan, decode_group, decode_sequence
from pipelinerl.telemetry.metrics import MOST_REASONS
from pipelinerl.v1 import verifier_pb2 as pb
from services.actor.engine import EngineError, GenerationRequest, without_arrays
from services.actor.generation import FinishedSample, Finisher, encoded
from services.actor.metrics import ActorMetrics
from services.actor.weight_sync.updates import ServingGate
from tests.support.generation import GOOD, ScriptedVerifier, generated, stage
from tests.support.memory_bus import MemoryBus
from tests.unit.builders import RUN, make_group, make_sequence


async def test_keeps_h_sequences_in_progress_and_not_more() -> None:
    async with stage(in_progress=3) as one:
        one.engine.open.clear()
        await one.issue(0, 1, 2)
        await one.generating(3)
        assert one.metrics.busy.running == 3
        assert one.engine.started == ["g00000000.0", "g00000000.1", "g00000001.0"]
        one.engine.open.set()
        await one.published(6)
        assert one.engine.most_running == 3


async def test_samples_that_begin_at_one_version_share_cached_prompts_and_none_while_a_version_is_swapped_in() -> None:
    async with stage(in_progress=1) as one:
        await one.issue(0, 1)
        await one.published(4)
        one.gate.swapping = True
        await one.issue(2)
        await one.published(6)
        one.gate.swapping = False
        one.gate.serve(PolicyVersion(1, 1))
        await one.issue(3)
        await one.published(8)
        salts = [*one.engine.salts.values()]
        assert salts[:4] == ["begun at 1:0"] * 4
        assert len(set(salts[4:6]) - {"begun at 1:0", "begun at 1:1", ""}) == 2
        assert salts[6:] == ["begun at 1:1"] * 2


async def test_a_gate_that_closes_keeps_a_loop_that_waits_for_a_slot_from_taking_a_group() -> None:
    async with stage(in_progress=1) as one:
        one.engine.open.clear()
        await one.issue(0, num_samples=1)
        await one.generating(1)
        await one.issue(1)
        one.gate.announce(PolicyVersion(1, 9))  # max_lag is 1
        one.engine.open.set()
        await one.published(1)
        await one.all_acknowledged(left=1)
        delivery = await one.bus.next_prompt(1.0)
        assert (delivery.msg_id, delivery.num_deliveries) == ("g00000001", 1)


async def test_when_the_gate_closes_the_samples_of_a_group_that_are_not_begun_go_back() -> None:
    async with stage(in_progress=1) as one:
        one.engine.open.clear()
        await one.issue(0, num_samples=4)
        await one.generating(1)
        await one.issue(1)
        one.gate.announce(PolicyVersion(1, 9))
        one.engine.open.set()
        assert [s.sequence_id for s in await one.published(1)] == ["g00000000.0"]
        await one.all_acknowledged(left=2)
        rest, other = [await one.bus.next_prompt(1.0) for _ in range(2)]
        asked = {group.group_id: group.done_samples for group in (decode_group(d.payload) for d in (rest, other))}
        assert asked == {"g00000000": (0,), "g00000001": ()}
        assert [rest.num_deliveries, other.num_deliveries] == [1, 1], "handing back costs no delivery"
        assert one.engine.started == ["g00000000.0"]
        for delivery in (rest, other):
            await delivery.give_back()
        one.gate.serve(PolicyVersion(1, 9))
        assert len({s.sequence_id for s in await one.published(6)}) == len(one.engine.started) == 6
        await one.all_acknowledged()


async def test_a_verifier_that_is_away_fills_the_buffer_and_loses_nothing() -> None:
    async with stage(in_progress=2, buffer_size=2) as one:
        one.verifier.up.clear()
        await one.issue(*range(15))
        # 4 workers each hold a batch of 4 at most; the buffer holds 2; 2 wait in their slots: then generation stands still.
        await one.until(lambda: one.loop.slots.locked() and one.engine.running == 0)
        assert one.metrics.busy.running == 0, "what waits for the verifier keeps no turn of an episode from decoding"
        assert len(one.engine.started) <= 20
        one.verifier.up.set()
        assert len({s.sequence_id for s in await one.published(30)}) == len(one.engine.started) == 30
        await one.all_acknowledged()


def outcome(status: int, reward: float = 0.0) -> Callable[[pb.VerifyItem], pb.VerifyResult]:
    return lambda item: pb.VerifyResult(sequence_id=item.sequence_id, status=status, reward=reward, message="slow")


@pytest.mark.parametrize(
    ("status", "failure"),
    [
        (pb.VERIFY_STATUS_TIMEOUT, "reward_timeout: slow"),
        (pb.VERIFY_STATUS_BAD_REWARD, "reward_bad_reward: slow"),
        (None, "verifier_refused: refused a batch"),
    ],
)
async def test_a_reward_that_fails_costs_that_sequence(status: int | None, failure: str) -> None:
    async with stage() as one:
        good, bad = outcome(pb.VERIFY_STATUS_OK, 0.5), outcome(status or pb.VERIFY_STATUS_OK)
        one.verifier.up.clear()  # both are in one batch
        one.verifier.judge = lambda item: (bad if item.sequence_id.endswith(".1") else good)(item)
        one.verifier.refuses = lambda item: status is None and item.sequence_id.endswith(".1")
        await one.issue(0)
        await one.until(lambda: len(one.engine.started) == 2)
        one.verifier.up.set()
        by_index = {s.sample_index: s for s in await one.published(2)}
        assert (by_index[0].failure, by_index[0].reward) == ("", 0.5)
        assert by_index[1].failure == failure


async def test_a_dead_engine_ends_the_actor_and_the_group_is_not_acknowledged() -> None:
    async with stage() as one:

        def answer(request: GenerationRequest) -> Completion:
            one.engine.alive = False
            raise EngineError("lost")

        one.engine.answer = answer
        await one.issue(0)
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(60):
                await one.running
        assert raised.group_contains(EngineError, match="the engine process died")
        assert (await one.bus.prompts_info()).messages == 1


@pytest.mark.parametrize(
    ("made", "failure"),
    [
        (EngineError("bad request"), "engine: bad request"),
        (generated(7, finish=None), "engine: generation stopped before the sequence was finished"),
        (generated(), "empty_completion"),
        (replace(generated(7), behaviour_logprobs=np.array([np.nan], np.float32)), "non_finite_logprobs"),
        (replace(generated(7, 2), spans=(VersionSpan(0, 0, 1),)), "version_spans: cover 1 of 2 tokens"),
        (generated(*[7] * 1000), "too_large: "),  # beyond max_payload
    ],
)
async def test_a_completion_that_cannot_be_trained_on_costs_that_sequence(made: Completion | EngineError, failure: str) -> None:
    def answer(request: GenerationRequest) -> Completion:
        if request.request_id.endswith(".1"):
            return GOOD
        if isinstance(made, EngineError):
            raise made
        return made

    async with stage(max_payload_bytes=2000) as one:
        one.engine.answer = answer
        await one.issue(0)
        by_index = {s.sample_index: s for s in await one.published(2)}
        assert by_index[0].failure.startswith(failure)
        assert len(by_index[0].completion_token_ids) == 0
        assert (by_index[1].failure, by_index[1].reward) == ("", 1.0)


def test_a_sequence_with_invalid_numbers_is_stored_as_a_failure() -> None:
    invalid = replace(make_sequence(make_group(0), 0), reward=math.inf, generation_s=-1.0)
    payload, failure = encoded(invalid)
    stored = decode_sequence(payload)
    assert failure.startswith("invalid: Sequence.reward: ")
    assert (stored.failure, stored.reward) == (failure, 0.0)
    assert (stored.sequence_id, stored.actor) == (invalid.sequence_id, invalid.actor)


async def test_an_outage_while_a_group_is_set_aside_does_not_end_the_actor() -> None:
    async with stage(serve=False) as one:
        await one.bus.publish_prompt(b"\xff\xff", "nonsense")

        class Lost:
            payload, num_deliveries, position, msg_id = b"\xff\xff", 1, 1, "nonsense"

            async def terminate(self, reason: str) -> None:
                raise BusError("no connection")

        assert await one.loop.admit(Lost()) is None  # type: ignore[arg-type]
        one.gate.serve(PolicyVersion(1, 0))
        await one.issue(0)
        assert len(await one.published(2)) == 2  # it came again, and was set aside then


async def test_samples_already_published_are_not_generated_again() -> None:
    async with stage() as one:
        await one.issue(1, done_samples=(0, 1))  # it asks for nothing
        await one.issue(0, num_samples=3, done_samples=(0, 2))
        assert [s.sequence_id for s in await one.published(1)] == ["g00000000.1"]
        await one.all_acknowledged()


async def test_a_group_that_was_delivered_too_often_ends_as_failed_sequences() -> None:
    async with stage(serve=False) as one:
        await one.issue(0)
        for _ in range(one.bus.limits.max_deliveries):
            delivery = await one.bus.next_prompt(1.0)
            await delivery.give_back()
        one.gate.serve(PolicyVersion(1, 0))
        assert {s.failure for s in await one.published(2)} == {"redelivered_too_often"}
        await one.all_acknowledged()
        assert one.engine.started == []


def test_the_gate_closes_beyond_max_lag_and_while_draining() -> None:
    gate = ServingGate(max_lag=1)
    assert (gate.phase, gate.opened.is_set(), gate.reason) == ("joining", False, "no policy version served yet")
    gate.serve(PolicyVersion(1, 3))
    assert gate.phase == "serving"
    gate.announce(PolicyVersion(1, 5))
    assert gate.opened.is_set()
    gate.announce(PolicyVersion(1, 6))
    assert gate.reason == "serves 1:3, more than max_lag + 1 (2) versions behind 1:6"
    gate.announce(PolicyVersion(2, 3))
    assert not gate.opened.is_set()
    gate.serve(PolicyVersion(2, 3))
    assert gate.opened.is_set()
    gate.drain()
    assert gate.reason == "draining"


async def test_failures_of_any_text_make_few_series_of_the_counter() -> None:
    registry = CollectorRegistry()

    async def published(group: PromptGroup, index: int) -> None:
        return

    async with MemoryBus(RUN) as bus:
        finisher = Finisher(bus, ScriptedVerifier(), ActorMetrics(registry), published, buffer_size=100, batch_size=4)  # type: ignore[arg-type]
        running = asyncio.create_task(finisher.run())
        for number in range(100):
            group = make_group(number)
            sequence = without_arrays(make_sequence(group, 0), f"strange {number}: {'x' * 100}")
            await finisher.buffer.put(FinishedSample(group, sequence))
        await finisher.buffer.join()
        running.cancel()
    samples = [sample for family in registry.collect() for sample in family.samples]
    counts = [sample.value for sample in samples if sample.name == "pipelinerl_actor_sequences_failed_total"]
    assert (len(counts), sum(counts)) == (MOST_REASONS + 1, 100)
