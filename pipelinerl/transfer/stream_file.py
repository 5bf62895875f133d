"""A version's whole stream in a file, from which a receiver takes chunks as from a group."""

from __future__ import annotations

import torch
from torch import Tensor

from pipelinerl.errors import TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.transfer.chunks import checksum, chunk_header, chunk_of
from pipelinerl.transfer.group import HOST
from pipelinerl.transfer.manifest import Manifest


class StreamFile:
    """Gives the chunks of `version` in order, each after its header, as `WeightGroup.broadcast` does. The file at `path` has
    been checked against the trainer's digest and must not change. Raises TransferError if it lacks the manifest's size."""

    placement = HOST

    def __init__(self, path: str, manifest: Manifest, version: PolicyVersion) -> None:
        try:
            self._stream = torch.from_file(path, shared=False, size=manifest.total_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise TransferError(f"{path} does not hold the {manifest.total_bytes} bytes of {version}: {error}") from error
        self._chunks, self._version = iter(manifest.chunks), version
        self._chunk: Tensor | None = None

    def first_chunk(self, content: str) -> int:
        """Return 0, because every chunk is given."""
        return 0

    def broadcast(self, tensor: Tensor, timeout_s: float) -> None:
        """Fill `tensor` with the next header or chunk."""
        if self._chunk is None:
            chunk = next(self._chunks)
            self._chunk = chunk_of(self._stream, chunk)
            tensor.copy_(chunk_header(self._version, chunk, checksum(self._chunk)))
        else:
            tensor.copy_(self._chunk)
            self._chunk = None

    def close(self) -> None:
        """Do nothing: the memory map ends with this object."""
