"""A real control plane of this machine (etcd, kube-apiserver, kube-controller-manager, kube-scheduler on PATH) with a stand-in
for kubelets and volumes: four nodes, or others that a test describes. A pod on a node is ready at once, without containers.
"""

import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.chart.rendering import HELM, NAMESPACE, Object
from tests.support.machine import free_port

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
KUBECTL = HELM.with_name("kubectl")


@dataclass(eq=False)
class Node:
    """`resources` for pods, beside much of everything but devices."""

    name: str
    resources: Mapping[str, str | int] = field(default_factory=dict)
    taints: Sequence[Object] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels}
        self.resources = {"cpu": "64", "memory": "1Ti", "pods": "110", "ephemeral-storage": "4Ti", **self.resources}


NODES = [Node(f"node-{index}") for index in range(4)]
_SOON_S = 120.0


class CommandError(Exception):
    """The text is the error of the command that failed."""


@dataclass(frozen=True)
class Cluster:
    """With a `stand_in`, its pods run nothing."""

    kubeconfig: Path
    namespace: str = NAMESPACE
    stand_in: "Kubelets | None" = None

    def run(self, *command: str | Path, text: str = "") -> str:
        """Its output. Raises `CommandError`."""
        env = os.environ | {"KUBECONFIG": str(self.kubeconfig), "HELM_NAMESPACE": self.namespace}
        done = subprocess.run(command, env=env, input=text, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise CommandError(done.stderr)
        return done.stdout

    def kubectl(self, *arguments: str, text: str = "") -> str:
        return self.run(KUBECTL, "--namespace", self.namespace, *arguments, text=text)

    def get(self, kind: str, name: str) -> Object:
        return dict(json.loads(self.kubectl("get", kind, name, "--output", "json")))

    def names(self, kind: str) -> set[str]:
        return {line.partition("/")[2] for line in self.kubectl("get", kind, "--output", "name").splitlines()}


@contextmanager
def started(folder: Path) -> Iterator[Cluster]:
    """A control plane of this machine meanwhile, on loopback. Raises `TimeoutError` with its logs when it does not come up."""
    client, peer, port = (free_port() for _ in range(3))
    token, url = secrets.token_hex(16), f"https://127.0.0.1:{port}"
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    key = rsa.generate_private_key(65537, 2048)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "sa.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    kubeconfig = _kubeconfig(folder / "kubeconfig.yaml", url, token)
    etcd = f"http://127.0.0.1:{client}"
    with ExitStack() as stack:
        options = [f"--data-dir={folder / 'etcd'}", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}"]
        stack.enter_context(_process(folder, "etcd", *options, f"--listen-peer-urls=http://127.0.0.1:{peer}"))
        options = [
            f"--etcd-servers={etcd}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'sa.key'}",
            f"--service-account-signing-key-file={folder / 'sa.key'}",
        ]
        stack.enter_context(_process(folder, "kube-apiserver", *options))
        headers = {"Authorization": f"Bearer {token}"}
        api = stack.enter_context(httpx.Client(base_url=url, headers=headers, verify=False, timeout=30, trust_env=False))
        _await_ready(api, folder)
        common = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        options = [f"--service-account-private-key-file={folder / 'sa.key'}", "--controllers=*,-nodelifecycle"]
        stack.enter_context(_process(folder, "kube-controller-manager", *common, *options))
        stack.enter_context(_process(folder, "kube-scheduler", *common))
        yield Cluster(kubeconfig, stand_in=stack.enter_context(Kubelets(api)))


def _kubeconfig(file: Path, url: str, token: str) -> Path:
    parts = {"cluster": {"server": url, "insecure-skip-tls-verify": True}, "user": {"token": token}}
    parts["context"] = {"cluster": "tests", "user": "tests"}
    lists = {f"{part}s": [{"name": "tests", part: content}] for part, content in parts.items()}
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "tests", **lists}))
    return file


@contextmanager
def _process(folder: Path, name: str, *arguments: str) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log, subprocess.Popen([name, *arguments], stdout=log, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _await_ready(api: httpx.Client, folder: Path) -> None:
    end = time.monotonic() + _SOON_S
    while time.monotonic() < end:
        try:
            if api.get("/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)  # nothing tells
    logs = "\n".join(file.read_text(errors="replace")[-3000:] for file in folder.glob("*.log"))
    raise TimeoutError(f"the API server is not ready after {_SOON_S:g} s\n{logs}")


class Kubelets:
    """Nodes, and what their kubelets and a provisioner of volumes would report, several times a second."""

    def __init__(self, api: httpx.Client) -> None:
        self._api, self._ended = api, threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Self:
        self.join(NODES)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def join(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            metadata = {"name": node.name, "labels": node.labels}
            self._post("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata})
            resources = {name: str(value) for name, value in node.resources.items()}
            ready = {"type": "Ready", "status": "True", "reason": "StandIn"}
            status = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
            self._patch(f"nodes/{node.name}/status", {"status": status})
            taints = [*node.taints]  # without not-ready, which admission gave it
            self._patch(f"nodes/{node.name}", {"spec": {"taints": taints}})

    @contextmanager
    def only(self, nodes: Iterable[Node]) -> Iterator[None]:
        """The cluster has these nodes, and those that join them, meanwhile."""
        self._leave()
        self.join(nodes)
        try:
            yield
        finally:
            self._leave()
            self.join(NODES)

    def _leave(self) -> None:
        for node in self._list("nodes"):
            self._api.delete(f"/api/v1/nodes/{node['metadata']['name']}")

    def _loop(self) -> None:
        while not self._ended.wait(0.2):
            try:
                for pod in self._list("pods"):
                    self._run(pod)
                for claim in self._list("persistentvolumeclaims"):
                    if claim["status"].get("phase") == "Pending" and not claim["spec"].get("volumeName"):
                        self._provide(claim)
            except httpx.TransportError:
                continue  # the server is about to end, or slow

    def _run(self, pod: Object) -> None:
        metadata, spec = pod["metadata"], pod["spec"]
        at = f"namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if metadata.get("deletionTimestamp"):
            self._api.request("DELETE", f"/api/v1/{at}", json={"gracePeriodSeconds": 0})
        elif spec.get("nodeName") and pod["status"].get("phase") == "Pending":
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            running = {"running": {"startedAt": now}}
            conditions = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")]
            serving = {"imageID": "", "ready": True, "restartCount": 0, "state": running}
            containers = [{"name": one["name"], "image": one["image"], **serving} for one in spec["containers"]]
            status = {"phase": "Running", "conditions": conditions, "containerStatuses": containers, "startTime": now}
            self._patch(f"{at}/status", {"status": status})

    def _provide(self, claim: Object) -> None:
        metadata, spec = claim["metadata"], claim["spec"]
        volume = {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": spec.get("storageClassName", ""),
            "claimRef": {"namespace": metadata["namespace"], "name": metadata["name"]},
            "hostPath": {"path": "/nowhere"},
        }
        named = {"name": f"{metadata['namespace']}-{metadata['name']}"}
        content = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": named, "spec": volume}
        self._post("persistentvolumes", content)

    def _list(self, resource: str) -> Sequence[Object]:
        return list(self._api.get(f"/api/v1/{resource}").json().get("items", []))

    def _post(self, resource: str, content: Any) -> None:
        self._api.post(f"/api/v1/{resource}", json=content)

    def _patch(self, path: str, patch: Any) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        self._api.patch(f"/api/v1/{path}", json=patch, headers=headers)
