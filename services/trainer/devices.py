"""`python -m services.trainer.devices`: print as JSON which NVIDIA GPUs torch can use, or why it can use none.

The runner starts this as a process (`pipelinerl.recipe.devices`), because the runner imports neither torch nor NVML. CUDA
decides which GPUs are visible and in which order. NVML reports the free memory, MIG instances and NVLink connections.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from pipelinerl.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


def described(torch: Any, nvml: Any, environment: Mapping[str, str], nodes: Path = DEVICES) -> list[dict[str, Any]]:
    """Return the fields of a `Device` for each usable GPU or MIG instance. Raises `UserError`, with a fix, if none is usable,
    if NVML fails or is not installed (`nvml` is None), or if CUDA ignores a GPU that CUDA_VISIBLE_DEVICES names. `nodes`:
    folder of the device files."""
    if torch.version.cuda is None:
        fix = "install the CUDA build: make clean && make install DEVICE=cuda"
        raise UserError(f"torch {torch.__version__} is built without CUDA; {fix}")
    try:
        torch.cuda.init()
        visible = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(torch.cuda.device_count())]
        oldest = min(int("".join(filter(str.isdigit, kind))) for kind in torch.cuda.get_arch_list())
    except RuntimeError as error:
        sentence = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        raise UserError(f"{sentence}{_cause(torch, environment, nodes)}") from error
    if not visible:
        raise UserError(f"torch sees no GPU{_cause(torch, environment, nodes)}")
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",")]
    wanted = list(takewhile(lambda name: name not in ("", "-1"), named))  # CUDA ignores all later names
    if len(wanted) > len(visible) and not any(name.startswith("MIG-") for name in wanted):
        fix = f"CUDA shows only the first {len(visible)} of these GPUs; correct {wanted[len(visible)]!r}"
        raise UserError(f"{VISIBLE} = {environment[VISIBLE]!r}: {fix}")
    if nvml is None:
        raise UserError("the package nvidia-ml-py is not installed; run: make clean && make install DEVICE=cuda")
    try:
        nvml.nvmlInit()
        handles = {uuid: nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in _usable(nvml, visible, environment)}
        found = [_device(nvml, uuid, handles) for uuid in handles]
    except nvml.NVMLError as error:
        raise UserError(f"NVML, the driver's management library, says: {error}{_cause(torch, environment, nodes)}") from error
    if found and not (able := [device for device in found if device["capability"] >= oldest]):
        old = f"{found[0]['name']} has compute capability {found[0]['capability'] / 10}"
        raise UserError(f"{old}, but torch {torch.__version__} needs {oldest / 10} or more; use a newer GPU")
    if not found:
        fix = f"name its MIG instances by UUID in {VISIBLE} (nvidia-smi -L lists them)"
        raise UserError(f"the visible GPU is divided into MIG instances; {fix}")
    return able


def _cause(torch: Any, environment: Mapping[str, str], nodes: Path) -> str:
    """Return the probable cause of an error and the fix, for the end of the error's message."""
    files = (node for node in sorted(nodes.glob("nvidia*")) if not node.is_dir())
    locked = [str(node) for node in files if not os.access(node, os.R_OK | os.W_OK)]
    if locked:
        return f"; this user may not open {', '.join(locked)}: join the group that may open them, or give the container access"
    if VISIBLE in environment:
        return f"; {VISIBLE}={environment[VISIBLE]!r} decides which ones are visible"
    return f"; torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} (nvidia-smi shows what the driver offers)"


def _usable(nvml: Any, visible: list[str], environment: Mapping[str, str]) -> list[str]:
    """Return the UUIDs of visible whole GPUs and of MIG instances. CUDA shows a process at most one instance. The instances are
    therefore read from CUDA_VISIBLE_DEVICES or, if that is not set, from NVML."""
    whole, instances = set[str](), list[str]()
    for number in range(nvml.nvmlDeviceGetCount()):
        parent = nvml.nvmlDeviceGetHandleByIndex(number)
        if not (_answer(nvml, nvml.nvmlDeviceGetMigMode, parent) or (False,))[0]:
            whole.add(nvml.nvmlDeviceGetUUID(parent))
            continue
        numbers = range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent))
        parts = (_answer(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, one) for one in numbers)
        instances += [nvml.nvmlDeviceGetUUID(part) for part in parts if part is not None]
    if VISIBLE in environment:  # CUDA accepts the beginning of a UUID
        named = [name.strip() for name in environment[VISIBLE].split(",")]
        instances = [
            next((one for one in instances if one.startswith(name)), name) for name in named if name.startswith("MIG-")
        ]
    return [uuid for uuid in visible if uuid in whole] + instances


def _answer(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if NVML has none, for example for a GPU without MIG or for an unused instance number."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _device(nvml: Any, uuid: str, handles: Mapping[str, Any]) -> dict[str, Any]:
    capability = _answer(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handles[uuid]) or (8, 0)  # unknown for MIG instances
    memory, name = nvml.nvmlDeviceGetMemoryInfo(handles[uuid]), nvml.nvmlDeviceGetName(handles[uuid])
    others, link = handles.keys() - {uuid}, nvml.NVML_P2P_CAPS_INDEX_NVLINK
    links = {other: _answer(nvml, nvml.nvmlDeviceGetP2PStatus, handles[uuid], handles[other], link) for other in others}
    return {
        "uuid": uuid,
        "name": name.decode() if isinstance(name, bytes) else name,
        "total_bytes": memory.total,
        "free_bytes": memory.free,
        "capability": 10 * capability[0] + capability[1],
        "linked": [other for other in handles if links.get(other) == nvml.NVML_P2P_STATUS_OK],
    }


def main() -> None:
    import torch

    nvml = importlib.import_module("pynvml") if importlib.util.find_spec("pynvml") else None
    try:
        answer: dict[str, Any] = {"devices": described(torch, nvml, os.environ), "nccl": torch.cuda.nccl.version()[:3]}
    except UserError as error:
        answer = {"problem": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
