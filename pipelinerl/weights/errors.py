"""How a weight transfer fails, one class per cause, so that the protocol can tell an eviction from a bug."""

from __future__ import annotations

from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.types import PolicyVersion


class ManifestDiffers(ManifestMismatch):
    """One field of one parameter is not what this side has. `field`: name, shape, dtype or coverage."""

    def __init__(self, parameter: str, field: str, ours: object, theirs: object) -> None:
        self.parameter, self.field, self.ours, self.theirs = parameter, field, ours, theirs
        super().__init__(f"{parameter}: {field} is {theirs!r} in the manifest, {ours!r} here")


class GroupFailed(TransferError):
    """The collective group could not be built, or lost a member. It is unusable from here on."""

    def __init__(self, group: str, problem: str) -> None:
        self.group, self.problem = group, problem
        super().__init__(f"weight group {group}: {problem}" if group else problem)


class DeadlineExceeded(GroupFailed):
    """The group made no progress within the time allowed."""

    def __init__(self, group: str, waiting_for: str, timeout_s: float) -> None:
        self.waiting_for, self.timeout_s = waiting_for, timeout_s
        super().__init__(group, f"{waiting_for} took longer than {timeout_s:.1f} s")


class RanksMissing(DeadlineExceeded):
    """Not everybody came to the meeting. Only rank 0 knows who."""

    def __init__(self, group: str, ranks: tuple[int, ...], world: int, timeout_s: float) -> None:
        self.ranks = ranks
        super().__init__(group, f"the meeting of {world} ranks, of which {list(ranks)} have not come,", timeout_s)


class ChunkCorrupt(TransferError):
    """The bytes of one chunk are not those whose checksum the trainer sent."""

    def __init__(self, version: PolicyVersion, chunk: int, expected: int, actual: int) -> None:
        self.version, self.chunk, self.expected, self.actual = version, chunk, expected, actual
        super().__init__(f"version {version}, chunk {chunk}: checksum {actual:08x}, expected {expected:08x}")


class OutOfStep(TransferError):
    """The chunk that arrived is not the one expected next: another version, another index, another size."""

    def __init__(self, field: str, expected: object, actual: object) -> None:
        self.field, self.expected, self.actual = field, expected, actual
        super().__init__(f"chunk header: {field} is {actual}, expected {expected}")


class TransferAborted(TransferError):
    """This side gave the transfer up on request."""


class NothingStaged(TransferError):
    """A commit named a version that is not the one prepared."""

    def __init__(self, wanted: PolicyVersion, staged: PolicyVersion | None) -> None:
        self.wanted, self.staged = wanted, staged
        super().__init__(f"version {wanted} is to be served, but {staged or 'nothing'} is staged")
