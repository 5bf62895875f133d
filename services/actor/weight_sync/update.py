"""Weight updates of one running AsyncLLM: prepare, join, receive, commit, discard.

`join_group`, `receive` and `discard` go over the workers' socket and never stop decoding; `prepare` (once) and `commit` are
calls that vLLM makes between decode steps. Calls must not overlap, but for `discard`, which may be called while `receive`
waits. Tokens are labelled `<incarnation>:<number>` by vLLM itself, in `outputs[i].weight_versions`.

It does not talk to the trainer, decides nothing, and does not know why a version is served or given up.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pipelinerl.errors import ManifestMismatch, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.service.address import split_host_port
from pipelinerl.transfer.manifest import GroupFailed, Manifest
from services.actor.engine import CommitFailed, StagedWeights, WeightLoading
from services.actor.weight_sync import link as wire
from services.actor.weight_sync.link import Answer, WorkerLink

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 120.0


class WeightUpdateClient:
    """See the module.

    `recompute_kv`: let unfinished sequences recompute their KV cache under new weights (vLLM's `clear_cache`) instead of
    keeping the stale one. `stall_timeout_s`: the longest that one chunk may take; it bounds `discard`. `bind_host`: this
    pod's address on which other ranks reach it (gloo). `force_paused`: load while paused, for comparison.
    `staging_buffers`: chunks that a worker holds at a time while it receives.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        *,
        recompute_kv: bool = False,
        stall_timeout_s: float = 10.0,
        bind_host: str | None = None,
        force_paused: bool = False,
        staging_buffers: int = 2,
    ) -> None:
        self._llm, self._recompute_kv = llm, recompute_kv
        self._stall_timeout_s, self._bind_host, self._force_paused = stall_timeout_s, bind_host, force_paused
        self._staging_buffers = staging_buffers
        self._link: WorkerLink | None = None

    async def label(self, version: PolicyVersion) -> None:
        """Say which version the weights loaded at start are. Only while nothing is generated."""
        await self._llm.update_weight_version(str(version))

    async def prepare(self, manifest: Manifest) -> WeightLoading:
        """Agree on what will be received. Blocks decoding for the building of the shadow model, the first time.

        Raises ManifestMismatch when the served model cannot take these parameters; nothing has moved then.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.close()
        link = await WorkerLink.listen(self._llm.vllm_config.parallel_config.world_size)
        init_info = {
            "socket_path": link.path,
            "manifest": manifest.to_json(),
            "stall_timeout_s": self._stall_timeout_s,
            "staging_buffers": self._staging_buffers,
            "force_paused": self._force_paused,
        }
        try:
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
            hellos = await link.hellos(PREPARE_TIMEOUT_S)
        except BaseException:
            await link.close()
            raise
        if problem := next((hello.problem for hello in hellos if hello.problem), ""):
            await link.close()
            raise ManifestMismatch(problem)
        self._link = link
        return WeightLoading(hellos[0].mode, hellos[0].reason)

    async def join_group(
        self, *, store_address: str, epoch: int, first_rank: int, world_size: int, backend: str, deadline_s: float
    ) -> None:
        """Meet the trainer and the other actors; leaves the group of the epoch before. Raises TransferError."""
        host, port = split_host_port(store_address)
        order = wire.Join(
            host=host,
            port=port,
            name=f"epoch-{epoch}",
            first_rank=first_rank,
            world=world_size,
            backend=backend,
            bind_host=self._bind_host,
            timeout_s=deadline_s,
        )
        _raise_failures(await self._connected().ask(order))

    async def receive(self, version: PolicyVersion, deadline_s: float) -> StagedWeights:
        """Receive `version` beside the live weights and prepare it. Decoding goes on.

        Raises TransferError; the group is then left and nothing is staged. If this call is cancelled, call `discard`.
        """
        order = wire.Receive(version.incarnation, version.number, deadline_s)
        answers = _raise_failures(await self._connected().ask(order))
        received = [answer for answer in answers if isinstance(answer, wire.Received)]
        checksums = {answer.checksum for answer in received}
        if len(checksums) != 1:
            raise TransferError(f"ranks of one engine staged different bytes of version {version}: {sorted(checksums)}")
        return StagedWeights(
            checksum=received[0].checksum,
            num_bytes=received[0].num_bytes,
            receive_s=max(answer.receive_s for answer in received),
            prepare_s=max(answer.prepare_s for answer in received),
        )

    async def commit(self, version: PolicyVersion) -> float:
        """Serve the staged version: pause between two decode steps, swap, resume. Unfinished sequences go on.

        Returns the stall: seconds from the engine's report that it is idle to its report that it is resumed.
        Raises TransferError when `version` is not staged (the old weights are served on), CommitFailed when the engine
        broke in between.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._pause()
        started = time.monotonic()
        try:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"version": str(version)}))
        except Exception as error:  # vLLM reports a worker's exception as a bare Exception
            await self._llm.resume_generation()
            raise TransferError(f"version {version} cannot be committed: {error}") from error
        try:
            await self._llm.finish_weight_update(weight_version=str(version))
            await self._llm.resume_generation()
        except Exception as error:
            raise CommitFailed(f"the swap to version {version} failed: {error}") from error
        return time.monotonic() - started

    async def discard(self) -> None:
        """Give up what is being received or staged. Returns when the workers have, within the stall timeout."""
        if self._link is not None:
            _raise_failures(await self._link.ask(wire.Discard()))

    async def close(self) -> None:
        """Leave the group and end the workers' transfer threads; a staged version is lost."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _pause(self) -> None:
        """Returns when the decode step under way has ended; new and unfinished requests wait.

        Not `AsyncLLM.pause_generation`: that adds a sleep of 20 ms, for the order in which a caller sees outputs.
        """
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._recompute_kv)

    def _connected(self) -> WorkerLink:
        if self._link is None:
            raise TransferError("no manifest is prepared")
        return self._link


def _raise_failures(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        if isinstance(answer, wire.Failed):
            if answer.group_broke:
                raise GroupFailed("", answer.problem)
            raise TransferError(f"{answer.kind}: {answer.problem}")
    return answers
