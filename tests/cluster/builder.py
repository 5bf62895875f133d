"""From a Pod's manifest to a pod that can be started: address, volumes, each container's process and environment."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.api_server import ApiServer
from tests.cluster.container import Process, identity
from tests.cluster.environment import PodFacts, expanded, resolved_environment
from tests.cluster.images import Image, absent_files, image_environment, image_files, image_of, image_paths
from tests.cluster.objects import ClusterError, Object, Objects, name_of
from tests.cluster.pod import Container, Pod
from tests.cluster.probes import Prober
from tests.cluster.rbac import account_of, mounts_token
from tests.cluster.volumes import Volume, VolumeMaker
from tests.faults.network import Place, PrivateNetwork

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
NETWORK_NAMESPACES = "/var/run/netns"


@dataclass
class PodBuilder:
    """`places`: network namespaces of the pods that are there, by pod name."""

    objects: Objects
    namespace: str
    folder: Path
    network: PrivateNetwork
    api: ApiServer
    cluster_ips: Mapping[str, str]
    images: Mapping[str, Image]
    places: dict[str, Place] = field(default_factory=dict)

    def build(self, manifest: Object, changed: Callable[[], None]) -> Pod:
        """Raises `ClusterError` where a real pod would wait for ever."""
        name = name_of(manifest)
        place, uid = self.network.add(), str(uuid.uuid4())
        self.places[name] = place
        facts = PodFacts(manifest, self.namespace, uid, place.address)
        folder = self.folder / f"{name}-{uid[:8]}"
        volumes = self._volumes(facts, folder / "volumes")
        spec = manifest["spec"]

        def container(entry: Object, always: bool) -> Container:
            process = Process(entry["name"], self._process_spec(entry, facts, volumes, place), folder / entry["name"])
            process.folder.mkdir()
            prober = Prober(manifest, place.address, process)
            on_failure = spec.get("restartPolicy", "Always") == "OnFailure"
            grace_s = float(spec.get("terminationGracePeriodSeconds", 30))
            return Container(entry, process, prober, changed, always, on_failure, grace_s)

        init = [container(entry, entry.get("restartPolicy") == "Always") for entry in spec.get("initContainers") or []]
        main = [container(entry, spec.get("restartPolicy", "Always") == "Always") for entry in spec["containers"]]
        return Pod(manifest, uid, place.address, init, main, changed)

    def _volumes(self, facts: PodFacts, folder: Path) -> dict[str, Volume]:
        folder.mkdir(parents=True)
        token_files = {}
        if mounts_token(self.objects, facts.pod):
            self._check_account(facts.pod)
            token_files = {
                "token": self.api.token_of(account_of(facts.pod)),
                "ca.crt": self.api.ca,
                "namespace": self.namespace.encode(),
            }
        maker = VolumeMaker(self.objects, facts, folder, self.folder / "claims", token_files)
        volumes = {volume["name"]: maker.make(volume) for volume in facts.pod["spec"].get("volumes") or []}
        if token_files:
            volumes[TOKEN_FOLDER] = maker.token_volume()
        return volumes

    def _check_account(self, pod: Object) -> None:
        account = account_of(pod)
        if account != "default" and self.objects.find("ServiceAccount", account) is None:
            raise ClusterError(f'error looking up service account: serviceaccount "{account}" not found')

    def _process_spec(
        self, entry: Object, facts: PodFacts, volumes: Mapping[str, Volume], place: Place
    ) -> dict[str, Any]:
        image = image_of(entry["image"], self.images)
        environment = resolved_environment(
            entry, facts, self.objects, {**image_environment(image), **self._links(facts.pod)}
        )
        command = image.command(entry.get("command"), entry.get("args"))
        if not command:
            raise ClusterError(f"container {entry['name']}: no command specified")
        name = name_of(facts.pod)
        return {
            **identity(image, facts.pod, entry),
            "network_namespace": f"{NETWORK_NAMESPACES}/{place.namespace}",
            "hostname": name,
            "image_paths": image_paths(),
            "absent": absent_files(image),
            "files": image_files(name, facts.ip, self.network.host, self.namespace),
            "mounts": self._mounts(entry, facts, volumes),
            "init": image.init and not entry.get("command"),
            "workdir": entry.get("workingDir", image.workdir),
            "argv": [expanded(str(part), environment) for part in command],
            "env": environment,
        }

    def _links(self, pod: Object) -> dict[str, str]:
        """The API server's address, which every pod gets."""
        if pod["spec"].get("enableServiceLinks", True):
            raise ClusterError(f"pod {name_of(pod)}: links to Services are not modelled; set enableServiceLinks: false")
        host = self.cluster_ips["kubernetes"]
        return {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": "443",
            "KUBERNETES_PORT": f"tcp://{host}:443",
        }

    def _mounts(self, entry: Object, facts: PodFacts, volumes: Mapping[str, Volume]) -> list[dict[str, Any]]:
        wanted = list(entry.get("volumeMounts") or [])
        if TOKEN_FOLDER in volumes:
            wanted.append({"name": TOKEN_FOLDER, "mountPath": TOKEN_FOLDER, "readOnly": True})
        mounts = []
        for mount in sorted(wanted, key=lambda mount: len(Path(mount["mountPath"]).parts)):
            if mount["name"] not in volumes:
                raise ClusterError(f"container {entry['name']}: volumeMounts: not found: {mount['name']!r}")
            volume = volumes[mount["name"]]
            if "subPath" in mount:
                raise ClusterError(f"container {entry['name']}: subPath is not modelled")
            read_only = volume.read_only or mount.get("readOnly", False)
            mounts.append({"source": str(volume.folder), "target": mount["mountPath"], "read_only": read_only})
        return mounts
