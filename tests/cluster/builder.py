"""From a Pod's manifest to a pod that can be started: its address, its volumes as the kubelet makes them, each container's
process and environment.

Volumes are emptyDir, ConfigMap, Secret and claims; a claim's folder outlives the pod. Sizes, access modes, memory as a medium
and updates of mounted ConfigMaps are not modelled; of Secrets they are. Nothing is inherited from whoever runs the test.
"""

from __future__ import annotations

import base64
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chart.rendering import Rendered
from tests.cluster.api_server import ApiServer
from tests.cluster.container import Container
from tests.cluster.images import Image, absent_files, image_environment, image_files, image_of, image_paths
from tests.cluster.objects import ClusterError, Object
from tests.cluster.pod import Pod
from tests.faults.network import PrivateNetwork

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
NETWORK_NAMESPACES = "/var/run/netns"
DEFAULT_MODE = 0o644
_REFERENCE = re.compile(r"\$(?:\$|\(([^)]*)\))")
_KEYED = re.compile(r"metadata\.labels\['([^']+)'\]")


@dataclass(frozen=True)
class Volume:
    """`folder` on this machine. What the API server fills cannot be written to, whatever the mount says."""

    folder: Path
    read_only: bool


@dataclass(frozen=True)
class PodBuilder:
    """`folder` takes volumes, claims and logs; `api_ip`: where pods find the API server."""

    rendered: Rendered
    namespace: str
    folder: Path
    network: PrivateNetwork
    api: ApiServer
    api_ip: str
    images: Mapping[str, Image]

    def build(self, manifest: Object, changed: Callable[[], None]) -> Pod:
        """Raises `ClusterError` where a real pod would wait for ever."""
        pod = Pod(manifest, str(uuid.uuid4()), self.network.add(), changed)
        folder, spec = self._folder(pod), manifest["spec"]
        if spec.get("enableServiceLinks", True):
            raise ClusterError(f"pod {pod.name}: links to Services are not modelled; set enableServiceLinks: false")
        volumes = self._volumes(pod)

        def container(entry: Object, always: bool) -> Container:
            image, own = image_of(entry["image"], self.images), folder / entry["name"]
            own.mkdir()
            options, launch = privileges(image, manifest, entry), self._launch(entry, pod, image, volumes)
            namespace = f"{NETWORK_NAMESPACES}/{pod.place.namespace}"
            return Container(entry, manifest, pod.ip, namespace, options, launch, own, changed, always)

        pod.init = [container(entry, entry.get("restartPolicy") == "Always") for entry in spec.get("initContainers", [])]
        pod.main = [container(entry, spec.get("restartPolicy", "Always") == "Always") for entry in spec["containers"]]
        return pod

    # --- volumes -------------------------------------------------------------------------------------------------

    def _volumes(self, pod: Pod) -> dict[str, Volume]:
        folder = self.volume_folder(pod, "")
        folder.mkdir(parents=True)
        spec = pod.manifest["spec"]
        group = (spec.get("securityContext") or {}).get("fsGroup")
        volumes = {volume["name"]: self._volume(volume, folder / volume["name"], group) for volume in spec.get("volumes", [])}
        account = spec.get("serviceAccountName", "default")
        mounts_token = (self.rendered.find("ServiceAccount", account) or {}).get("automountServiceAccountToken", True)
        if spec.get("automountServiceAccountToken", mounts_token):
            files = {"token": self.api.token_of(account), "ca.crt": self.api.ca, "namespace": self.namespace.encode()}
            _write_atomically(folder / "kube-api-access", files, group)
            volumes[TOKEN_FOLDER] = Volume(folder / "kube-api-access", read_only=True)
        return volumes

    def refresh_secrets(self, pods: Iterable[Pod]) -> None:
        """A pod that is being deleted keeps what it has: its Secrets may be gone already."""
        for pod in [pod for pod in pods if not pod.deleting]:
            for volume in pod.manifest["spec"].get("volumes", []):
                folder = self.volume_folder(pod, volume["name"])
                if "secret" in volume and (files := self._files(volume)) != _shown(folder):
                    _write_atomically(folder, files, (pod.manifest["spec"].get("securityContext") or {}).get("fsGroup"))

    def volume_folder(self, pod: Pod, volume: str) -> Path:
        return self._folder(pod) / "volumes" / volume

    def _folder(self, pod: Pod) -> Path:
        return self.folder / f"{pod.name}-{pod.uid[:8]}"

    def _volume(self, volume: Mapping[str, Any], folder: Path, group: int | None) -> Volume:
        """Raises `ClusterError` where what it shows is missing."""
        if "persistentVolumeClaim" in volume:
            name = volume["persistentVolumeClaim"]["claimName"]
            folder = self.folder / "claims" / name
            if not folder.is_dir():
                raise ClusterError(f'persistentvolumeclaim "{name}" not found')
        elif "emptyDir" in volume:
            folder.mkdir()
            folder.chmod(0o777)
        else:
            _write_atomically(folder, self._files(volume), group)
            return Volume(folder, read_only=True)
        if group is not None:  # read and write on all that is there, and new files inherit the group
            for path in (folder, *folder.rglob("*")):
                if not path.is_symlink():
                    os.chown(path, -1, group)
                    path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
        return Volume(folder, read_only=False)

    def _files(self, volume: Mapping[str, Any]) -> dict[str, bytes]:
        (source_kind,) = volume.keys() - {"name"}
        source = volume[source_kind]
        if source_kind not in ("configMap", "secret") or "defaultMode" in source:
            raise ClusterError(f"volume {volume['name']}: {source_kind} {sorted(source)} is not modelled")
        kind, name = ("ConfigMap", source["name"]) if source_kind == "configMap" else ("Secret", source["secretName"])
        data = self._data_of(kind, name)
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        if missing := [item["key"] for item in items if item["key"] not in data]:
            raise ClusterError(f"MountVolume.SetUp failed: references non-existent {kind} key: {missing[0]} of {name}")
        return {item["path"]: data[item["key"]] for item in items}

    def _data_of(self, kind: str, name: str) -> dict[str, bytes]:
        """Entries of a ConfigMap or Secret. Raises `ClusterError` where there is no such object."""
        found = self.rendered.find(kind, name)
        if found is None:
            raise ClusterError(f'{kind.lower()} "{name}" not found')
        data = found.get("data") or {}
        if kind == "Secret":
            return {key: base64.b64decode(value, validate=True) for key, value in data.items()}
        return {key: value.encode() for key, value in data.items()}

    # --- processes -----------------------------------------------------------------------------------------------

    def _launch(self, entry: Object, pod: Pod, image: Image, volumes: Mapping[str, Volume]) -> dict[str, Any]:
        environment = self._environment(entry, pod, image)
        return {
            "hostname": pod.name,
            "image_paths": image_paths(),
            "absent": absent_files(image),
            "files": image_files(pod.name, pod.ip, self.network.host, self.namespace),
            "mounts": _mounts(entry, volumes),
            "read_only_root": bool((entry.get("securityContext") or {}).get("readOnlyRootFilesystem")),
            "init": image.init and not entry.get("command"),
            "workdir": entry.get("workingDir", image.workdir),
            "argv": [expanded(part, environment) for part in image.command(entry.get("command"), entry.get("args"))],
            "env": environment,
        }

    def _environment(self, entry: Object, pod: Pod, image: Image) -> dict[str, str]:
        """The image's variables, the API server's address, which every pod gets, and the container's `env` over them."""
        if entry.get("envFrom"):
            raise ClusterError(f"container {entry['name']}: envFrom is not modelled")
        api = {
            "KUBERNETES_SERVICE_HOST": self.api_ip,
            "KUBERNETES_SERVICE_PORT": "443",
            "KUBERNETES_PORT": f"tcp://{self.api_ip}:443",
        }
        own: dict[str, str] = {}
        for variable in entry.get("env") or []:
            own[variable["name"]] = self._value(variable, pod, own)
        return {**image_environment(image), **api, "HOSTNAME": pod.name, **own}

    def _value(self, variable: Mapping[str, Any], pod: Pod, earlier: Mapping[str, str]) -> str:
        source = variable.get("valueFrom")
        if not source:
            return expanded(str(variable.get("value") or ""), earlier)
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"], pod)
        if "secretKeyRef" not in source:
            raise ClusterError(f"variable {variable['name']}: {sorted(source)} is not modelled")
        reference = source["secretKeyRef"]
        data = self._data_of("Secret", reference["name"])
        if reference["key"] not in data:
            raise ClusterError(f"couldn't find key {reference['key']} in Secret {reference['name']}")
        return data[reference["key"]].decode()

    def _field(self, path: str, pod: Pod) -> str:
        """What the downward API says. Raises `ClusterError` for a path that it has not."""
        known = {
            "metadata.name": pod.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": pod.uid,
            "status.podIP": pod.ip,
        }
        if keyed := _KEYED.fullmatch(path):
            return str(pod.manifest["metadata"]["labels"].get(keyed[1], ""))
        if path not in known:
            raise ClusterError(f"field path {path!r} is not supported by the downward API")
        return known[path]


