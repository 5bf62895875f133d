"""The actor's loop over an in-memory bus, with an engine and a verifier made for the test: what it samples, when groups are
acknowledged, and how another actor goes on when this one leaves.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.errors import BusError
from pipelinerl.messages.sequences import (
    Completion,
    FinishReason,
    PartialSequence,
    PolicyVersion,
    PromptGroup,
    SamplingParams,
    VersionSpan,
    decode_dead_letter,
    decode_group,
    decode_sequence,
    encode_group,
)
from pipelinerl.v1 import sequence_pb2
from pipelinerl.v1 import verifier_pb2 as pb
from services.actor.engine import EngineError, GenerationRequest, before_stop, cut_at_stop, followed_by, seed_of
from services.actor.generation import Sampler, encoded
from services.actor.hand_over import HeldGroups, messages_of
from services.actor.weight_sync.updates import ServingGate
from tests.support.generation import GOOD, STOP, Delivery, ScriptedEngine, Stage, generated, partial, stage
from tests.support.machine import an_hour_later
from tests.support.memory_bus import MemoryServer
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


async def test_an_outage_while_a_group_is_set_aside_leaves_it_to_the_next_delivery(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(serve=False) as one:
        monkeypatch.setattr(one.bus, "publish_dead_letter", AsyncMock(side_effect=BusError("no connection")))
        delivery = Delivery(payload=b"\xff\xff")
        assert (await one.loop.admit(delivery), delivery.said) == (None, [])  # type: ignore[arg-type]


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


# --- Going on with what another actor has begun


def sampler_of(engine: ScriptedEngine, max_context: int = 64) -> Sampler:
    engine.open.set()
    gate = ServingGate(max_lag=None)
    gate.serve(PolicyVersion(1, 3))
    return Sampler(engine, gate, instance="a", max_context=max_context, places=1)


def test_no_continuation_draws_the_random_numbers_of_another() -> None:
    group = make_group(seed=2**62, num_samples=4)
    seeds = {seed_of(group, i, tokens, number) for i in range(4) for tokens in range(10) for number in range(3)}
    assert len(seeds) == 120
    assert all(seed is not None and 0 < seed < 2**63 for seed in seeds)
    assert (seed_of(make_group(seed=100), 1), seed_of(make_group(seed=0), 1, 7)) == (101, None)


@pytest.mark.parametrize(
    ("start", "spans", "expected"),
    [
        ((7, 8), [(3, 0, 1), (4, 1, 2)], [(3, 0, 3), (4, 3, 4)]),  # one version, one span
        ((7,), [(3, 0, 1, 2)], [(3, 0, 1), (3, 1, 2, 2)]),  # of another incarnation
        ((7, 8), [], [(3, 0, 2)]),
        ((), [(4, 0, 1)], [(4, 0, 1)]),
    ],
)
def test_spans_of_both_parts(start: tuple[int, ...], spans: list[Any], expected: list[Any]) -> None:
    rest = replace(generated(*range(spans[-1][2] if spans else 0)), spans=tuple(VersionSpan(*span) for span in spans))
    whole = followed_by(replace(partial(1, *start, version=3), generation_s=2.0), rest)
    assert whole.spans == tuple(VersionSpan(*span) for span in expected)
    assert (whole.completion_token_ids.dtype, whole.behaviour_logprobs.dtype) == (np.int32, np.float32)
    assert (whole.sample_index, whole.finish_reason, whole.generation_s) == (1, STOP, 2.0)


@pytest.mark.parametrize(
    ("start", "max_tokens", "max_context", "expected"),
    [
        (partial(1), 4, 64, None),
        (partial(1, 7, 8, 9), 4, 64, None),
        (partial(1, 7, 8, 9, 10), 4, 64, FinishReason.LENGTH),
        (partial(1, 7, 8, 9), 16, 6, FinishReason.LENGTH),  # three of the prompt
        (partial(1, 7, 8), 16, 6, None),
        (partial(1, 7, finish=STOP), 16, 64, STOP),
        (partial(1, 7, 8, 9, 10, finish=STOP), 4, 64, STOP),
    ],
)
async def test_only_an_unfinished_sample_is_extended_within_its_limits(
    start: PartialSequence, max_tokens: int, max_context: int, expected: FinishReason | None
) -> None:
    group, engine = make_group(prompt=(1, 2, 3), sampling=SamplingParams(0.5, max_tokens), seed=100), ScriptedEngine()
    sequence = await sampler_of(engine, max_context).sample(group, start, None)
    begun = start.completion_token_ids.tolist()
    if expected is not None:
        assert engine.requests == {}
        assert (sequence.completion_token_ids.tolist(), sequence.finish_reason) == (begun, expected)
        return
    (request,) = engine.requests.values()
    assert (request.request_id, request.prompt_token_ids.tolist()) == ("g00000000.1", [1, 2, 3, *begun])
    assert request.prompt_token_ids.dtype == np.int32
    assert request.sampling == SamplingParams(0.5, min(max_tokens, max_context - 3) - len(begun))
    assert (request.seed == 101) == (not begun)
    assert engine.salts == {"g00000000.1": "begun at 1:3"}


def test_a_text_ends_before_the_stop_text_that_is_complete_first() -> None:
    assert before_stop("x = 1\nEND", ["END", "\n"]) == "x = 1"
    assert before_stop("abcd", ["abcd", "bc"]) == "a"  # "bc" was there one character earlier
    assert before_stop("abc", []) == "abc"


PIECES = ("a", "b", "ab", "ba", "", "bb")
"""What a token stands for."""


def text_of(tokens: Any) -> str:
    return "".join(PIECES[token] for token in tokens)


def engine_tokens(tokens: list[int], stop: list[str]) -> tuple[list[int], FinishReason | None]:
    ends = (end for end in range(1, len(tokens) + 1) if any(one in text_of(tokens[:end]) for one in stop))
    end = next(ends, None)
    return (tokens, None) if end is None else (tokens[:end], STOP)


@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), min_size=2, max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_a_sample_ends_at_the_same_token_with_any_hand_over(tokens: list[int], stop: list[str], data: st.DataObject) -> None:
    whole, finish = engine_tokens(tokens, stop)
    carried = data.draw(st.integers(0, len(whole) - 1))
    rest, rest_finish = engine_tokens(tokens[carried:], stop)
    sample = followed_by(partial(1, *tokens[:carried], version=3), generated(*rest, version=4, finish=rest_finish))
    ended = cut_at_stop(sample, carried, stop, text_of)
    assert (ended.completion_token_ids.tolist(), ended.finish_reason) == (whole, finish)
    assert ended.behaviour_logprobs.tolist() == [-3.0] * carried + [-4.0] * (len(whole) - carried)
    assert ended.spans[-1].end == len(whole)
    text = before_stop(text_of(whole), stop)
    assert text_of(whole).startswith(text)
    assert not any(one in text for one in stop)


# --- Handing over


def ended(*tokens: int, version: int = 2) -> Any:
    return lambda request: generated(*tokens, version=version)


@asynccontextmanager
async def under_way(*tokens: int, num_samples: int = 2, **options: Any) -> AsyncIterator[Stage]:
    """An actor in the middle of a group, of each of whose samples there are these tokens."""
    async with stage(**options) as one:
        one.engine.open.clear()
        one.engine.so_far = lambda request: generated(*tokens, version=1, finish=None)
        await one.issue(0, num_samples=num_samples)
        await one.generating(min(num_samples, options.get("in_progress", 4)))
        yield one


async def waiting(one: Stage) -> list[PromptGroup]:
    found = []
    while (delivery := await one.bus.next_prompt(0.001)) is not None:
        found.append(decode_group(delivery.payload, expected_run=RUN))
    return found


async def test_another_actor_goes_on_where_the_first_one_stopped() -> None:
    server = MemoryServer()
    async with under_way(7, 8, server=server) as first, stage(server=server, serve=False) as second:
        await first.leave()
        await first.until(lambda: first.metrics.busy.running == 0)
        busy_s = first.metrics.busy.total_s
        assert (len(first.held), first.metrics.busy.running, first.engine.running) == (0, 0, 0)
        pending = await second.bus.pending_prompts()
        assert [msg_id.partition("-")[0] for msg_id in pending] == ["g00000000/a"]

        second.engine.answer = ended(9, 2)
        second.gate.serve(PolicyVersion(1, 2))
        sequences = await second.published(2)
        await second.until(lambda: len(second.held) == 0)
    for sequence in sequences:
        assert sequence.completion_token_ids.tolist() == [7, 8, 9, 2]
        assert sequence.behaviour_logprobs.tolist() == [-1.0, -1.0, -2.0, -2.0]
        assert sequence.spans == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4))
        assert (sequence.completion_text, sequence.finish_reason) == ("7 8 9 2", STOP)
        assert sequence.reward == 1.0
        request = second.engine.requests[sequence.sequence_id]
        assert request.prompt_token_ids.tolist() == [1, 2, 3, 7, 8]
        assert request.sampling.max_tokens == 14
    assert (await second.bus.prompts_info()).messages == 0
    assert first.metrics.busy.total_s == busy_s
    assert first.counted("sequences_handed_over", state="unfinished") == 2
    assert second.counted("sequences_continued", state="unfinished") == 2
    assert second.counted("carried_tokens") == 4
    assert first.counted("generated_tokens") + second.counted("generated_tokens") == 8


async def test_a_stop_text_that_began_before_the_hand_over_ends_a_sequence_after_it() -> None:
    async with stage() as one:
        one.engine.answer = ended(9, 2, 5)
        sampling = SamplingParams(max_tokens=16, stop=("8 9",))
        await one.issue(0, num_samples=2, done_samples=(1,), partials=(partial(0, 7, 8),), sampling=sampling)
        (sequence,) = await one.published(1)
    assert sequence.completion_token_ids.tolist() == [7, 8, 9]
    assert sequence.behaviour_logprobs.tolist() == [-1.0, -1.0, -2.0]
    assert (sequence.completion_text, sequence.finish_reason) == ("7 ", STOP)


@pytest.mark.parametrize("is_full", [False, True], ids=["the verifier is away", "the log is full"])
async def test_finished_sequences_that_could_not_be_stored_are_only_verified_and_stored_there(is_full: bool) -> None:
    server, limits = MemoryServer(), StreamLimits(sequences_max_messages=2)
    async with stage(server=server, limits=limits) as first, stage(server=server, serve=False) as second:
        if is_full:
            assert [await first.bus.publish_sequence(b"", name) for name in ("one", "another")] == [1, 2]
        else:
            first.verifier.up.clear()
        first.engine.answer = ended(9, 2, version=1)
        await first.issue(0)
        await first.until(lambda: len(first.engine.started) == 2 and first.engine.running == 0)
        await first.leave()
        assert first.counted("sequences_handed_over", state="finished") == 2
        await second.bus.purge_sequences(3)
        second.gate.serve(PolicyVersion(1, 2))
        sequences = await second.published(2)
        assert second.engine.started == []
        assert {tuple(sequence.completion_token_ids) for sequence in sequences} == {(9, 2)}
        assert {(sequence.reward, sequence.failure, sequence.completion_text) for sequence in sequences} == {(1.0, "", "9 2")}
        assert second.counted("sequences_continued", state="finished") == 2


async def test_samples_stored_finished_begun_and_not_begun_go_over_in_one_message() -> None:
    async with under_way(7, num_samples=4, in_progress=2) as one:
        await one.held.published(make_group(0, num_samples=4), 0)
        await one.leave()
        (group,) = await waiting(one)
        assert group.done_samples == (0,)
        assert [(p.sample_index, p.completion_token_ids.tolist(), p.finish_reason) for p in group.partials] == [(1, [7], None)]
        assert one.engine.started == ["g00000000.0", "g00000000.1"]  # 2 and 3 had no place yet, and got none


async def test_what_cannot_be_stored_is_not_acknowledged(caplog: pytest.LogCaptureFixture) -> None:
    async with under_way(7, 8) as one:
        one.server.set_reachable(False)
        with caplog.at_level(logging.ERROR):
            assert await one.leave(store_within_s=0.1) == 0
        assert "cannot hand over group g00000000: NATS delivers its 2 unfinished samples again" in caplog.text
        one.server.set_reachable(True)
        with an_hour_later():
            delivery = await one.bus.next_prompt(10.0)
        assert (delivery.msg_id, delivery.num_deliveries) == ("g00000000", 2)
        assert (await one.bus.prompts_info()).messages == 1


async def test_a_full_queue_gets_its_group_back() -> None:
    async with under_way(7, limits=StreamLimits(prompts_max_messages=1, ack_wait_s=60.0)) as one:
        await one.leave(store_within_s=0.1)
        delivery = await one.bus.next_prompt(10.0)  # long before its deadline
        assert (delivery.msg_id, delivery.num_deliveries) == ("g00000000", 2)


async def test_the_old_message_is_acknowledged_only_when_the_new_one_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with under_way(7) as one:
        publish, seen = one.bus.publish_prompt, []

        async def slow(payload: bytes, msg_id: str, *headers: object) -> int:
            seen.append((await one.bus.prompts_info()).messages)
            if len(seen) < 3:
                raise BusError("not now")
            return await publish(payload, msg_id)

        monkeypatch.setattr(one.bus, "publish_prompt", slow)
        await one.leave()
        assert seen == [1, 1, 1]
        assert [msg_id.partition("-")[0] for msg_id in await one.bus.pending_prompts()] == ["g00000000/a"]


async def test_a_group_too_large_for_one_message_goes_over_in_several() -> None:
    server = MemoryServer(max_payload_bytes=4096)
    async with stage(server=server) as first, stage(server=server, serve=False) as second:
        first.engine.open.clear()
        first.engine.so_far = lambda request: generated(*range(150), finish=None)  # 1,200 bytes each: two fit
        group = make_group(0, num_samples=4, sampling=replace(make_group().sampling, max_tokens=400))
        await first.bus.publish_prompt(encode_group(group), group.group_id)
        await first.generating(4)
        await first.leave()
        assert (await first.bus.prompts_info()).messages == 2
        parts = await waiting(second)
        assert [[p.sample_index for p in part.partials] for part in parts] == [[0, 1], [2, 3]]
        assert [part.done_samples for part in parts] == [(2, 3), (0, 1)]


@pytest.mark.parametrize("error", [EngineError("dead"), None])
async def test_an_engine_that_died_or_does_not_answer_holds_up_nothing(
    caplog: pytest.LogCaptureFixture, error: EngineError | None
) -> None:
    async def abort(request_ids: object) -> None:
        if error is not None:
            raise error

    async with under_way(7) as one:
        one.engine.abort = abort  # type: ignore[method-assign, assignment]
        async with asyncio.timeout(60):
            await one.leave(timeout_s=0.1)
        (group,) = await waiting(one)
        assert (group.group_id, group.done_samples, group.partials) == ("g00000000", (), ())
    assert f"because the engine did not return them: {error or 'no answer within 0.1 s'}" in caplog.text


async def test_a_request_that_the_engine_does_not_know_yet_is_aborted_when_it_does() -> None:
    async with under_way(7) as one:
        abort, calls = one.engine.abort, []

        async def late(request_ids: list[str]) -> None:
            calls.append(request_ids)
            if len(calls) > 1:
                await abort(request_ids)

        one.engine.abort = late  # type: ignore[method-assign, assignment]
        await one.leave()
        (group,) = await waiting(one)
        assert len(group.partials) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sample_index": 5}, "partials: sample 5 is not in"),
        ({"completion_token_ids": np.arange(17, dtype="<i4").tobytes()}, "partials.behaviour_logprobs"),
        ({"finish_reason": 9}, "finish_reason: 9 is not a known finish reason"),
        ({"spans": []}, "partials.spans"),
    ],
)
async def test_partials_that_contradict_their_group_end_as_failed_sequences(change: dict[str, object], reason: str) -> None:
    group = make_group(0, num_samples=3, done_samples=(2,), partials=(partial(1, 7, 8),))
    message = sequence_pb2.PromptGroup.FromString(encode_group(group))
    for name, value in change.items():
        message.partials[0].ClearField(name)  # type: ignore[arg-type]
        if not isinstance(value, list):
            setattr(message.partials[0], name, value)
    async with stage() as one:
        await one.bus.publish_prompt(message.SerializeToString(), "g00000000/b-1")
        sequences = {s.sample_index: s.failure for s in await one.published(2)}
        assert set(sequences) == {0, 1}  # the third is stored already
        assert all(failure.startswith("unreadable_group: ") and reason in failure for failure in sequences.values())
        await one.all_acknowledged()
        assert one.counted("bad_messages", kind="prompt_group") == 1
        (letter,) = [decode_dead_letter(data) for data in await one.bus.dead_letters()]
        assert letter.prompt_group == message.SerializeToString()
        assert (letter.msg_id, letter.actor, letter.deliveries) == ("g00000000/b-1", "a", 1)
        assert reason in letter.reason


# --- messages


@given(st.lists(st.one_of(st.none(), st.integers(0, 60)), min_size=1, max_size=8), st.integers(200, 2000))
def test_the_messages_ask_for_each_missing_sample_once(lengths: list[int | None], max_bytes: int) -> None:
    """`lengths`: tokens of each sample that is missing; None: it is stored already."""
    sampling = replace(make_group().sampling, max_tokens=60)
    group = make_group(num_samples=len(lengths), sampling=sampling)
    missing = [index for index, length in enumerate(lengths) if length is not None]
    if not missing:
        return
    partials = [partial(index, *range(lengths[index] or 0)) for index in missing if lengths[index]]
    payloads, left_out = messages_of(group, missing, partials, max_bytes)
    parts = [decode_group(payload) for payload in payloads]
    asked = [sorted(set(range(len(lengths))) - set(part.done_samples)) for part in parts]
    assert sorted(index for part in asked for index in part) == missing
    carried = {p.sample_index: len(p.completion_token_ids) for part in parts for p in part.partials}
    assert sum(carried.values()) + left_out == sum(len(p.completion_token_ids) for p in partials)
    assert all(carried[index] == lengths[index] for index in carried)
    assert all(len(payload) <= max_bytes for payload in payloads)


# --- Groups in hand


async def test_a_message_delivered_again_starts_nothing_and_its_later_delivery_is_answered() -> None:
    held, first, again, group = HeldGroups(), Delivery(1), Delivery(1, num_deliveries=2), make_group()
    assert held.take(group, first) == [0, 1]
    assert not held.holds(group, Delivery(2))
    assert held.holds(group, again)
    assert held.take(group, again) == []
    for index in (0, 1):
        await held.published(group, index)
    assert (first.said, again.said) == ([], ["ack"])


async def test_samples_that_two_messages_ask_for_are_generated_once_and_acknowledge_both() -> None:
    """The first actor died after it had handed the group over, and before it could acknowledge it."""
    held, original, handed_over = HeldGroups(), Delivery(1), Delivery(2)
    rest, whole = make_group(num_samples=3, done_samples=(0,)), make_group(num_samples=3)
    assert held.take(rest, handed_over) == [1, 2]
    assert held.take(whole, original) == [0]
    for index in (1, 2):
        await held.published(rest, index)
    assert (original.said, handed_over.said) == ([], ["ack"])
    await held.published(whole, 0)
    assert (len(held), original.said) == (0, ["ack"])


async def test_an_acknowledgement_that_fails_is_tried_again() -> None:
    held, delivery, group = HeldGroups(), Delivery(1, refuse=2), make_group(num_samples=1)
    held.take(group, delivery)
    await held.published(group, 0)
    assert (len(held), delivery.said) == (1, [])
    keeping = asyncio.create_task(held.keep_alive(0.001))
    async with asyncio.timeout(60):
        while len(held):
            await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert delivery.said[-1] == "ack"


async def test_what_remains_is_what_is_missing_with_the_most_that_there_is_of_it() -> None:
    held, group = HeldGroups(), make_group(num_samples=4, done_samples=(3,), partials=(partial(0, 7), partial(1, 7, 8)))
    held.take(group, Delivery(1))
    held.keep(group, partial(0, 7, 9))
    held.keep(group, partial(2, 5))
    await held.published(group, 2)
    held.take(make_group(num_samples=4, done_samples=(0, 1, 2), partials=(partial(3, 6),)), Delivery(2))
    held.take(make_group(num_samples=4, done_samples=(2, 3), partials=(partial(0, 7, 9, 4), partial(1, 7))), Delivery(3))
    (left,) = held.values()
    assert (left.missing, set(left.messages)) == ({0, 1, 3}, {1, 2, 3})
    tokens = {index: sample.completion_token_ids.tolist() for index, sample in left.partials.items()}
    assert tokens == {0: [7, 9, 4], 1: [7, 8], 3: [6]}
