"""Actors stopped, killed and cut off in the middle of their work: real processes and a real nats-server, a light engine."""

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import yaml

from pipelinerl.bus.protocol import StreamLimits, group_id_of
from pipelinerl.messages.sequences import Sequence, VersionSpan, decode_sequence
from tests.support.actor_stage import PROMPT, RUN, SOON_S, ActorStage, LightActor, actor_stage
from tests.support.local_run import until

H = 2
BUFFER, BATCH, WORKERS = 2, 1, 4
MOST_UNSTORED = H + BUFFER + BATCH * WORKERS
"""Sequences that an actor finishes at most before one of them is stored."""


def stage(folder: Path, limits: StreamLimits | None = None, in_progress: int = H) -> AbstractAsyncContextManager[ActorStage]:
    recipe = folder / "recipe.yaml"
    sizes = {"sequences_in_progress": in_progress, "publish_buffer": BUFFER, "verify_batch": BATCH}
    content: dict[str, Any] = {
        "name": "light",
        "model": {"source": "path", "name": "nowhere", "max_context": 4096},
        "task": {"name": "chain_sum"},
        "actor": sizes,
    }
    recipe.write_text(yaml.safe_dump(content))
    return actor_stage(folder, recipe, limits)


def check_tokens(sequence: Sequence, max_tokens: int) -> None:
    """Each token is the one of its place, with the log-probability of the version that its span names."""
    assert not sequence.failure
    assert sequence.completion_token_ids.tolist() == list(range(len(PROMPT), len(PROMPT) + max_tokens))
    expected = [-float(span.version) for span in sequence.spans for _ in range(span.start, span.end)]
    assert sequence.behaviour_logprobs.tolist() == expected


async def everything(one: ActorStage, count: int) -> list[Sequence]:
    """`count` different sequences, purging behind the reader, as a trainer does; and no repeated one in the log."""
    found: dict[str, Sequence] = {}
    async with asyncio.timeout(SOON_S), one.bus.read_sequences(1) as entries:
        while len(found) < count:
            entry = await anext(entries)
            sequence = decode_sequence(entry.payload, expected_run=RUN)
            assert sequence.sequence_id not in found
            found[sequence.sequence_id] = sequence
            await one.bus.purge_sequences(entry.position + 1)
    return list(found.values())


async def finished(actor: LightActor) -> int:
    reasons = ("length", "stop")
    counts = [await asyncio.to_thread(actor.metric, "sequences_finished_total", f'{{reason="{r}"}}') for r in reasons]
    return int(sum(counts))


async def stands_still(one: ActorStage, actor: LightActor, least: int) -> int:
    """Sequences that it has finished, once that number does not grow any more."""
    last = -1

    async def same_again() -> bool:
        nonlocal last
        before, last = last, await finished(actor)
        await asyncio.sleep(0.3)  # nothing to await: the actor does not say that it does nothing
        return last == before and last >= least

    await one.until(same_again)
    return last


async def test_a_terminated_actors_sequences_are_continued_by_another(tmp_path: Path) -> None:
    async with stage(tmp_path, in_progress=8) as one:
        await one.issue(0, 1, max_tokens=200)
        first = await one.start("first", version=1, token_s=0.01, stop_at_tokens=20)
        assert await first.exit_code() == 0
        assert (await one.bus.sequences_info()).messages == 0
        pending = await one.bus.pending_prompts()
        assert sorted(map(group_id_of, pending)) == ["g00000000", "g00000001"]
        assert all("/first-" in msg_id for msg_id in pending)

        second = await one.start("second", version=2)
        sequences = await one.stored(8)
        await one.all_acknowledged()
        for sequence in sequences:
            check_tokens(sequence, 200)
            begun, rest = sequence.spans
            assert (begun.version, rest.version, sequence.actor) == (1, 2, "second")
            assert begun.end > 0
        assert max(sequence.spans[0].end for sequence in sequences) >= 20  # the longest ended the first actor
        carried = sum(sequence.spans[0].end for sequence in sequences)
        assert await asyncio.to_thread(second.metric, "carried_tokens_total") == carried
        assert await asyncio.to_thread(second.metric, "generated_tokens_total") == 8 * 200 - carried


async def test_a_killed_actors_group_is_done_by_another_and_stored_once(tmp_path: Path) -> None:
    limits = StreamLimits(ack_wait_s=1.0)
    async with stage(tmp_path, limits) as one:
        await one.issue(0, num_samples=12, max_tokens=200)
        first = await one.start("first", version=1, token_s=0.005)
        await one.stored(H)
        first.signal(signal.SIGKILL)
        assert await first.exit_code() == -signal.SIGKILL
        assert list(await one.bus.pending_prompts()) == ["g00000000"]
        await one.start("second", version=2)
        await one.all_acknowledged()
        sequences = await one.stored(12)
        assert (await one.bus.sequences_info()).messages == 12
        assert sorted(sequence.sample_index for sequence in sequences) == list(range(12))
        for sequence in sequences:
            check_tokens(sequence, 200)
            assert sequence.spans in ((VersionSpan(1, 0, 200),), (VersionSpan(2, 0, 200),))
        assert {sequence.actor for sequence in sequences} == {"first", "second"}


async def test_a_full_log_pauses_an_actor_which_hands_over_what_it_holds_and_purging_lets_the_next_go_on(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path, StreamLimits(sequences_max_messages=3, ack_wait_s=1.0)) as one:
        await one.issue(*range(10), num_samples=2, max_tokens=5)
        first = await one.start("first", version=1)
        await until(first.address_file.exists)
        held = await stands_still(one, first, least=3 + 1)
        assert held <= 3 + MOST_UNSTORED
        assert (await one.bus.sequences_info()).messages == 3
        first.signal(signal.SIGTERM)
        assert await first.exit_code() == 0
        second = await one.start("second", version=2)
        sequences = await everything(one, 20)
        await one.all_acknowledged()
        for sequence in sequences:
            check_tokens(sequence, 5)
        by_first = [sequence for sequence in sequences if sequence.spans[0].version == 1]
        assert len(by_first) >= held, "nothing that it had finished was generated again"
        assert await asyncio.to_thread(second.metric, "generated_tokens_total") == 5 * (20 - len(by_first))


async def test_a_restarted_nats_server_costs_no_sequence(tmp_path: Path) -> None:
    async with stage(tmp_path, StreamLimits(ack_wait_s=2.0), in_progress=8) as one:
        await one.issue(*range(40), num_samples=4, max_tokens=100)
        for name in ("first", "second"):
            await one.start(name, version=1, token_s=0.002)
        await one.stored(10)
        one.server.port = int(one.server.url.rsplit(":", 1)[1])
        await asyncio.to_thread(one.server.stop)
        await asyncio.sleep(2.0)  # for which it is away
        one.server.start()

        async def connected() -> bool:
            return one.bus.connection.is_connected

        await one.until(connected)
        sequences = await everything(one, 160)
        await one.all_acknowledged()
        for sequence in sequences:
            check_tokens(sequence, 100)