def privileges(image: Image, pod: Object, container: Object) -> list[str]:
    """Options of setpriv for who a process is and what it may: the container's securityContext over the pod's over the image's.

    Raises `ClusterError` where runAsNonRoot forbids the user.
    """
    of_pod = pod["spec"].get("securityContext") or {}
    context = {**of_pod, **(container.get("securityContext") or {})}
    user, group = context.get("runAsUser", image.user), context.get("runAsGroup", image.group)
    if context.get("runAsNonRoot") and user == 0:
        raise ClusterError(f"container {container['name']}: has runAsNonRoot and image will run as root")
    groups = sorted({group, of_pod.get("fsGroup", group)})
    options = [f"--reuid={user}", f"--regid={group}", f"--groups={','.join(map(str, groups))}"]
    options += ["--bounding-set=-all"] if "ALL" in context.get("capabilities", {}).get("drop", []) else []
    return options + (["--no-new-privs"] if context.get("allowPrivilegeEscalation") is False else [])


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` becomes the value, `$$` a dollar; a name that is not there stays as it is written."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else variables.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def _mounts(entry: Object, volumes: Mapping[str, Volume]) -> list[dict[str, Any]]:
    """Outer folders first."""
    wanted = list(entry.get("volumeMounts") or [])
    if TOKEN_FOLDER in volumes:
        wanted.append({"name": TOKEN_FOLDER, "mountPath": TOKEN_FOLDER})
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


def _write_atomically(folder: Path, files: Mapping[str, bytes], group: int | None) -> None:
    """The kubelet's layout: the files in `..data`, a link to a folder of this version, and links to them beside it."""
    version = folder / f"..version-{len(list(folder.glob('..version-*')))}"
    version.mkdir(parents=True)
    for name, content in files.items():
        path = version / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(DEFAULT_MODE if group is None else DEFAULT_MODE | 0o440)
        os.chown(path, -1, -1 if group is None else group)
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").replace(folder / "..data")
    for path in version.iterdir():
        if not (folder / path.name).is_symlink():
            (folder / path.name).symlink_to(f"..data/{path.name}")


def _shown(folder: Path) -> dict[str, bytes]:
    data = folder / "..data"
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*") if path.is_file()}
