"""One container of a pod: its process, started by the shim, its log, its signals, and its probes as the kubelet makes them.

Back-off is shorter than the kubelet's. What a probe or a preStop handler asks for and is not modelled is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pipelinerl.local.die_with_parent import guarded
from tests.cluster.objects import ClusterError, Object, container_port

_TICK_S = 0.01
_KILL_S = 5.0
_MOST_MESSAGE = 2048
LEAST_TERM_S = 2.0
"""What SIGTERM gets where preStop has used up the grace period."""
SHIM = Path(__file__).with_name("shim.py")
PROGRAMS = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""Where those that the shim needs are."""
NAMESPACES = ("--mount", "--uts", "--ipc", "--pid")


@dataclass(eq=False)
class Container:
    """A container over all its starts. `pod`: its manifest; `launch`: what the shim needs, without files of its own."""

    entry: Object
    pod: Object
    ip: str
    network_namespace: str
    privileges: list[str]
    """Options of setpriv: who the process is and what it may."""
    launch: dict[str, Any]
    folder: Path
    """Of this container; logs are kept in it."""
    changed: Callable[[], None]
    always: bool
    """Whether it is started again when it has ended."""
    starts: int = 0
    exit_codes: list[int] = field(default_factory=list)
    pid: int | None = None
    """Of its first process, in this machine's numbers."""
    started: bool = False
    ready: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    killed_by_probe: int = 0
    _unshare: asyncio.subprocess.Process | None = None
    """Parent of the container's first process."""
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def running(self) -> bool:
        return self._unshare is not None and self._unshare.returncode is None

    @property
    def state(self) -> Mapping[str, Any]:
        return {
            "name": self.name,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restarts,
            "image": self.entry["image"],
            "imageID": "",
            "state": self._now(),
        }

    def _now(self) -> Mapping[str, Any]:
        if self.running:
            return {"running": {}}
        if not self.exit_codes:
            return {"waiting": {"reason": "ContainerCreating"}}
        ended: dict[str, Any] = {"exitCode": self.exit_codes[-1]}
        if self.entry.get("terminationMessagePolicy") == "FallbackToLogsOnError" and ended["exitCode"]:
            ended |= {"message": self.logs()[-_MOST_MESSAGE:]}
        return {"terminated": ended}

    def logs(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    async def run(self) -> None:
        while not self.stopping.is_set():
            async with self._starting:
                if self.stopping.is_set():
                    return
                await self._start()
            self.exit_codes.append(await self._exit_code_while_probed())
            self.started = self.ready = False
            self.changed()
            if self.stopping.is_set() or not self.always:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(5.0, 0.5 * 2.0**self.restarts)):
                    await self.stopping.wait()

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL at the end of the grace period, which preStop is part of."""
        self.stopping.set()
        deadline = time.monotonic() + grace_s
        async with self._starting:  # what is half started cannot take a signal yet
            pass
        hook = (self.entry.get("lifecycle") or {}).get("preStop")
        if hook and self.running and grace_s:
            await asyncio.sleep(min(grace_s, hook["sleep"]["seconds"]))
        await self._end(max(LEAST_TERM_S, deadline - time.monotonic()) if grace_s else 0)

    async def spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        """Starts a command inside, with pipes for its output."""
        inside = ["nsenter", f"--target={self.pid}", "--all", "setpriv", *self.privileges]
        argv = [*inside, "env", f"--chdir={self.launch['workdir']}", *command]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe, env=self.launch["env"])

    async def execute(self, command: list[str], timeout_s: float) -> tuple[int, str]:
        """Exit code and output of a command inside. Raises `TimeoutError`."""
        process = await self.spawn(command)
        try:
            async with asyncio.timeout(timeout_s):
                output, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, (output + errors).decode(errors="replace")

    async def _start(self) -> None:
        """Returns when the program runs and takes signals, or has ended already."""
        self.starts += 1
        scratch = self.folder / f"{self.starts}.root"
        started_file, spec_file = scratch.with_suffix(".started"), scratch.with_suffix(".json")
        scratch.mkdir(parents=True)
        argv = ["setpriv", *self.privileges, "--pdeathsig=KILL", *self.launch["argv"]]
        files = {"scratch": str(scratch), "started_file": str(started_file)}
        spec_file.write_text(json.dumps(self.launch | files | {"argv": argv}))
        command = ["nsenter", f"--net={self.network_namespace}", "unshare", *NAMESPACES, "--fork", "--kill-child"]
        command += [sys.executable, "-I", "-S", str(SHIM), str(spec_file)]
        with scratch.with_suffix(".log").open("ab") as log:
            self._unshare = await asyncio.create_subprocess_exec(
                *guarded(command, signal.SIGKILL),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=PROGRAMS,
                start_new_session=True,
            )
        while self.running and not (started_file.exists() and started_file.read_text()):
            await asyncio.sleep(_TICK_S)
        with suppress(psutil.Error, IndexError):
            self.pid = psutil.Process(self._unshare.pid).children()[0].pid

    async def _exit_code(self) -> int:
        """128 + the signal where one ended it; 1 for SIGKILL, which unshare cannot end by itself."""
        assert self._unshare is not None
        code = await self._unshare.wait()
        self.pid = None
        return code if code >= 0 else 128 - code

    async def _exit_code_while_probed(self) -> int:
        """Raises what a probe raises that is not only a failed probe."""
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._probe())
            code = await self._exit_code()
            probing.cancel()
        return code

    async def _end(self, within_s: float) -> None:
        """SIGTERM to its first process; later, or at once, SIGKILL, with which the kernel ends all the others too."""
        for number, seconds in ((signal.SIGTERM, within_s), (signal.SIGKILL, _KILL_S)):
            pid = self.pid
            if pid is not None and seconds:
                with suppress(ProcessLookupError, TimeoutError):
                    os.kill(pid, number)
                    async with asyncio.timeout(seconds):
                        await self._exit_code()
        if self._unshare is not None and self.running:
            self._unshare.kill()
            await self._unshare.wait()

    # --- probes: from outside, to the pod's address, with the rendered periods and thresholds -------------------------

    async def _probe(self) -> None:
        if "startupProbe" in self.entry:
            async for passed in self._verdicts(self.entry["startupProbe"]):
                if passed:
                    break
                await self._kill_for_probe()
        self.started = True
        self.ready = "readinessProbe" not in self.entry
        self.changed()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_readiness())
            tasks.create_task(self._watch_liveness())

    async def _watch_readiness(self) -> None:
        if "readinessProbe" in self.entry:
            async for passed in self._verdicts(self.entry["readinessProbe"]):
                if passed != self.ready:
                    self.ready = passed
                    self.changed()

    async def _watch_liveness(self) -> None:
        if "livenessProbe" in self.entry:
            async for passed in self._verdicts(self.entry["livenessProbe"]):
                if not passed:
                    await self._kill_for_probe()

    async def _kill_for_probe(self) -> None:
        self.killed_by_probe += 1
        await self._end(self.pod["spec"].get("terminationGracePeriodSeconds", 30))

    async def _verdicts(self, probe: Mapping[str, Any]) -> AsyncIterator[bool]:
        """True each time that it passes, False each time that it has failed for as often as the threshold says."""
        if unknown := probe.keys() - {"httpGet", "periodSeconds", "timeoutSeconds", "failureThreshold"}:
            raise ClusterError(f"a probe with {sorted(unknown)} is not modelled")
        failed = 0
        while True:
            failed = 0 if await self._passes(probe["httpGet"], probe.get("timeoutSeconds", 1)) else failed + 1
            if failed == 0 or failed >= probe.get("failureThreshold", 3):
                yield failed == 0
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _passes(self, get: Mapping[str, Any], timeout_s: float) -> bool:
        url = f"http://{self.ip}:{container_port(self.pod, get['port'])}{get['path']}"
        with suppress(OSError, TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session, session.get(url) as response:
                return 200 <= response.status < 400
        return False
