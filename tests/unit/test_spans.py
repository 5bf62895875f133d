"""What is traced, and how a trace goes from one process to the next in headers and messages; whole traces are the tour's."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, messaging_attributes, rpc_attributes
from opentelemetry.trace import SpanKind, StatusCode

from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.protocol import NO_HEADERS, LogEntry
from pipelinerl.messages.sequences import PolicyVersion, encode_group
from pipelinerl.rl.ledger import Outcome, SequenceTracker
from pipelinerl.telemetry import attributes as a
from pipelinerl.telemetry.tracing import child, headers_of, root, trace_in, trace_of
from services.trainer.data.traces import SequenceTraces
from services.trainer.weight_sync.coordinator import Phase
from tests.support.generation import stage as actor_stage
from tests.support.memory_bus import MemoryServer
from tests.support.spans import recorded
from tests.unit.builders import make_group, make_sequence
from tests.unit.test_feeder_and_intake import desk
from tests.unit.test_update_protocol import stage as update_stage

SAMPLED = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
TRACED = {"traceparent": SAMPLED}


def test_a_trace_goes_through_headers_also_without_a_tracer_where_none_begins() -> None:
    with recorded() as spans:
        with root("here") as here:
            headers = headers_of(trace_of(here))
        with child(trace_in(headers), "there"):
            pass
    assert spans.way(spans.named("there")[0]) == ["here", "there"]
    with root("never") as span:
        assert headers_of(trace_of(span)) == {}
    with child(trace_in(TRACED), "never") as span:
        assert headers_of(trace_of(span)) == TRACED


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"traceparent": ""},
        {"traceparent": "garbage"},
        {"traceparent": SAMPLED[:-1]},
        {"traceparent": SAMPLED.replace("a", "0")},
        {"traceparent": SAMPLED.replace("00-", "ff-", 1)},
        {"traceparent": "x" * 10_000},
        {"traceparent": SAMPLED[:-2] + "00"},  # not sampled
    ],
)
def test_what_names_no_sampled_trace_is_followed_by_nothing(headers: dict[str, str]) -> None:
    with recorded() as spans:
        trace = trace_in(headers)
        with child(trace, "never") as span:
            assert headers_of(trace_of(span)) == {}
    assert trace is None
    assert spans.all == ()


def test_attributes_have_the_names_of_the_conventions() -> None:
    ours = {*a.messaging("send", "s", "m", 1), *a.rpc("m"), a.RPC_STATUS}
    ours |= {a.INPUT_TOKENS, a.OUTPUT_TOKENS, a.FINISH_REASONS, a.CHOICES}
    conventions = (gen_ai_attributes, messaging_attributes, rpc_attributes)
    theirs = {value for module in conventions for value in vars(module).values() if isinstance(value, str)}
    assert ours <= theirs
    assert a.STATUS == "pipelinerl.verify.status"


def test_a_sequence_ends_in_its_trace_with_its_outcome_and_the_step_that_trained_it() -> None:
    group, traces = make_group(num_samples=3), SequenceTraces()
    books = SequenceTracker(traces.tracked)
    with recorded() as spans:
        books.issue(group)
        with traces.issue(group, group.group_id) as issued:
            headers = headers_of(trace_of(issued))
        sequences = [make_sequence(group, index) for index in range(3)]
        for sequence in sequences[:2]:
            traces.received(LogEntry(1, b"payload", sequence.sequence_id, headers), sequence)
        with traces.step(8, [sequence.sequence_id for sequence in sequences[:2]]):
            books.close(sequences[:1], Outcome.TRAINED, version=8)
        books.close(sequences[1:], Outcome.DROPPED_STALE, "too old")
    (trained,), (step,) = spans.named("sequence.train"), spans.named("step.train")
    assert spans.way(trained) == ["group.issue", "sequence.receive", "sequence.train"]
    assert step.parent is None
    received = {span.context.span_id for span in spans.named("sequence.receive") if span.context}
    assert {link.context.span_id for link in step.links} == received
    assert [link.context.span_id for link in trained.links] == [step.context.span_id]
    assert (trained.attributes[a.OUTCOME], trained.attributes[a.VERSION]) == ("trained", 8)
    stale = spans.named("sequence.end")
    assert [spans.way(span)[:-1] for span in stale] == [["group.issue", "sequence.receive"], ["group.issue"]]
    assert {(span.attributes or {})[a.REASON] for span in stale} == {"too old"}


@pytest.mark.parametrize("sampled", [nullcontext(), recorded(ALWAYS_OFF)], ids=["no tracer", "nothing sampled"])
async def test_nothing_travels_where_there_is_nothing_to_follow(sampled: AbstractContextManager[object]) -> None:
    with sampled:
        async with desk() as one:
            delivery = await one.bus.next_prompt(5.0)
    assert delivery.headers == NO_HEADERS


async def headers_of_two(bus: Bus) -> list[dict[str, str]]:
    """Those of the log's first two sequences."""
    async with asyncio.timeout(60), bus.read_sequences(1) as entries:
        return [dict((await anext(entries)).headers) for _ in range(2)]


