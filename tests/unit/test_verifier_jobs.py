"""The verifier's queue: bounds, shares, and what happens to items that killed a worker or lost their caller."""

from __future__ import annotations

import asyncio

import pytest

from pipelinerl.v1 import verifier_pb2
from services.verifier.pool import Job, JobQueue, QueueFull


def jobs(count: int) -> list[Job]:
    return [Job(verifier_pb2.VerifyItem(sequence_id=str(index))) for index in range(count)]


def names(taken: list[Job]) -> list[str]:
    return [job.item.sequence_id for job in taken]


async def test_first_in_first_out_in_shares() -> None:
    queue = JobQueue(10)
    queue.put(jobs(7))
    assert names(await queue.take(share_of=2, most=64)) == ["0", "1", "2", "3"]  # half of 7, rounded up
    assert names(await queue.take(share_of=2, most=1)) == ["4"]
    assert names(await queue.take(share_of=2, most=64)) == ["5"]
    assert names(await queue.take(share_of=2, most=64)) == ["6"]
    assert len(queue) == 0


async def test_all_or_nothing_when_full() -> None:
    queue = JobQueue(5)
    queue.put(jobs(3))
    with pytest.raises(QueueFull, match="3 items do not fit: 3 of max_queue = 5 are waiting"):
        queue.put(jobs(3))
    assert len(queue) == 3
    queue.put(jobs(2))


async def test_abandoned_items_make_room() -> None:
    queue, leaving = JobQueue(5), jobs(5)
    queue.put(leaving)
    for job in leaving[1:]:
        job.future.cancel()
    queue.put(jobs(4))
    assert names(await queue.take(share_of=1, most=64)) == ["0", "0", "1", "2", "3"]


async def test_a_taker_waits_and_passes_over_abandoned_items() -> None:
    queue = JobQueue(5)
    taker = asyncio.create_task(queue.take(share_of=1, most=64))
    gone, wanted = jobs(2)
    gone.future.cancel()
    queue.put([gone])
    await asyncio.sleep(0)
    assert not taker.done()
    queue.put([wanted])
    assert names(await asyncio.wait_for(taker, 5)) == ["1"]


async def test_what_is_put_back_comes_first_and_beyond_the_bound() -> None:
    queue = JobQueue(3)
    taken = jobs(2)
    queue.put(jobs(3))
    queue.put_back(taken)
    assert len(queue) == 5
    assert (await queue.take(share_of=1, most=2)) == taken


async def test_resolved_and_queued_items_are_not_put_back() -> None:
    queue = JobQueue(3)
    resolved, queued, lost = jobs(3)
    resolved.resolve(verifier_pb2.VerifyResult(reward=1.0))
    queue.put([queued])
    queue.put_back([resolved, queued, lost])
    assert names(await queue.take(share_of=1, most=64)) == ["2", "1"]


async def test_an_item_that_killed_a_worker_comes_alone() -> None:
    queue = JobQueue(5)
    waiting = jobs(4)
    waiting[1].deaths = 1
    queue.put(waiting)
    chunks = [names(await queue.take(share_of=1, most=64)) for _ in range(3)]
    assert chunks == [["0"], ["1"], ["2", "3"]]


async def test_the_first_result_counts() -> None:
    (job,) = jobs(1)
    job.resolve(verifier_pb2.VerifyResult(reward=1.0))
    job.resolve(verifier_pb2.VerifyResult(reward=2.0))
    assert (await job.future).reward == 1.0
