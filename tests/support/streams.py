"""Streams without a device: they run nothing later, and find out who touches memory without waiting for who wrote it.

Work is done on the host at once; the streams keep vector clocks. Stream and host each know how far every stream is known to
have come: an operation on a stream knows what the host knew when it was queued, and what the stream has waited for. One that
touches memory without knowing of all writes to it, or writes it without knowing of all reads, is a race.
Not modelled: memory that is freed, and different threads of the host, which know what any of them does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelinerl.transfer.group import Placement


class Stream:
    """As a torch.cuda.Stream."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.known: dict[Stream, int] = defaultdict(int)

    def wait_stream(self, other: Stream) -> None:
        join(self.known, other.known)

    def synchronize(self) -> None:
        join(self.device.host, self.known)

    def __repr__(self) -> str:
        return self.name


def join(known: dict[Stream, int], more: dict[Stream, int]) -> None:
    for stream, ticks in more.items():
        known[stream] = max(known[stream], ticks)


class Device(TorchDispatchMode):
    """`races`: what was found. `placement`: a new stream of it. While a thread is in a stream's scope, its operations count."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[Stream, int] = defaultdict(int)
        self.races: list[str] = []
        self._thread, self._lock = threading.local(), threading.RLock()
        self._touched: dict[int, list[tuple[Stream, int, bool]]] = defaultdict(list)
        self._kept: list[Tensor] = []  # so that no address comes twice
        self.default = Stream(self, "default")

    def placement(self, name: str) -> Placement:
        return Placement(torch.device("cpu"), Stream(self, name))

    def current(self, device: Any = None) -> Stream:
        return getattr(self._thread, "stream", self.default)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._thread.stream = self.current(), stream
        counted = getattr(self._thread, "counted", False)
        self._thread.counted = True
        try:
            with nullcontext() if counted else self:
                yield
        finally:
            self._thread.stream, self._thread.counted = before, counted

    def touch(self, tensor: Tensor, write: bool, what: str) -> None:
        with self._lock:
            stream = self.current()
            join(stream.known, self.host)
            stream.known[stream] += 1
            self._kept.append(tensor)
            touched = self._touched[tensor.untyped_storage().data_ptr()]
            for other, ticks, wrote in touched:
                if (write or wrote) and stream.known[other] < ticks:
                    self.races.append(f"{what} on {stream} does not wait for {other}")
            touched.append((stream, stream.known[stream], write))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned, given = func._schema.returns, zip(func._schema.arguments, args, strict=False)
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
        for argument, value in given if not is_view else ():
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor) and tensor.numel():
                    writes = argument.alias_info is not None and argument.alias_info.is_write
                    self.touch(tensor, writes, str(func))
        result = func(*args, **kwargs)
        for tensor in () if is_view else tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.numel():
                self.touch(tensor, True, str(func))
        return result


def device_without_hardware(patch: pytest.MonkeyPatch) -> Device:
    device = Device()
    patch.setattr(torch.cuda, "current_stream", device.current)
    patch.setattr(torch.cuda, "stream", device.on)
    return device
