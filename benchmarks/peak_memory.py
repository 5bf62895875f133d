"""Peak memory of one computation, above what the process held before it: resident memory on CPU, allocated on a GPU.

It measures this process only, and nothing that a library keeps from an earlier, larger peak: measure each side in a
process of its own. Linux.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What the kernel takes for: let the peak be what is resident now (proc(5))."""


@dataclass(frozen=True)
class Measured:
    peak_mib: float
    seconds: float


def measured(compute: Callable[[], Any], device: torch.device) -> Measured:
    """Runs `compute` once. What it returns is held until the end, and counts."""
    on_gpu = device.type == "cuda"
    before = _start_on_gpu(device) if on_gpu else _start_on_cpu()
    start = time.perf_counter()
    kept = compute()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else resident_bytes("VmHWM", _STATUS.read_text())
    del kept
    return Measured((peak - before) / 2**20, seconds)


def resident_bytes(field: str, status: str) -> int:
    """`VmRSS` (resident now) or `VmHWM` (at its peak) out of the text of /proc/self/status. Raises ValueError."""
    for line in status.splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise ValueError(f"no {field} in the process's status")


def _start_on_cpu() -> int:
    _CLEAR.write_text(_RESET_PEAK)
    return resident_bytes("VmRSS", _STATUS.read_text())


def _start_on_gpu(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
