"""Where chunks live and in which order a device works on them: host memory (Gloo), or a device and a stream of its own (NCCL).

Nothing of `torch.cuda` is touched for host memory. It does not say what is copied, sent or computed there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Placement:
    """`stream`: a torch.cuda.Stream; None in host memory."""

    device: torch.device
    stream: Any = None

    def scope(self) -> AbstractContextManager[Any]:
        """What this thread does within is queued on the stream. Memory allocated within is reused in the stream's order."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """As `scope`, and in order with the caller's stream: after what is queued there, before what will be.

        By events on the device. The host does not wait, and neither do other streams.
        """
        if self.stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(callers)
        with torch.cuda.stream(self.stream):
            yield
        callers.wait_stream(self.stream)

    def settle(self) -> None:
        """Returns when the device has done what this thread has queued so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def another(self) -> Placement:
        """The same place with a stream of its own, which nothing queued on this one holds up."""
        return self if self.stream is None else on_device(self.device)


HOST = Placement(torch.device("cpu"))


def on_device(device: torch.device) -> Placement:
    """On a CUDA device, with a new stream."""
    return Placement(device, torch.cuda.Stream(device))


def beside_model(device: torch.device) -> Placement:
    """Where tensors for a model on `device` are prepared: on a stream of their own where it has streams."""
    return on_device(device) if device.type == "cuda" else HOST
