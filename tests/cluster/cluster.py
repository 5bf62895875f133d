"""A cluster of one node for tests: pods of rendered objects as processes of this machine, each in a network of its own.

    async with mini_cluster(folder, rendered) as cluster:
        cluster.start()
        await cluster.until(lambda: cluster.all_ready("actor"), 60, "actors are ready")

What a Deployment, a StatefulSet, a Job of one pod, a Pod, a Service and RBAC mean is modelled; HorizontalPodAutoscaler,
NetworkPolicy (but see objects.py), PodDisruptionBudget, rolling updates, ordered StatefulSets, cluster IPs, resources and
scheduling are not. Linux, root and iproute2 only.
"""

from __future__ import annotations

import asyncio
import datetime
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.chart.rendering import COMPONENT, NAMESPACE, WORKLOADS, Rendered
from tests.cluster.api_server import ApiServer
from tests.cluster.builder import PodBuilder
from tests.cluster.network import opened, serve_names
from tests.cluster.objects import ClusterError, Object, Peer, dns_server, labels_of, name_of, pod_manifest, why_not
from tests.cluster.pod import Pod
from tests.faults.network import private_network

DOMAIN = "svc.cluster.local"
_TICK_S = 0.1
_SHOWN_CHARACTERS = 6000


@dataclass
class Cluster:
    """`pods`: those that are there, by name; `gone`: those that were deleted, in order."""

    builder: PodBuilder
    pods: dict[str, Pod] = field(default_factory=dict)
    gone: list[Pod] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    connections: set[tuple[Peer, Peer, int]] = field(default_factory=set)
    """All that pods have opened so far: both ends and the port."""
    _workloads: list[Object] = field(default_factory=list)
    _jobs: dict[str, Object] = field(default_factory=dict)
    """Those that were made over the API, by the names of their pods."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _unused: set[str] = field(default_factory=set)
    """Claims that were deleted."""
    _deletions: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def rendered(self) -> Rendered:
        return self.builder.rendered

    @property
    def folder(self) -> Path:
        return self.builder.folder

    @property
    def api(self) -> ApiServer:
        return self.builder.api

    def start(self) -> None:
        """Creates what the objects say, all at once, as `helm install` does."""
        self._workloads = self.rendered.of_kind(*WORKLOADS)
        for item in self.rendered.objects:
            self.api.keep(item)
            if item["kind"] == "PersistentVolumeClaim":
                self._make_claim(name_of(item))
        self._reconcile()

    def appeared(self, item: Object) -> None:
        """The controllers and the provisioner of volumes see a new object of the API."""
        if item["kind"] in WORKLOADS:
            self._workloads.append(item)
        elif item["kind"] == "PersistentVolumeClaim":
            self._make_claim(name_of(item))
        elif item["kind"] == "Job":
            name = f"{name_of(item)}-{secrets.token_hex(3)}"
            self._jobs[name] = item
            self.create(pod_manifest(item["spec"]["template"], name, {"batch.kubernetes.io/job-name": name_of(item)}))
        self._reconcile()

    def vanished(self, item: Object) -> None:
        """Pods go with what owns them. The claims of a StatefulSet stay."""
        if item["kind"] in WORKLOADS:
            for pod in self._owned(item):
                self._delete(pod)
            self._workloads.remove(item)
        elif item["kind"] == "Job":
            for name in [name for name, job in self._jobs.items() if job is item]:
                del self._jobs[name]
                if name in self.pods:
                    self._delete(self.pods[name])
        elif item["kind"] == "PersistentVolumeClaim":
            self._unused.add(name_of(item))
        self._reconcile()

    def _tell_jobs(self) -> None:
        for name, job in self._jobs.items():
            if (pod := self.pods.get(name)) and pod.finished and "status" not in job:
                done = "Complete" if pod.phase == "Succeeded" else "Failed"
                conditions = [{"type": done, "status": "True", "reason": "BackoffLimitExceeded" if done == "Failed" else ""}]
                job["status"] = {"conditions": conditions, "succeeded" if done == "Complete" else "failed": 1}
                self.api.notify("MODIFIED", job)

    def _remove_claims(self) -> None:
        """A claim that was deleted goes with its volume when no pod uses it."""
        volumes = [volume for pod in self.pods.values() for volume in pod.manifest["spec"].get("volumes", [])]
        used = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume}
        for name in self._unused - used:
            self._unused.remove(name)
            shutil.rmtree(self.folder / "claims" / name)

    async def execute(self, pod: str, container: str, command: list[str]) -> asyncio.subprocess.Process:
        return await self.pods[pod].containers[container].spawn(command)

    def scale(self, name: str, replicas: int) -> None:
        """`kubectl scale`."""
        (workload,) = (one for one in self._workloads if name_of(one) == name)
        workload["spec"]["replicas"] = replicas
        self._reconcile()

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if labels_of(pod.manifest).get(COMPONENT) == component and not pod.deleting]

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

    async def delete(self, name: str) -> Pod:
        """`kubectl delete pod`; the workload makes another one meanwhile. Returns when it is gone."""
        pod = self.pods[name]
        self._delete(pod)
        await self.until(lambda: pod in self.gone, 600, f"{name} is gone")
        return pod

    async def until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Raises `ClusterError` with everybody's logs when it takes longer, or when a pod fails meanwhile."""
        try:
            async with asyncio.timeout(within_s):
                while not condition():
                    self.check()
                    self._look_at_connections()
                    self._reconcile()  # pods may have scaled workloads
                    self.builder.refresh_secrets(self.pods.values())
                    with suppress(TimeoutError):  # conditions of files and logs are looked at again
                        async with asyncio.timeout(_TICK_S):
                            await self._changed.wait()
        except TimeoutError:
            raise ClusterError(f"not within {within_s:g} s: {what}\n{self.report()}") from None

    def check(self) -> None:
        """Raises `ClusterError` where a pod cannot start or failed, or RBAC refused a call."""
        failed = [f"pod {pod.name}: {pod.failure}" for pod in self.pods.values() if pod.failure and not pod.deleting]
        if failures := [*self.failures, *failed, *self.api.denied]:
            raise ClusterError("\n".join([*failures, self.report()]))

    def report(self) -> str:
        """State and the end of the log of every container."""
        lines = []
        for pod in [*self.gone, *self.pods.values()]:
            for name, container in pod.containers.items():
                state = "running" if container.running else f"ended with {container.exit_code}"
                lines.append(f"--- {pod.name}/{name}: {state}, ready={container.ready}")
                lines.append(container.logs()[-_SHOWN_CHARACTERS:])
        return "\n".join(lines)

    def addresses(self, name: str) -> list[str]:
        """Of a full name: the ready pods of its Service that are not being deleted, or all where it publishes them.

        A Service resolves to its pods, also one with a cluster IP: its ports are those of its pods (tests/chart). A pod of a
        StatefulSet has a name of its own in the Service that governs the set.
        """
        if name == f"kubernetes.default.{DOMAIN}":
            return [self.builder.api_ip]
        host, _, service_name = name.removesuffix(f".{NAMESPACE}.{DOMAIN}").rpartition(".")
        service = self.rendered.find("Service", service_name)
        if service is None or not name.endswith(f".{NAMESPACE}.{DOMAIN}"):
            return []
        spec = service["spec"]
        return [
            pod.ip
            for pod in self.pods.values()
            if spec["selector"].items() <= labels_of(pod.manifest).items()
            and (spec.get("publishNotReadyAddresses") or (pod.ready and not pod.deleting))
            and host in ("", pod.manifest["spec"].get("hostname"))
        ]

    def forbidden_connections(self) -> list[str]:
        dns = dns_server(self.builder.network.host)
        wrong = {why_not(self.rendered, source, target, port) for source, target, port in self.connections}
        actors = {pod.name for pod in [*self.gone, *self.pods.values()] if labels_of(pod.manifest).get(COMPONENT) == "actor"}
        by_name = {source for source, target, _ in self.connections if target.name not in actors}
        wrong |= {why_not(self.rendered, source, dns, 53, "UDP") for source in by_name}
        return sorted(wrong - {""})

    def _look_at_connections(self) -> None:
        peers = {pod.ip: Peer(pod.name, pod.ip, NAMESPACE, pod.manifest) for pod in self.pods.values()}
        peers[self.builder.api_ip] = Peer("kubernetes", self.builder.api_ip)
        for pod in self.pods.values():
            pid = next((one.pid for one in pod.containers.values() if one.pid), None)
            ends = opened(pid) if pid else ()
            self.connections |= {(peers[pod.ip], peers[ip], port) for ip, port in ends if ip in peers}

    def _change(self) -> None:
        """Something about a pod is different: whoever waits looks again, the API shows it, the workloads react."""
        for pod in self.pods.values():
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            before = self.api.pods.get(pod.name, {}).get("metadata", {}).get("deletionTimestamp", now)
            self.api.put(pod.as_object(NAMESPACE, before))
        self._changed.set()
        self._changed = asyncio.Event()
        self._reconcile()

    def _reconcile(self) -> None:
        """Makes pods that workloads lack, and deletes the newest where they have too many."""
        self._tell_jobs()
        self._remove_claims()
        for workload in self._workloads:
            while not self.failures and (manifest := self._lacking(workload)):
                self.create(manifest)
            for pod in self._owned(workload)[workload["spec"].get("replicas", 1) :]:
                self._delete(pod)

    def _lacking(self, workload: Object) -> Object | None:
        spec, name = workload["spec"], name_of(workload)
        if workload["kind"] == "Deployment":
            lacks = len(self._owned(workload)) < spec.get("replicas", 1)
            suffix = secrets.token_hex(3)
            return pod_manifest(spec["template"], f"{name}-{suffix}", {"pod-template-hash": "0"}) if lacks else None
        index = next((index for index in range(spec.get("replicas", 1)) if f"{name}-{index}" not in self.pods), None)
        if index is None:
            return None
        labels = {"apps.kubernetes.io/pod-index": str(index), "controller-revision-hash": f"{name}-0"}
        manifest = pod_manifest(spec["template"], f"{name}-{index}", labels)
        manifest["spec"] |= {"hostname": f"{name}-{index}", "subdomain": spec["serviceName"]}
        for template in spec.get("volumeClaimTemplates") or []:
            claim = f"{name_of(template)}-{name}-{index}"
            self._make_claim(claim)
            if self.rendered.find("PersistentVolumeClaim", claim) is None:
                metadata = {**template["metadata"], "name": claim}
                self.rendered.objects.append({"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": metadata})
            volume = {"name": name_of(template), "persistentVolumeClaim": {"claimName": claim}}
            manifest["spec"].setdefault("volumes", []).append(volume)
        return manifest

    def _owned(self, workload: Object) -> list[Pod]:
        prefix = f"{name_of(workload)}-"
        return [pod for name, pod in self.pods.items() if name.startswith(prefix) and not pod.deleting]

    def _make_claim(self, name: str) -> None:
        """An empty file system that belongs to root, as most provisioners make it. One that is there stays."""
        (self.folder / "claims" / name).mkdir(parents=True, mode=0o755, exist_ok=True)

    def _delete(self, pod: Pod, grace_s: float | None = None) -> None:
        async def end() -> None:
            await pod.delete(grace_s)
            self.builder.network.remove(pod.place)
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
        self._workloads.clear()
        for pod in list(self.pods.values()):
            self._delete(pod, 0)
        if self._deletions:
            await asyncio.wait(self._deletions)


@asynccontextmanager
async def mini_cluster(folder: Path, rendered: Rendered) -> AsyncIterator[Cluster]:
    """`folder` takes volumes, claims and logs. Nothing runs in it before `start`; nothing is left at the end."""
    async with AsyncExitStack() as stack:
        network = stack.enter_context(private_network())
        api_ip = f"{network.subnet}.200"
        network.answer_at(api_ip)
        api = ApiServer(rendered, NAMESPACE)
        (folder / "claims").mkdir(parents=True)
        cluster = Cluster(PodBuilder(rendered, folder, network, api, api_ip))
        api.appeared, api.vanished, api.execute = cluster.appeared, cluster.vanished, cluster.execute
        await stack.enter_async_context(serve_names(cluster.addresses, network.host))
        await stack.enter_async_context(api.serve(api_ip, 443, folder / "api"))
        stack.push_async_callback(cluster.stop)
        yield cluster
