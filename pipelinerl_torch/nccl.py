"""NCCL under a weight group: broadcasts that end, whatever a peer does, and a process that outlives them.

What torch's ProcessGroupNCCL does by itself does not suit a group whose members may die:

- its watchdog thread answers an error or a timeout by ending the process. With blocking wait there is no watchdog, and waiting
  is ours; that setting is read from the environment when a group is made, so it stands there only meanwhile;
- making a communicator blocks for as long as a peer is missing. A non-blocking communicator is polled instead, up to
  TORCH_NCCL_NONBLOCKING_TIMEOUT, which torch reads once in a process;
- a broadcast whose communicator is aborted looks complete. Therefore an abort is remembered here, and is what the waiting
  thread raises.

A peer that dies is noticed through NCCL's own error where the bytes go over the network; over shared memory or NVLink it is
not, and the deadline ends the wait. It does not meet anybody: all ranks have checked in before (`group.py`).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore

from pipelinerl.weights.errors import TransferAborted
from pipelinerl_torch.placement import Placement

log = logging.getLogger(__name__)

ABORT_WITHIN_S = 5.0
"""How long closing waits for NCCL to let go. What it holds after that is left to it."""
_LOOK_S = 0.0001
_making = threading.Lock()


class NcclTransport:
    """One communicator. Use `broadcast` from one thread at a time; `close` from any."""

    def __init__(
        self,
        store: PrefixStore,
        rank: int,
        world: int,
        timeout_s: float,
        placement: Placement,
        given_up: threading.Event,
    ) -> None:
        """Connects: a first broadcast makes the communicator. Raises RuntimeError, TimeoutError or TransferAborted."""
        from torch.distributed import ProcessGroupNCCL  # absent from CPU builds

        self._placement, self._given_up = placement, given_up
        self._closed = threading.Event()
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.config.blocking = 0
        with _without_watchdog(timeout_s):
            self._group: Any = ProcessGroupNCCL(store, rank, world, options)
        try:
            with placement.scope():
                greeting = torch.zeros(1, dtype=torch.int64, device=placement.device)
            self.broadcast(greeting, timeout_s)
        except BaseException:
            self.close()
            raise

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Returns when the device has sent or filled `tensor`.

        Raises TimeoutError, TransferAborted when it was given up or closed meanwhile, RuntimeError for NCCL's own errors.
        """
        deadline = time.monotonic() + timeout_s
        options = BroadcastOptions()
        options.rootRank = 0
        with self._placement.scope():
            work = self._group.broadcast([tensor], options)
            while not work.is_completed():
                self._check_wanted()
                if time.monotonic() >= deadline:
                    raise TimeoutError
                time.sleep(_LOOK_S)
            self._check_wanted()
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))  # raises what went wrong; does not wait any more

    def close(self) -> None:
        """Abort: an operation under way on another thread ends there. Idempotent; bounded by `ABORT_WITHIN_S`."""
        if self._closed.is_set():
            return
        self._closed.set()
        # On a thread, since torch waits for NCCL without a limit of its own.
        aborting = threading.Thread(target=_abort, args=(self._group,), name="nccl-abort", daemon=True)
        aborting.start()
        aborting.join(ABORT_WITHIN_S)
        if aborting.is_alive():
            log.error("NCCL does not end a communicator within %g s; it is left behind", ABORT_WITHIN_S)

    def _check_wanted(self) -> None:
        if self._closed.is_set() or self._given_up.is_set():
            raise TransferAborted("the broadcast was given up")


def _abort(group: Any) -> None:
    try:
        group.abort()
    except RuntimeError as error:
        log.warning("a communicator ended with an error: %s", str(error).splitlines()[0])


@contextmanager
def _without_watchdog(timeout_s: float) -> Iterator[None]:
    """The environment for making a group whose errors and timeouts are for its user, not for torch, to act on."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    with _making:
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout_s)))
        before = os.environ.get(name)
        os.environ[name] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
