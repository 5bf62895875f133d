"""A trainer's updater with members as processes: real NATS, control channel and Gloo groups; only the engines are absent.

The stage keeps what every test checks at its end: which bytes belong to which version, and all that was said on the
control channel, in order.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.light_members import LightMember, weights_checksum
from benchmarks.light_stage import LightStage, Settings, light_stage
from pipelinerl.bus.protocol import EVERY_ACTOR
from pipelinerl.messages.control import decode_control
from pipelinerl.v1.control_pb2 import Commit, EpochStart, Serving, Staged
from services.trainer.weight_sync.membership import MemberChange

SETTINGS = Settings(member_ttl_s=1.5, deadline_s=3.0, stall_timeout_s=2.0)
HEARD = {"epoch": EpochStart, "staged": Staged, "commit": Commit, "serving": Serving}


@dataclass
class FaultStage(LightStage):
    checksums: dict[int, int] = field(default_factory=dict)

    @property
    def messages(self) -> list[object]:
        return [decode_control(said.payload, HEARD[said.kind]) for said in self.said]

    async def offer(self, version: int) -> None:
        self.checksums[version] = weights_checksum(weights_of(version))
        await super().offer(version)

    async def all_on(self, version: int, members: list[LightMember]) -> None:
        """After any faults: each of these comes to serve exactly the bytes of `version`."""
        await asyncio.gather(*(member.until_serving(version) for member in members))
        for member in members:
            assert (member.version, member.served[-1].checksum) == (version, self.checksums[version])

    def check(self) -> None:
        """The invariants of docs/weight-updates.md over all that has happened."""
        for member in self.members:
            versions = [report.number for report in member.served]
            assert versions == sorted(versions), f"{member.name} went back: {versions}"
            for report in member.served:
                assert report.checksum == self.checksums[report.number], f"{member.name} served other bytes"
        assert self.said or not self.history.records, "nothing was heard of what was served"
        check_order(self.messages, self.history.changes)


def check_order(messages: list[object], changes: list[MemberChange]) -> None:
    """A commit comes after all members of its epoch that did not leave have staged, and before anyone serves."""
    epochs: dict[int, set[str]] = {}
    left = {(change.member.actor, change.epoch) for change in changes if change.kind == "left"}
    committed: set[tuple[int, int]] = set()
    staged: set[tuple[str, int, int]] = set()
    for message in messages:
        match message:
            case EpochStart():
                epochs[message.epoch] = {member.actor for member in message.members}
            case Staged():
                staged.add((message.actor, message.epoch, message.version))
            case Commit():
                committed.add((message.epoch, message.version))
                members = {actor for actor in epochs[message.epoch] if (actor, message.epoch) not in left}
                missing = {actor for actor in members if (actor, message.epoch, message.version) not in staged}
                assert not missing, f"{message} before {missing} had staged it"
            case Serving() if message.epoch:  # else of a reader of the weight log
                assert (message.epoch, message.version) in committed


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """About 1 MB that no two versions share."""
    generator = torch.Generator().manual_seed(version)
    return {f"w{index}": torch.randn(200, 160, generator=generator) for index in range(8)}


@asynccontextmanager
async def fault_stage(folder: Path, *, host: str = "127.0.0.1", settings: Settings = SETTINGS) -> AsyncIterator[FaultStage]:
    """Ends with a check of the invariants, where the test got so far."""
    async with light_stage(
        folder, settings, weights_of, FaultStage, heard=tuple(HEARD), actor=EVERY_ACTOR, host=host, request_timeout_s=2.0
    ) as stage:
        yield stage
        stage.check()
