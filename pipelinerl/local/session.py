"""Every process of one session: a service, its workers, and whatever those started.

A process group is not enough: a library may give its workers a group of their own, and workers outlive a killed parent.
The session stays the same for all of them. Linux reads /proc; elsewhere the process group has to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.1


def session_pids(session: int) -> list[int]:
    """Living processes (no zombies) of the session whose leader has, or had, the pid `session`."""
    return [int(entry.name) for entry in _PROC.glob("[0-9]*") if _session_of(entry) == session]


def _session_of(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text(errors="replace")
    except OSError:
        return None  # ended while we looked
    state, _ppid, _group, session, *_ = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(session)


def kill_session(session: int) -> None:
    """SIGKILL to every process of the session. None left is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    for pid in session_pids(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def session_ended(session: int, timeout_s: float) -> bool:
    """Waits until no process of the session lives; False when some still do after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while session_pids(session):
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
