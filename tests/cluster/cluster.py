"""A cluster of one node for tests: pods of rendered objects as processes of this machine, each in a network of its own.

    async with mini_cluster(folder, objects, "train") as cluster:
        cluster.start()
        await cluster.until(lambda: cluster.all_ready("actor"), 60, "actors are ready")

What a Deployment, a StatefulSet, a Pod, a Service and RBAC mean is modelled; HorizontalPodAutoscaler, NetworkPolicy (but see
policies.py), PodDisruptionBudget, rolling updates, resources and scheduling are not. Linux, root and iproute2 only.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.api_server import ApiServer
from tests.cluster.builder import PodBuilder
from tests.cluster.images import Image
from tests.cluster.objects import ClusterError, Object, Objects, labels_of, name_of, pod_manifest
from tests.cluster.pod import Pod
from tests.cluster.services import Directory, cluster_ips, serve_cluster_ips, serve_names
from tests.cluster.traffic import Traffic
from tests.cluster.volumes import make_claim
from tests.faults.network import PrivateNetwork, private_network

COMPONENT = "app.kubernetes.io/component"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
API_PORT = 443
_TICK_S = 0.1
_SHOWN_CHARACTERS = 6000


@dataclass
class Workload:
    """A Deployment or StatefulSet and how many pods it wants."""

    definition: Object
    replicas: int

    @property
    def name(self) -> str:
        return name_of(self.definition)

    @property
    def ordered(self) -> bool:
        return self.definition["kind"] == "StatefulSet"


@dataclass
class Cluster:
    """`pods`: those that are there, by name; `gone`: those that were deleted, in order."""

    objects: Objects
    folder: Path
    network: PrivateNetwork
    api: ApiServer
    builder: PodBuilder
    directory: Directory
    strict: bool = True
    """A container that ends by itself or that a probe kills, and a call that RBAC refuses, fail what is being waited for."""
    pods: dict[str, Pod] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _workloads: dict[str, Workload] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _deletions: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.traffic = Traffic(self.directory, self.network.host)

    def start(self) -> None:
        """Creates what the objects say, all at once, as `helm install` does."""
        for definition in self.objects.of("Deployment", "StatefulSet"):
            workload = Workload(definition, int(definition["spec"].get("replicas", 1)))
            self._workloads[workload.name] = workload
        for claim in self.objects.of("PersistentVolumeClaim"):
            make_claim(self.folder / "claims", name_of(claim))
        for pod in self.objects.of("Pod"):
            self.create(pod)
        self._reconcile()

    def scale(self, name: str, replicas: int) -> None:
        """`kubectl scale`."""
        self._workloads[name].replicas = replicas
        self._reconcile()

    def of(self, component: str) -> list[Pod]:
        """Pods of a component that are not being deleted."""
        return [
            pod
            for pod in self.pods.values()
            if labels_of(pod.manifest).get(COMPONENT) == component and not pod.deleting
        ]

    def all_ready(self, component: str, count: int = 1) -> bool:
        pods = self.of(component)
        return len(pods) == count and all(pod.ready for pod in pods)

    def create(self, manifest: Object) -> Pod | None:
        """Starts a Pod. None where it cannot be made; `failures` says why."""
        try:
            pod = self.builder.build(manifest, self._change)
        except ClusterError as error:
            self.failures.append(f"pod {name_of(manifest)}: {error}")
            return None
        self.pods[pod.name] = pod
        pod.start()
        self._change()
        return pod

    async def delete(self, name: str, grace_s: float | None = None) -> Pod:
        """`kubectl delete pod`; the workload makes another one meanwhile. Returns when it is gone."""
        pod = self.pods[name]
        self._delete(pod, grace_s)
        await self.until(lambda: pod in self.gone, 600, f"{name} is gone")
        return pod

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Raises `ClusterError` with everybody's logs when it takes longer, or when a pod fails meanwhile."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self.check()
                    self.traffic.look()
                    try:
                        async with asyncio.timeout(_TICK_S):
                            await self._changed.wait()
                    except TimeoutError:  # conditions of files and logs are looked at again
                        pass
        except TimeoutError:
            raise ClusterError(f"not within {within_s:g} s: {what}\n{self.report()}") from None

    def check(self) -> None:
        """Raises `ClusterError` where a pod cannot start; `strict` says where else."""
        failures = self.failures + [f"pod {pod.name}: {pod.failure}" for pod in self.pods.values() if pod.failure]
        if self.strict:
            failures += self.api.denied
            for pod in self.pods.values():
                failures += [
                    f"pod {pod.name}, container {container.name}: ended with {container.exit_codes}"
                    f", {container.killed_by_probe} times for a probe"
                    for container in pod.main
                    if container.always and container.exit_codes and not pod.deleting
                ]
        if failures:
            raise ClusterError("\n".join([*failures, self.report()]))

    def report(self) -> str:
        """State and the end of the log of every container."""
        lines = []
        for pod in [*self.gone, *self.pods.values()]:
            for name, container in pod.containers.items():
                state = "running" if container.process.running else f"ended with {container.exit_codes}"
                lines.append(f"--- {pod.name}/{name}: {state}, ready={container.ready}, restarts={container.restarts}")
                lines.append(container.process.logs()[-_SHOWN_CHARACTERS:])
        return "\n".join(lines)

    def _change(self) -> None:
        """Something about a pod is different: whoever waits looks again, the API shows it, the workloads react."""
        for pod in self.pods.values():
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            before = self.api.pods.get(pod.name, {}).get("metadata", {}).get("deletionTimestamp", now)
            self.api.put(pod.as_object(self.builder.namespace, before))
        self._changed.set()
        self._changed = asyncio.Event()
        self._reconcile()

    def _reconcile(self) -> None:
        for workload in self._workloads.values():
            if workload.ordered:
                self._reconcile_stateful_set(workload)
            else:
                self._reconcile_deployment(workload)

    def _reconcile_stateful_set(self, workload: Workload) -> None:
        spec = workload.definition["spec"]
        for index in range(workload.replicas):
            name = f"{workload.name}-{index}"
            if name not in self.pods and not self.failures:
                self._create_member(workload, name, index)
            waits = spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
            if waits and not (name in self.pods and self.pods[name].ready):
                return
        for pod in self._owned(workload)[workload.replicas :]:
            self._delete(pod)

    def _create_member(self, workload: Workload, name: str, index: int) -> None:
        spec = workload.definition["spec"]
        labels = {"statefulset.kubernetes.io/pod-name": name, "apps.kubernetes.io/pod-index": str(index)}
        manifest = pod_manifest(spec["template"], name, labels)
        manifest["spec"] |= {"hostname": name, "subdomain": spec["serviceName"]}
        for template in spec.get("volumeClaimTemplates") or []:
            claim = f"{name_of(template)}-{name}"
            make_claim(self.folder / "claims", claim)
            volume = {"name": name_of(template), "persistentVolumeClaim": {"claimName": claim}}
            manifest["spec"].setdefault("volumes", []).append(volume)
        self.create(manifest)

    def _reconcile_deployment(self, workload: Workload) -> None:
        owned = self._owned(workload)
        for _ in range(workload.replicas - len(owned)):
            if self.failures:
                return
            name = f"{workload.name}-{secrets.token_hex(3)}"
            manifest = pod_manifest(workload.definition["spec"]["template"], name, {"pod-template-hash": "0"})
            self.create(manifest)
        if len(owned) > workload.replicas:
            costs = {pod.name: (pod.ready, self._deletion_cost(pod), -age) for age, pod in enumerate(owned)}
            for pod in sorted(owned, key=lambda pod: costs[pod.name])[: len(owned) - workload.replicas]:
                self._delete(pod)

    def _owned(self, workload: Workload) -> list[Pod]:
        """Oldest first; those that are being deleted do not count."""
        prefix = f"{workload.name}-"
        return [pod for name, pod in self.pods.items() if name.startswith(prefix) and not pod.deleting]

    def _deletion_cost(self, pod: Pod) -> int:
        return int(self.annotation(pod, DELETION_COST) or 0)

    def annotation(self, pod: Pod, key: str) -> str | None:
        """As it is in the API."""
        shown = self.api.pods.get(pod.name, {"metadata": {}})
        return (shown["metadata"].get("annotations") or {}).get(key)

    def _delete(self, pod: Pod, grace_s: float | None = None) -> None:
        async def end() -> None:
            await pod.delete(grace_s)
            self.network.remove(self.builder.places.pop(pod.name))
            del self.pods[pod.name]
            self.gone.append(pod)
            self.api.remove(pod.name)
            self._change()

        if not pod.deleting:
            pod.deleting = True
            deletion = asyncio.create_task(end())
            self._deletions.add(deletion)
            deletion.add_done_callback(self._deletions.discard)

    async def stop(self) -> None:
        """Kills all that is left."""
        self._workloads.clear()
        for pod in list(self.pods.values()):
            self._delete(pod, 0)
        if self._deletions:
            await asyncio.wait(self._deletions)


@asynccontextmanager
async def mini_cluster(
    folder: Path, objects: Objects, namespace: str, images: Mapping[str, Image]
) -> AsyncIterator[Cluster]:
    """`folder` takes volumes, claims and logs. Nothing runs in it before `start`; nothing is left at the end."""
    async with AsyncExitStack() as stack:
        network = stack.enter_context(private_network())
        ips = cluster_ips(objects, network.subnet)
        for ip in ips.values():
            network.answer_at(ip)
        api = ApiServer(objects, namespace)
        (folder / "claims").mkdir(parents=True)
        builder = PodBuilder(objects, namespace, folder, network, api, ips, images)
        pods: dict[str, Pod] = {}
        directory = Directory(objects, namespace, pods.values, ips)
        cluster = Cluster(objects, folder, network, api, builder, directory, pods=pods)
        await stack.enter_async_context(serve_names(directory, network.host))
        await stack.enter_async_context(serve_cluster_ips(directory))
        await stack.enter_async_context(api.serve(ips["kubernetes"], API_PORT, folder / "api"))
        stack.push_async_callback(cluster.stop)
        yield cluster