@pytest.mark.parametrize("headers", [NO_HEADERS, {"traceparent": "garbage"}])
async def test_an_untraced_or_malformed_group_is_generated_without_spans(headers: dict[str, str]) -> None:
    with recorded() as spans:
        async with actor_stage() as one:
            group = make_group()
            await one.bus.publish_prompt(encode_group(group), group.group_id, headers)
            assert await headers_of_two(one.bus) == [{}, {}]
    assert spans.all == ()


async def test_who_goes_on_with_a_group_follows_the_same_trace() -> None:
    server = MemoryServer()
    with recorded() as spans:
        async with actor_stage(server=server) as first, actor_stage(server=server, serve=False) as second:
            first.engine.open.clear()
            with root("group.issue") as issued:
                group = make_group()
                await first.bus.publish_prompt(encode_group(group), group.group_id, headers_of(trace_of(issued)))
            await first.until(lambda: first.engine.running == 2)
            await first.leave()
            second.gate.serve(PolicyVersion(1, 0))
            await headers_of_two(second.bus)
            await second.until(lambda: len(second.held) == 0)
    generated = spans.named("sequence.generate")
    assert [spans.way(span) for span in generated] == [["group.issue", "sequence.generate"]] * 4
    carried = [(span.attributes or {}).get(a.CARRIED_TOKENS) for span in generated]
    assert carried == [None, None, 2, 2]
    assert [event.name for span in generated[:2] for event in span.events] == ["interrupted"] * 2


async def test_an_eviction_stays_in_the_updates_trace() -> None:
    with recorded() as spans:
        async with update_stage("a", "b") as one:
            one.actors["b"].receiver.may_receive.clear()
            await one.updater.offer(0, "snapshot-0")
            await one.deadline_passes("a")
            await one.updater.all_served()
    update = next(span for span in spans.named("weight_update") if a.ACTOR not in (span.attributes or {}))
    assert [event.name for event in update.events] == ["staged", "evicted", "aborted", "staged", "serving"]
    assert update.status.status_code is StatusCode.UNSET  # the version was served in the end
    assert {spans.way(span)[0] for span in spans.all} == {"weight_update"}


async def test_a_commit_that_nobody_lives_to_carry_out_ends_as_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with recorded() as spans:
        async with update_stage("a") as one:
            actor = one.actors["a"]
            actor.receiver.may_commit.clear()
            await one.updater.offer(0, "snapshot-0")
            await one.until(lambda: one.updater._main.coordinator.phase is Phase.COMMITTING)
            await actor.bus.remove_member("a")
            await one.until(lambda: one.updater.updates["aborted"] > 0)
            assert one.updater.updates["aborted"] == 1
            assert "version 0 is aborted in epoch 1: left, or its heartbeat stopped" in caplog.text
            (commit,) = [span for span in spans.named("weight_update.commit") if span.kind is SpanKind.PRODUCER]
            assert commit.status.status_code is StatusCode.ERROR


def test_a_failed_sequence_shows_why() -> None:
    sequence = replace(make_sequence(make_group(), 0), failure="reward_timeout: killed after 5 s")
    assert a.generated(sequence)[a.ERROR] == "reward_timeout"
