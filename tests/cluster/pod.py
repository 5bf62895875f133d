"""A pod's life: init containers and sidecars in order, containers with their logs, signals and probes, deletion.

A container that should run and ends, or whose startup or liveness probe fails, is a failure of its pod: nothing is started
again. Resources, quality of service and ephemeral containers are not modelled.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pipelinerl.local.die_with_parent import guarded
from tests.cluster.objects import ClusterError, Object, name_of, named_ports
from tests.faults.network import Place

_TICK_S, _KILL_S = 0.02, 5.0
_MOST_MESSAGE = 2048
SHIM = Path(__file__).with_name("shim.py")
PROGRAMS = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
"""Where those that the shim needs are."""


@dataclass(eq=False)
class Container:
    """`pod`: its manifest; `privileges`: options of setpriv; `launch`: what the shim needs, without files of its own."""

    entry: Object
    pod: Object
    place: Place
    privileges: list[str]
    launch: dict[str, Any]
    folder: Path
    """Of this container; its log is in it."""
    changed: Callable[[], None]
    always: bool
    """Whether it is to run until it is told to stop."""
    exit_code: int | None = None
    pid: int | None = None
    """Of its first process, in this machine's numbers."""
    started: bool = False
    ready: bool = False
    stopping: bool = False
    _unshare: asyncio.subprocess.Process | None = None
    """Parent of the container's first process."""
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return str(self.entry["name"])

    @property
    def running(self) -> bool:
        return self._unshare is not None and self._unshare.returncode is None

    @property
    def status(self) -> Object:
        state: Object = {"running": {}} if self.running else {"waiting": {"reason": "ContainerCreating"}}
        if self.exit_code is not None:
            falls_back = self.exit_code and self.entry.get("terminationMessagePolicy") == "FallbackToLogsOnError"
            message = {"message": self.logs()[-_MOST_MESSAGE:]} if falls_back else {}
            state = {"terminated": {"exitCode": self.exit_code, **message}}
        return {"name": self.name, "ready": self.ready, "started": self.started, "restartCount": 0, "state": state}

    def logs(self) -> str:
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    async def run(self) -> None:
        """Raises `ClusterError` when it ends although it should run, or a probe says so."""
        async with self._starting:
            if self.stopping:
                return
            await self._start()
        assert self._unshare is not None
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._probe())
            code = await self._unshare.wait()
            probing.cancel()
        self.exit_code = code if code >= 0 else 128 - code  # 1 for SIGKILL, with which unshare cannot end itself
        self.pid, self.started, self.ready = None, False, False
        self.changed()
        if self.always and not self.stopping:
            raise ClusterError(f"container {self.name} ended with {self.exit_code}")

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and at the end of the grace period, which preStop is part of, SIGKILL to all its processes."""
        self.stopping = True
        deadline = time.monotonic() + grace_s
        async with self._starting:  # what is half started cannot take a signal yet
            pass
        hook = (self.entry.get("lifecycle") or {}).get("preStop")
        if hook and self.running and grace_s:
            await asyncio.sleep(min(grace_s, hook["sleep"]["seconds"]))
        for number, seconds in ((signal.SIGTERM, deadline - time.monotonic()), (signal.SIGKILL, _KILL_S)):
            if self._unshare is not None and self.running and self.pid is not None and seconds > 0:
                with suppress(ProcessLookupError, TimeoutError):
                    os.kill(self.pid, number)
                    async with asyncio.timeout(seconds):
                        await self._unshare.wait()
        if self._unshare is not None and self.running:
            self._unshare.kill()
            await self._unshare.wait()

    async def spawn(self, command: list[str]) -> asyncio.subprocess.Process:
        """Starts a command inside, with pipes for its output."""
        inside = ["nsenter", f"--target={self.pid}", "--all", "setpriv", *self.privileges]
        argv = [*inside, "env", f"--chdir={self.launch['workdir']}", *command]
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*argv, stdout=pipe, stderr=pipe, env=self.launch["env"])

    async def _start(self) -> None:
        """Returns when the program runs and takes signals, or has ended already."""
        scratch, started_file, spec_file = (self.folder / name for name in ("root", "started", "spec.json"))
        scratch.mkdir()
        argv = ["setpriv", *self.privileges, "--pdeathsig=KILL", *self.launch["argv"]]
        files = {"scratch": str(scratch), "started_file": str(started_file)}
        spec_file.write_text(json.dumps(self.launch | files | {"argv": argv}))
        command = ["nsenter", f"--net=/var/run/netns/{self.place.namespace}"]
        command += ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        command += [sys.executable, "-I", "-S", str(SHIM), str(spec_file)]
        with (self.folder / "log").open("ab") as log:
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

    # --- probes: from outside, to the pod's address, with the rendered periods and thresholds -------------------------

    async def _probe(self) -> None:
        async for passed in self._verdicts("startupProbe"):
            if passed:
                break
        self.started = True
        self.ready = "readinessProbe" not in self.entry
        self.changed()
        async with asyncio.TaskGroup() as tasks:
            for kind in ("readinessProbe", "livenessProbe"):
                tasks.create_task(self._watch(kind))

    async def _watch(self, kind: str) -> None:
        async for passed in self._verdicts(kind):
            if kind == "readinessProbe" and passed != self.ready:
                self.ready = passed
                self.changed()

    async def _verdicts(self, kind: str) -> AsyncIterator[bool]:
        """True each time that it passes, False or, but of readiness, `ClusterError` when it has failed as often as may be."""
        if (probe := self.entry.get(kind)) is None:
            return
        get, failed = probe["httpGet"], 0
        url = f"http://{self.place.address}:{named_ports(self.pod)[get['port']]}{get['path']}"
        while True:
            failed = 0 if await _answers(url, probe.get("timeoutSeconds", 1)) else failed + 1
            if failed == 0 or failed >= probe.get("failureThreshold", 3):
                if failed and kind != "readinessProbe" and not self.stopping:
                    raise ClusterError(f"container {self.name}: its {kind} has failed {failed} times")
                yield failed == 0
            await asyncio.sleep(probe.get("periodSeconds", 10))


async def _answers(url: str, timeout_s: float) -> bool:
    with suppress(OSError, TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session, session.get(url) as response:
            return 200 <= response.status < 400
    return False


@dataclass(eq=False)
class Pod:
    """`place`: its network. `failure`: why it does not run, as an event would say."""

    manifest: Object
    uid: str
    place: Place
    changed: Callable[[], None]
    init: list[Container] = field(default_factory=list)
    main: list[Container] = field(default_factory=list)
    failure: str = ""
    deleting: bool = False
    finished: bool = False
    _running: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return name_of(self.manifest)

    @property
    def ip(self) -> str:
        return self.place.address

    @property
    def containers(self) -> dict[str, Container]:
        return {container.name: container for container in (*self.init, *self.main)}

    @property
    def ready(self) -> bool:
        return not self.finished and all(container.ready for container in (*self.main, *self._sidecars))

    @property
    def phase(self) -> str:
        if self.finished:
            return "Succeeded" if all(one.exit_code == 0 for one in self.main) else "Failed"
        return "Running" if any(one.running for one in self.main) else "Pending"

    @property
    def _sidecars(self) -> list[Container]:
        return [container for container in self.init if container.always]

    @property
    def _grace_s(self) -> float:
        return float(self.manifest["spec"].get("terminationGracePeriodSeconds", 30))

    def logs(self) -> str:
        return "".join(f"--- {self.name}/{name}\n{one.logs()}" for name, one in self.containers.items())

    def start(self) -> None:
        self._running = asyncio.create_task(self._run(), name=self.name)

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for container in self.init:
                    await self._run_init(container, tasks)
                await asyncio.gather(*(container.run() for container in self.main))
                await self._stop_sidecars(self._grace_s)
            self.finished = not self.deleting
        except* (ClusterError, LookupError) as group:
            self.failure = repr(group)
        finally:
            self.changed()

    async def _run_init(self, container: Container, tasks: asyncio.TaskGroup) -> None:
        if not container.always:
            await container.run()
            if container.exit_code != 0 and not self.deleting:
                raise ClusterError(f"init container {container.name} of pod {self.name} failed: {container.exit_code}")
            return
        tasks.create_task(container.run())
        while not container.started and not self.deleting:
            await asyncio.sleep(_TICK_S)

    async def delete(self, grace_s: float | None = None) -> None:
        """Ends all containers as a deletion does. Returns when they are gone; `grace_s` = 0 kills."""
        self.deleting = True
        self.changed()
        grace_s = self._grace_s if grace_s is None else grace_s
        began = time.monotonic()
        steps = [one for one in self.init if not one.always]
        await asyncio.gather(*(container.stop(grace_s) for container in (*steps, *self.main)))
        await self._stop_sidecars(max(0.0, grace_s - (time.monotonic() - began)))
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _stop_sidecars(self, grace_s: float) -> None:
        for container in reversed(self._sidecars):
            await container.stop(grace_s)

    def as_object(self, namespace: str, deleted_at: str) -> Object:
        metadata: dict[str, Any] = dict(self.manifest["metadata"]) | {"namespace": namespace, "uid": self.uid}
        if self.deleting:
            metadata["deletionTimestamp"] = deleted_at
        state = "True" if self.ready and not self.deleting else "False"
        status = {
            "phase": self.phase,
            "podIP": self.ip,
            "conditions": [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [container.status for container in self.main],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.manifest["spec"], "status": status}
