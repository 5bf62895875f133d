"""Which processes of a run live, by its pids.json. A pid that now belongs to something else does not count.

Only looks; on a system without /proc a pid that lives is taken for the run's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pipelinerl.local.run_dir import RunDir

_PROC = Path("/proc")


def living(run_dir: RunDir) -> dict[str, int]:
    """Name and pid of those of the run's processes that live. Raises as `read_pids`."""
    return {name: pid for name, pid in read_pids(run_dir).items() if lives(pid, run_dir.path)}


def read_pids(run_dir: RunDir) -> dict[str, int]:
    """pids.json, of processes that live or not. Raises `OSError` or `ValueError` where it cannot be read."""
    pids = json.loads(run_dir.pids.read_bytes())
    if not (isinstance(pids, dict) and all(isinstance(pid, int) for pid in pids.values())):
        raise ValueError("it holds no mapping of names to pids")
    return pids


def lives(pid: int, folder: Path) -> bool:
    """Whether that process lives and is of the run in `folder`: each of them has a file in it among its arguments or in
    its environment."""
    if sys.platform != "linux":
        return _answers(pid)
    if not _runs(pid):
        return False
    within = f"{folder.resolve()}{os.sep}".encode()
    return any(within in _bytes(pid, name) for name in ("cmdline", "environ"))


def _runs(pid: int) -> bool:
    state = _bytes(pid, "stat").decode(errors="replace").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def _bytes(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""  # it has ended, or is somebody else's


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
