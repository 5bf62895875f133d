"""One container of a pod: its process, started by the shim, its log, its signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.local.die_with_parent import guarded
from tests.cluster.images import Image
from tests.cluster.objects import ClusterError

_TICK_S = 0.01
_KILL_S = 5.0
SHIM = Path(__file__).with_name("shim.py")


class NotRunning(ClusterError):
    """The container has no process, or none yet."""


def identity(image: Image, pod: dict[str, Any], container: dict[str, Any]) -> dict[str, Any]:
    """Who the process is and what it may: the container's securityContext over the pod's over the image's.

    Raises `ClusterError` where runAsNonRoot forbids the user.
    """
    of_pod = pod["spec"].get("securityContext") or {}
    context = {**of_pod, **(container.get("securityContext") or {})}
    user = context.get("runAsUser", image.user)
    if context.get("runAsNonRoot") and user == 0:
        raise ClusterError(f"container {container['name']}: has runAsNonRoot and image will run as root")
    group = context.get("runAsGroup", image.group)
    extra = [of_pod["fsGroup"]] if "fsGroup" in of_pod else []
    return {
        "uid": user,
        "gid": group,
        "groups": sorted({group, *extra, *(of_pod.get("supplementalGroups") or [])}),
        "drop_capabilities": "ALL" in ((context.get("capabilities") or {}).get("drop") or []),
        "no_new_privileges": context.get("allowPrivilegeEscalation") is False,
        "read_only_root": bool(context.get("readOnlyRootFilesystem")),
    }


@dataclass
class Process:
    """`spec`: what the shim needs, without files of its own. `folder`: of this container; logs are kept in it."""

    name: str
    spec: dict[str, Any]
    folder: Path
    starts: int = 0
    _shim: asyncio.subprocess.Process | None = field(default=None, repr=False)

    @property
    def log(self) -> Path:
        """Of the start under way, or of the last one."""
        return self.folder / f"{self.starts}.log"

    def logs(self) -> str:
        """Of all starts."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    @property
    def running(self) -> bool:
        return self._shim is not None and self._shim.returncode is None

    async def start(self) -> None:
        """Returns when the program runs and takes signals, or has ended already."""
        self.starts += 1
        scratch, pid_file = self.folder / f"{self.starts}.root", self.folder / f"{self.starts}.pid"
        scratch.mkdir(parents=True)
        spec = self.spec | {"scratch": str(scratch), "pid_file": str(pid_file)}
        self._shim = await self._spawn("run", spec, self.log)
        while self._shim.returncode is None and not (pid_file.exists() and pid_file.read_text()):
            await asyncio.sleep(_TICK_S)

    async def wait(self) -> int:
        """Its exit code."""
        assert self._shim is not None
        return await self._shim.wait()

    def terminate(self) -> None:
        """SIGTERM to its first process."""
        if self._shim is not None and self.running:
            with suppress(ProcessLookupError):
                self._shim.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL to all its processes. Returns when they are gone."""
        if self._shim is None or not self.running:
            return
        with suppress(ProcessLookupError, FileNotFoundError, ValueError, TimeoutError):
            os.kill(self._pid(), signal.SIGKILL)  # the shim ends when the kernel has ended all the others with it
            async with asyncio.timeout(_KILL_S):
                await self._shim.wait()
        with suppress(ProcessLookupError):
            self._shim.kill()
        await self._shim.wait()

    async def execute(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and output of a command inside. Raises `TimeoutError`, `NotRunning`."""
        try:
            spec = self.spec | {"argv": list(command), "pid": self._pid()}
        except (FileNotFoundError, ValueError):
            raise NotRunning(f"container {self.name} is not running") from None
        output = self.folder / f"exec-{len(list(self.folder.glob('exec-*.out')))}.out"
        shim = await self._spawn("exec", spec, output)
        try:
            async with asyncio.timeout(timeout_s):
                code = await shim.wait()
        finally:
            if shim.returncode is None:
                shim.kill()
                await shim.wait()
        return code, output.read_text(errors="replace")

    def _pid(self) -> int:
        """Of its first process, in this machine's numbers."""
        return int((self.folder / f"{self.starts}.pid").read_text())

    @property
    def pid(self) -> int | None:
        with suppress(FileNotFoundError, ValueError):
            return self._pid() if self.running else None
        return None

    async def _spawn(self, mode: str, spec: dict[str, Any], output: Path) -> asyncio.subprocess.Process:
        spec_file = output.with_suffix(".json")
        spec_file.write_text(json.dumps(spec))
        command = [sys.executable, "-I", "-S", str(SHIM), mode, str(spec_file)]
        with output.open("ab") as file:
            return await asyncio.create_subprocess_exec(
                *guarded(command, signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={},
                start_new_session=True,
            )
