"""What a step needs and takes of its device: model FLOPs, the device's peak, the most memory.

Not here: time by phase (`phases.py`); the figures made of all this (`services/trainer/report/throughput.py`).
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pipelinerl.algorithms.step_cost import CostModel
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.devices import peak_flops
from services.trainer.learn.flops import frozen_flops, model_flops, training_flops
from services.trainer.learn.lora import has_adapters

PROCESS_STATUS = Path("/proc/self/status")


class StepMeter:
    """Of one model on one device."""

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> None:
        """`compute_dtype`: of the matrix products, where it is not that of the weights."""
        self._device: torch.device = model.device
        self.cost_model = _cost_model(model)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        self.peak_flops = peak_flops(name, str(compute_dtype or model.dtype).removeprefix("torch."))
        """Of the device, FLOP/s; None where it is not known, as of a CPU."""

    def step_flops(self, groups: Sequence[TrainingGroup]) -> float:
        """Model FLOPs of one step on `groups`."""
        sequences = [sequence for group in groups for sequence in group.sequences]
        return training_flops(
            self.cost_model,
            [sequence.num_tokens for sequence in sequences],
            [sequence.num_completion_tokens for sequence in sequences],
        )

    def take_memory_peak(self) -> int:
        """Bytes. On a GPU, the most that tensors held since this was last asked; on a CPU, the process's since its start."""
        if self._device.type != "cuda":
            return process_memory_peak()
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


def _cost_model(model: PreTrainedModel) -> CostModel:
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    if not has_adapters(model):
        return model_flops(model.config, trained + frozen)
    return frozen_flops(model_flops(model.config, frozen), trained)


def process_memory_peak() -> int:
    """Largest resident memory of this process so far, bytes.

    Linux tells it of this program alone; `getrusage` would count what a large parent held before it started this one.
    """
    if PROCESS_STATUS.is_file():
        for line in PROCESS_STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
