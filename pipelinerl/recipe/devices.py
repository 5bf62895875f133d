"""Find the NVIDIA GPUs of this machine that a local run can use. `python -m pipelinerl.recipe.devices` prints them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipelinerl.rl.memory import GIB

PROBE = (sys.executable, "-m", "services.trainer.devices")
"""Command that lists GPUs with torch and NVML. It runs as its own process, because loading torch takes seconds and memory."""
_PROBE_S = 180.0
_DEVICES = Path("/dev")


class Device(BaseModel):
    """A GPU or a MIG instance."""

    model_config = ConfigDict(frozen=True)

    uuid: str
    """Name in CUDA_VISIBLE_DEVICES."""
    name: str
    total_bytes: int
    free_bytes: int
    linked: tuple[str, ...] = ()
    """UUIDs of the GPUs to which NVLink connects this one."""
    capability: int = 80
    """CUDA's compute capability, times 10."""

    @property
    def is_instance(self) -> bool:
        """Return whether this is a MIG instance, that is, a part of a GPU."""
        return self.uuid.startswith("MIG-")

    def computes_in(self, dtype: str) -> bool:
        return self.capability >= 80 or dtype != "bfloat16"

    def __str__(self) -> str:
        return f"{self.name}, {self.free_bytes / GIB:.1f} of {self.total_bytes / GIB:.1f} GiB free ({self.uuid})"


class Devices(BaseModel):
    """Usable GPUs in CUDA's order. If there are none, `problem` says why."""

    devices: tuple[Device, ...] = ()
    problem: str = ""
    nccl: tuple[int, ...] = ()
    """Version of the NCCL library that torch loads."""


def has_gpu() -> bool:
    """Return whether an NVIDIA GPU seems to exist, without using CUDA's libraries."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


@functools.cache
def find_devices() -> Devices:
    """Return the GPUs that torch can use. On a machine with GPUs, the first call takes seconds."""
    if not has_gpu():
        return Devices(problem="this machine has no NVIDIA GPU (no /dev/nvidia0, no nvidia-smi)")
    try:
        done = subprocess.run(PROBE, capture_output=True, text=True, timeout=_PROBE_S, check=True)
        return Devices.model_validate(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Devices(problem=f"torch has not listed the GPUs within {_PROBE_S:g} s; check whether nvidia-smi answers")
    except (subprocess.CalledProcessError, OSError, ValueError, IndexError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [repr(error)]
        return Devices(problem=f"torch cannot list the GPUs: {said[-1]}")


def main() -> None:
    found = find_devices()
    print(*found.devices or [f"no GPU can be used: {found.problem}"], sep="\n")


if __name__ == "__main__":
    main()
