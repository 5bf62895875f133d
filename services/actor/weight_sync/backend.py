"""The weight-transfer backend `pipelinerl`, which vLLM calls in its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.logger import init_logger

from pipelinerl.errors import ManifestMismatch
from pipelinerl.transfer.manifest import Manifest
from services.actor.weight_sync.adapters import AdapterLoader, install
from services.actor.weight_sync.client import WeightLoading, parse_version
from services.actor.weight_sync.loaders import Loader, choose
from services.actor.weight_sync.worker import TransferWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.weight_transfer import WeightTransferConfig

logger = init_logger(f"vllm.{__name__}")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Arguments that `WeightUpdateClient` passes to workers. The actor's process listens on the socket `socket_path`."""

    socket_path: str
    manifest: bytes
    staging_buffers: int
    force_paused: bool


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: str
    """`<incarnation>:<number>` of the staged version to serve."""


class PipelineRLWeightEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._whole: dict[bool, tuple[Loader, str]] = {}
        """By `force_paused`: the newest loader of full weights, and why its mode is not "shadow" (empty if it is)."""
        self._worker: TransferWorker | None = None
        self._places = install(model, vllm_config, device)
        self._base_replaced = False
        """True if a full update has replaced the checkpoint's weights, which are the base of adapters."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Check the manifest and start the `TransferWorker`, which reports a mismatch. Runs between two decode steps."""
        self.shutdown()
        manifest = Manifest.from_bytes(init_info.manifest)
        problem = reason = ""
        if manifest.low_rank:
            loader: Loader = AdapterLoader(self.model, self._places)
        else:
            forced = init_info.force_paused
            if forced not in self._whole:
                self._whole = {forced: choose(self.model, self.vllm_config, self.device, forced)}
            loader, reason = self._whole[forced]
            if loader.mode == "paused":
                logger.warning("weights are loaded while generation is paused: %s", reason)
        try:
            if manifest.low_rank and self._base_replaced:
                raise ManifestMismatch("adapters need the checkpoint's weights, which an update replaced: restart this actor")
            loader.check(manifest)
        except ManifestMismatch as error:
            problem = str(error)
        self._worker = TransferWorker(
            get_world_group().rank_in_group,
            WeightLoading(loader.mode, reason, problem),
            loader,
            manifest,
            init_info.socket_path,
            staging_buffers=init_info.staging_buffers,
            device=self.device,
        )

    def start_weight_update(self) -> None:
        """Do nothing, since the weights are already staged."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replace vLLM's method, which would needlessly wait for the device."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Check that the version to serve is staged. Raises TransferError if it is not."""
        assert self._worker is not None, "init_transfer_engine comes first"
        self._worker.check_staged(parse_version(update_info.version))

    def finish_weight_update(self) -> None:
        """Swap the weights. Generation must be paused."""
        assert self._worker is not None
        self._worker.swap()
        if not isinstance(self._worker.loader, AdapterLoader):
            self._base_replaced = True
            for place in self._places.values():
                place.method.b.zero_()
                place.method.unpack(place.layer)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
