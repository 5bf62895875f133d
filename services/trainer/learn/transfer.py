"""Arrays of the host as tensors of a device, without the host waiting for what the device still has to do.

Not here: the way back, where somebody has to wait.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def on_device(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """`values` on `device`, in their dtype; on the CPU it is their memory.

    A GPU copies from page-locked memory by itself; from any other the host would feed it, behind all work queued before.
    torch keeps that memory until the copy is done.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
