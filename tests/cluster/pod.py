"""A pod's life: volumes, init containers and sidecars in order, containers with their probes, restarts, deletion.

Back-off is shorter than the kubelet's; resources, quality of service and ephemeral containers are not modelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.container import Process
from tests.cluster.objects import ClusterError, Object, name_of
from tests.cluster.probes import Prober, run_hook

_TICK_S = 0.05
LEAST_TERM_S = 2.0
"""What SIGTERM gets where preStop has used up the grace period."""


@dataclass
class Container:
    """A container over all its starts."""

    spec: Object
    process: Process
    prober: Prober
    changed: Callable[[], None]
    always: bool
    """Whether it is started again whatever its exit code is; `on_failure` for others than 0."""
    on_failure: bool
    grace_s: float
    """Between SIGTERM and SIGKILL where a probe has failed."""
    exit_codes: list[int] = field(default_factory=list)
    started: bool = False
    ready: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    killed_by_probe: int = 0
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def restarts(self) -> int:
        return max(0, self.process.starts - 1)

    async def run(self) -> None:
        """Until it has ended for good, or `stop` was called."""
        while not self.stopping.is_set():
            async with self._starting:
                if self.stopping.is_set():
                    return
                await self.process.start()
            self.exit_codes.append(await self._exit_code_while_probed())
            self.started = self.ready = False
            self.changed()
            if self.stopping.is_set() or not (self.always or (self.on_failure and self.exit_codes[-1] != 0)):
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(min(5.0, 0.5 * 2.0**self.restarts)):
                    await self.stopping.wait()

    async def _exit_code_while_probed(self) -> int:
        """Raises what a probe raises that is not only a failed probe."""
        async with asyncio.TaskGroup() as tasks:
            probing = tasks.create_task(self._probe())
            code = await self.process.wait()
            probing.cancel()
        return code

    async def stop(self, grace_s: float) -> None:
        """preStop, SIGTERM, and SIGKILL at the end of the grace period, which preStop is part of."""
        self.stopping.set()
        deadline = time.monotonic() + grace_s
        async with self._starting:  # what is half started cannot take a signal yet
            pass
        hook = (self.spec.get("lifecycle") or {}).get("preStop")
        if hook and self.process.running and grace_s:
            await run_hook(hook, self.prober, grace_s)
        await self._end(max(LEAST_TERM_S, deadline - time.monotonic()) if grace_s else 0)

    async def _end(self, within_s: float) -> None:
        if within_s and self.process.running:
            self.process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self.process.wait()
        await self.process.kill()

    async def _probe(self) -> None:
        if "startupProbe" in self.spec:
            async for passed in self.prober.verdicts(self.spec["startupProbe"]):
                if passed:
                    break
                await self._killed_by_probe(self.spec["startupProbe"])
        self.started = True
        self.ready = "readinessProbe" not in self.spec
        self.changed()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_readiness())
            tasks.create_task(self._watch_liveness())

    async def _watch_readiness(self) -> None:
        if "readinessProbe" in self.spec:
            async for passed in self.prober.verdicts(self.spec["readinessProbe"]):
                if passed != self.ready:
                    self.ready = passed
                    self.changed()

    async def _watch_liveness(self) -> None:
        if "livenessProbe" in self.spec:
            async for passed in self.prober.verdicts(self.spec["livenessProbe"]):
                if not passed:
                    await self._killed_by_probe(self.spec["livenessProbe"])

    async def _killed_by_probe(self, probe: Mapping[str, Any]) -> None:
        self.killed_by_probe += 1
        await self._end(probe.get("terminationGracePeriodSeconds", self.grace_s))


@dataclass
class Pod:
    """`containers` by name, init containers among them. `failure`: why it does not start, as an event would say."""

    manifest: Object
    uid: str
    ip: str
    init: list[Container]
    main: list[Container]
    changed: Callable[[], None]
    failure: str = ""
    deleting: bool = False
    finished: bool = False
    _running: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return name_of(self.manifest)

    @property
    def containers(self) -> dict[str, Container]:
        return {container.name: container for container in (*self.init, *self.main)}

    @property
    def ready(self) -> bool:
        serving = [*self.main, *(one for one in self.init if one.always)]
        return not self.finished and all(container.ready for container in serving)

    @property
    def phase(self) -> str:
        if self.finished:
            return "Succeeded" if all(one.exit_codes[-1:] == [0] for one in self.main) else "Failed"
        return "Running" if any(one.process.running for one in self.main) else "Pending"

    @property
    def restarts(self) -> int:
        return sum(container.restarts for container in self.containers.values())

    def logs(self) -> str:
        """Of all containers, for a person."""
        return "".join(f"--- {self.name}/{name}\n{one.process.logs()}" for name, one in self.containers.items())

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
        except* ClusterError as group:
            self.failure = _first_word(group)
        finally:
            self.changed()

    async def _run_init(self, container: Container, tasks: asyncio.TaskGroup) -> None:
        """To its end with exit code 0; a sidecar until it has started."""
        if not container.always:
            await container.run()
            if container.exit_codes[-1:] != [0] and not self.deleting:
                raise ClusterError(f"init container {container.name} of pod {self.name} failed: {container.exit_codes}")
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
        """In the reverse of their order, when the containers have ended."""
        for container in reversed([one for one in self.init if one.always]):
            await container.stop(grace_s)

    @property
    def _grace_s(self) -> float:
        return float(self.manifest["spec"].get("terminationGracePeriodSeconds", 30))

    def as_object(self, namespace: str, deleted_at: str) -> Object:
        """What the API shows of it; `deleted_at` once it is being deleted."""
        metadata: dict[str, Any] = dict(self.manifest["metadata"]) | {"namespace": namespace, "uid": self.uid}
        if self.deleting:
            metadata["deletionTimestamp"] = deleted_at
        state = "True" if self.ready and not self.deleting else "False"
        status = {
            "phase": self.phase,
            "podIP": self.ip,
            "podIPs": [{"ip": self.ip}],
            "conditions": [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [_status_of(container) for container in self.main],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": self.manifest["spec"],
            "status": status,
        }


def _first_word(group: BaseExceptionGroup[ClusterError]) -> str:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _status_of(container: Container) -> Mapping[str, Any]:
    return {
        "name": container.name,
        "ready": container.ready,
        "started": container.started,
        "restartCount": container.restarts,
        "image": container.spec["image"],
        "imageID": "",
    }
