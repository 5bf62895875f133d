"""Arrays of the host as tensors of a device, without the host waiting for what the device still has to do.

Not here: the way back, where somebody has to wait.

Peak arithmetic of known devices: dense 16-bit matrix products with float32 accumulation, by the name torch gives them.

From the vendors' data sheets, half of what these say "with sparsity". A name that is not known exactly has no peak, since
variants of one name (a laptop's, a power-limited one, a MIG slice) differ: no figure is better than a wrong one.

Not here: other precisions; asking torch for the name.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

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


_TENSOR_DTYPES = frozenset({"bfloat16", "float16"})


class _Device(NamedTuple):
    name: str
    """Regular expression of the whole name, without the vendor."""
    tera_flops: float
    dtypes: frozenset[str] = _TENSOR_DTYPES


_DEVICES = (
    # Blackwell: HGX B200/B300 and GB200/GB300 NVL72 data sheets (whole systems, divided by their GPUs).
    _Device(r"(B200|B300 SXM6 AC|B300)", 2250.0),
    _Device(r"(GB200|GB300)", 2500.0),
    # Hopper: H100 and H200 data sheets, GH200 data sheet. H800 has the arithmetic of the H100.
    _Device(r"(H100|H800)( 80GB HBM3| 64GB HBM2)?", 989.4),
    _Device(r"(H100|H800)( 80GB)? PCIe", 756.5),
    _Device(r"(H100|H200) NVL", 835.5),
    _Device(r"H200", 989.4),
    _Device(r"GH200 (480GB|120GB|144G HBM3e)", 989.4),
    _Device(r"H20", 148.0),
    # Ada: L4, L40 and L40S data sheets; RTX 4090: Ada GPU architecture white paper.
    _Device(r"L4", 121.0),
    _Device(r"L40", 181.05),
    _Device(r"L40S", 362.05),
    _Device(r"RTX 6000 Ada Generation", 364.2),
    _Device(r"GeForce RTX 4090", 165.2),
    # Ampere: A100, A30, A40, A10 data sheets; RTX 3090 and A6000: GA102 white paper. A800 has the arithmetic of the A100.
    _Device(r"(A100|A800)[- ](SXM4|PCIE|PCIe)-(40|80)GB", 312.0),
    _Device(r"(A100|A800) 80GB PCIe", 312.0),
    _Device(r"A30", 165.0),
    _Device(r"A40", 149.7),
    _Device(r"A10", 125.0),
    _Device(r"RTX A6000", 154.8),
    _Device(r"GeForce RTX 3090", 71.0),
    # GeForce of Blackwell: RTX Blackwell white paper.
    _Device(r"GeForce RTX 5090", 209.5),
    # Volta and Turing have no bfloat16 matrix units: V100, V100S and T4 data sheets.
    _Device(r"V100-SXM[23]-(16|32)GB(-LS)?", 125.0, frozenset({"float16"})),
    _Device(r"V100-PCIE-(16|32)GB", 112.0, frozenset({"float16"})),
    _Device(r"V100S-PCIE-32GB", 130.0, frozenset({"float16"})),
    _Device(r"T4", 65.0, frozenset({"float16"})),
    # AMD CDNA: Instinct data sheets. torch sees each of the two dies of an MI250X.
    _Device(r"Instinct MI210", 181.0),
    _Device(r"Instinct MI250X( / MI250)?", 191.5),
    _Device(r"Instinct (MI300X|MI325X)( OAM)?", 1307.4),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """FLOP/s of matrix products in `dtype` ("bfloat16", "float16") on the device that torch calls `device_name`.

    None for a device or dtype that is not known: there is no utilization to tell.
    """
    name = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", device_name.strip())
    for device in _DEVICES:
        if dtype in device.dtypes and re.fullmatch(device.name, name):
            return device.tera_flops * 1e12
    return None
