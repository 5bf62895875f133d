"""How a weight group drives torch's NCCL group. NCCL itself needs a GPU (tests/gpu): here a stand-in answers."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed import PrefixStore

from pipelinerl.errors import TransferError
from pipelinerl.transfer.group import GroupStore, WeightGroup
from pipelinerl.transfer.manifest import DeadlineExceeded, GroupFailed, GroupSpec, TransferAborted

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class FakeNccl:
    """Completes what it is told to, as torch does: an aborted broadcast looks complete, too."""

    made: list[FakeNccl]
    completes = True
    fails = ""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, store: PrefixStore, rank: int, world: int, options: Any) -> None:
        self.options, self.environment = options, os.environ.get(BLOCKING_WAIT)
        self.aborted, self.asked, self.looks = threading.Event(), threading.Event(), 0
        self.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeNccl:
        return self

    def is_completed(self) -> bool:
        self.asked.set()
        self.looks += 1
        return self.completes or self.aborted.is_set()

    def wait(self, timeout: Any) -> None:
        if self.fails:
            raise RuntimeError(self.fails)

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    class Fake(FakeNccl):
        made: list[FakeNccl] = []  # noqa: RUF012 - of one test

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Fake, raising=False)
    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "60")
    return Fake


def alone(store: GroupStore, given_up: threading.Event | None = None, timeout_s: float = 30.0) -> WeightGroup:
    return WeightGroup.connect(GroupSpec(store.own_address, "epoch-1", 0, 1, "nccl"), timeout_s, given_up)


def test_group_has_no_watchdog_and_the_environment_is_as_before(nccl) -> None:
    alone(GroupStore()).close()
    [group] = nccl.made
    assert (group.environment, os.environ.get(BLOCKING_WAIT)) == ("1", None)
    assert group.options.config.blocking == 0
    assert group.aborted.is_set()


def test_silent_peer_ends_at_the_deadline_and_is_looked_at_rarely(nccl) -> None:
    group = alone(GroupStore())
    nccl.completes, nccl.made[0].looks = False, 0
    with pytest.raises(DeadlineExceeded):
        group.broadcast(torch.zeros(1), 0.2)
    assert nccl.made[0].aborted.is_set(), "its kernel ended before the memory can go to somebody else"
    # 9 in the first 0.8 ms, then each an eighth later than the one before up to 40 ms, then one in 5 ms
    assert nccl.made[0].looks <= 9 + 34 + 32
    group.close()


def test_peer_that_never_connects_ends_the_meeting_and_nothing_is_left(nccl) -> None:
    nccl.completes = False
    with pytest.raises(DeadlineExceeded):
        alone(GroupStore(), timeout_s=3.0)  # a third of it is for the store
    assert nccl.made[0].aborted.wait(60)


def test_error_of_nccl_fails_the_group(nccl) -> None:
    group = alone(GroupStore())
    nccl.fails = "NCCL error: remote process exited\nmore"
    with pytest.raises(GroupFailed, match=r"remote process exited$"):
        group.broadcast(torch.zeros(1), 30)


@pytest.mark.parametrize("how", ["close", "give up"])
def test_broadcast_under_way_is_given_up_at_once_and_never_counts_as_done(nccl, how) -> None:
    given_up, errors = threading.Event(), []
    group = alone(GroupStore(), given_up)
    nccl.completes = False
    nccl.made[0].asked.clear()

    def broadcast() -> None:
        try:
            group.broadcast(torch.zeros(1), 600)
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=broadcast, daemon=True)
    thread.start()
    assert nccl.made[0].asked.wait(60)
    group.close() if how == "close" else given_up.set()
    thread.join(30)
    assert [type(error) for error in errors] == [TransferAborted]
    group.close()
