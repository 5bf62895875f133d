"""The transfer thread of one vLLM worker: takes orders from the actor's process, receives, prepares, reports.

Consumes Requests from the Unix socket (`_read` thread) and performs Join and Receive one after another on the transfer
thread, so that decode steps on the main thread go on. Discard sets a flag that the transfer thread sees within the stall
timeout. A closed socket ends both threads. The swap itself is called by vLLM, on the main thread, while it is paused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time

import torch

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.group import HOST, Backend, GroupSpec, WeightGroup, beside_model
from pipelinerl.transfer.manifest import GroupFailed, Manifest, NothingStaged, TransferAborted
from services.actor.weight_sync import link as wire
from services.actor.weight_sync.loaders import Loader
from services.actor.weight_sync.staging import Receiver, StagingMemory

log = logging.getLogger(__name__)

MAX_WAITING_REQUESTS = 16
RELEASE = "release"


class TransferWorker:
    """`stall_timeout_s`: the longest that one chunk may take; it also bounds a discard. `device`: the model's.

    `staging_buffers`: chunks held at a time, the one being loaded included.
    """

    def __init__(
        self,
        hello: wire.Hello,
        loader: Loader,
        manifest: Manifest,
        socket_path: str,
        *,
        stall_timeout_s: float,
        staging_buffers: int = 2,
        device: torch.device = HOST.device,
    ) -> None:
        self._rank, self._loader, self._manifest = hello.worker_rank, loader, manifest
        self._stall_timeout_s, self._staging_buffers = stall_timeout_s, staging_buffers
        self._memory = StagingMemory(staging_buffers)
        self._placement = beside_model(device)
        self._group: WeightGroup | None = None
        self._staged: PolicyVersion | None = None
        self._to_swap: PolicyVersion | None = None
        self._loading = threading.Lock()  # held while the loader is in use
        self._aborted = threading.Event()
        self._discards = 0  # heard and not yet performed
        self._closed = False
        self._discarding = threading.Lock()
        self._requests: queue.Queue[wire.Request | str | None] = queue.Queue(MAX_WAITING_REQUESTS)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(socket_path)
        self._send_lock = threading.Lock()
        self._send(wire.encode(hello))
        for target in (self._read, self._work):
            threading.Thread(target=target, name=f"weights-{target.__name__}", daemon=True).start()

    # --- called by vLLM on the worker's main thread ----------------------------------------------------------------

    def check_staged(self, version: PolicyVersion) -> None:
        """Raises NothingStaged when `version` is not the one that waits to be served."""
        self._to_swap = version
        if self._staged != version:
            raise NothingStaged(version, self._staged)

    def swap(self) -> None:
        """Serve the version that was checked. Raises NothingStaged when it has been discarded since."""
        with self._loading:
            self._placement.settle()  # nothing that is queued may still read the old weights
            assert self._to_swap is not None, "check_staged comes first"
            if self._staged != self._to_swap:
                raise NothingStaged(self._to_swap, self._staged)
            self._loader.swap()
            self._placement.settle()
            self._staged = None
        # Freeing the old weights takes time that the pause does not have to wait for.
        with contextlib.suppress(queue.Full):
            self._requests.put_nowait(RELEASE)

    def close(self) -> None:
        """End both threads. Returns at once; a transfer under way ends within the stall timeout."""
        self._abort_for_good()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # --- threads ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    request = wire.decode_request(line)
                    if isinstance(request.body, wire.Discard):
                        self._abort_until_discarded()
                    self._requests.put(request)
        except (OSError, ValueError) as error:
            log.info("the actor's connection ended: %s", error)
        self._abort_for_good()
        self._requests.put(None)

    def _work(self) -> None:
        _be_one_thread()
        while (request := self._requests.get()) is not None:
            if isinstance(request, str):
                self._release()
                continue
            self._send(wire.encode(wire.Reply(request.number, self._answer(request.body))))
        self._leave()
        self.close()  # the actor's process must not wait for answers that nobody gives

    def _answer(self, order: wire.Join | wire.Receive | wire.Discard) -> wire.Done | wire.Received | wire.Failed:
        try:
            return self._perform(order)
        except TransferError as error:
            return wire.Failed(type(error).__name__, str(error), isinstance(error, GroupFailed | TransferAborted))
        except Exception as error:
            log.exception("weight transfer failed")
            return wire.Failed(type(error).__name__, str(error))

    def _perform(self, body: wire.Join | wire.Receive | wire.Discard) -> wire.Done | wire.Received:
        match body:
            case wire.Join():
                return self._join(body)
            case wire.Receive():
                return self._receive(body)
            case wire.Discard():
                return self._discard()

    def _join(self, order: wire.Join) -> wire.Done:
        self._leave()
        rank = order.first_rank + self._rank
        backend: Backend = "nccl" if order.backend == "nccl" else "gloo"
        if backend == "nccl" and self._placement is HOST:
            raise TransferError("weights.backend is nccl, but this engine is on CPU: set weights.backend: gloo")
        spec = GroupSpec(order.host, order.port, order.name, rank, order.world, backend, order.bind_host)
        placement = self._placement if backend == "nccl" else HOST
        self._group = WeightGroup.connect(spec, order.timeout_s, self._aborted, placement)
        return wire.Done()

    def _receive(self, order: wire.Receive) -> wire.Received:
        if self._group is None:
            raise TransferError("no transfer group is joined")
        version = PolicyVersion(order.incarnation, order.number)
        receiver = Receiver(
            self._group,
            self._manifest,
            version,
            timeout_s=order.timeout_s,
            stall_timeout_s=self._stall_timeout_s,
            aborted=self._aborted,
            buffers=self._staging_buffers,
            memory=self._memory,
        )
        started = time.monotonic()
        try:
            with contextlib.closing(receiver), self._loading, self._placement.scope():
                self._staged = None
                self._loader.load(receiver.tensors())
                self._placement.settle()
                self._staged = version
        except BaseException:
            self._leave()
            raise
        receipt = receiver.receipt
        prepare_s = time.monotonic() - started - receipt.waited_s
        return wire.Received(receipt.checksum, receipt.num_bytes, receipt.receive_s, prepare_s)

    def _discard(self) -> wire.Done:
        with self._loading:
            self._staged = None
            self._loader.drop()
        with self._discarding:
            self._discards -= 1
            if not self._discards and not self._closed:
                self._aborted.clear()
        return wire.Done()

    def _abort_until_discarded(self) -> None:
        with self._discarding:
            self._discards += 1
            self._aborted.set()

    def _abort_for_good(self) -> None:
        with self._discarding:
            self._closed = True
            self._aborted.set()

    def _release(self) -> None:
        with self._loading:
            if self._staged is None:
                self._loader.drop()

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send(self, line: bytes) -> None:
        with self._send_lock, contextlib.suppress(OSError):
            self._socket.sendall(line)


def _be_one_thread() -> None:
    """Prepare weights on one core, whichever is free.

    vLLM binds its decoding threads to cores, and this thread inherits that binding. A team of OpenMP threads here beside
    decode's own would have both wait for each other at every barrier: 7.5 s instead of 1.6 to 3.7 s for 135M parameters
    on two busy cores. vLLM replaces `torch.set_num_threads` on CPU; with OpenMP the number is the calling thread's own.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch._C.set_num_threads(1)
