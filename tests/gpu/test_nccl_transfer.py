"""Weights from device to device by NCCL, with ranks as processes, and what happens when one of them dies."""

from __future__ import annotations

import pytest
from torch.distributed import TCPStore

from pipelinerl.service.settings import split_host_port
from tests.gpu import ranks
from tests.gpu.ranks import STALL_TIMEOUT_S, heard, rank

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_snapshot_arrives_on_the_other_device_with_the_senders_checksum(two_ranks) -> None:
    first, second = two_ranks
    with rank(ranks.trainer, first, ["epoch-1", "epoch-2"]) as (_, trainer):
        store = heard(trainer)
        for epoch in ("epoch-1", "epoch-2"):
            with rank(ranks.actor, second, store, epoch) as (_, actor):
                assert heard(actor) == heard(trainer)


def test_killed_peer_ends_a_broadcast_and_the_next_group_works(two_ranks) -> None:
    first, second = two_ranks
    with rank(ranks.trainer, first, ["epoch-1", "epoch-2"]) as (_, trainer):
        store = heard(trainer)
        with rank(ranks.halting_actor, second, store, "epoch-1") as (process, halting):
            assert heard(halting) == "halted"
            process.kill()
            assert heard(trainer, 4 * STALL_TIMEOUT_S) in ("GroupFailed", "DeadlineExceeded")
        with rank(ranks.actor, second, store, "epoch-2") as (_, actor):
            assert heard(actor) == heard(trainer)


def test_rank_that_dies_between_checking_in_and_connecting_is_waited_for_no_longer_than_the_deadline(two_ranks) -> None:
    first, second = two_ranks
    with rank(ranks.trainer, first, ["epoch-1", "epoch-2"]) as (_, trainer):
        store = heard(trainer)
        TCPStore("127.0.0.1", split_host_port(store)[1], is_master=False).set("epoch-1/here/1", '["", 0]')
        assert heard(trainer, 3 * ranks.MEET_WITHIN_S) in ("GroupFailed", "DeadlineExceeded")
        with rank(ranks.actor, second, store, "epoch-2") as (_, actor):
            assert heard(actor) == heard(trainer)


def test_giving_up_ends_a_receive_at_once(two_ranks) -> None:
    first, second = two_ranks
    with (
        rank(ranks.silent_trainer, first, "epoch-1") as (_, trainer),
        rank(ranks.waiting_actor, second, heard(trainer), "epoch-1") as (_, actor),
    ):
        assert (heard(trainer), heard(actor)) == ("connected", "waiting")
        actor.send("give up")
        assert heard(actor, 30) == "TransferAborted"
