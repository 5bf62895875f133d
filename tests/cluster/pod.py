"""A pod's life: init containers and sidecars in order, containers, deletion.

Resources, quality of service and ephemeral containers are not modelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.container import Container
from tests.cluster.objects import ClusterError, Object, name_of
from tests.faults.network import Place

_TICK_S = 0.05


@dataclass(eq=False)
class Pod:
    """`place`: its network. `failure`: why it does not start, as an event would say."""

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
            return "Succeeded" if all(one.exit_codes[-1:] == [0] for one in self.main) else "Failed"
        return "Running" if any(one.running for one in self.main) else "Pending"

    @property
    def restarts(self) -> int:
        return sum(container.restarts for container in self.containers.values())

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
        except* ClusterError as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.failure = str(error)
        finally:
            self.changed()

    async def _run_init(self, container: Container, tasks: asyncio.TaskGroup) -> None:
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
            "podIPs": [{"ip": self.ip}],
            "conditions": [{"type": kind, "status": state} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": [container.state for container in self.main],
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": self.manifest["spec"], "status": status}
