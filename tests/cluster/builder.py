"""From a Pod's manifest to a pod that can be started: its address, its volumes as the kubelet makes them, each container's
image, process and environment.

An image is this checkout and its environment, read-only, under `/opt/pipelinerl`, with the user, working folder and variables
of the Dockerfile. PATH and PYTHONPATH name the checkout and its environment instead. CC, which only the image has, is left out,
and so are the machine's compilers. Nothing is inherited from whoever runs the test.
Volumes are emptyDir, ConfigMap, Secret and claims; a claim's folder outlives the pod. Sizes, access modes, memory as a medium,
references to variables and updates of mounted ConfigMaps are not modelled; updates of Secrets are.
"""

from __future__ import annotations

import base64
import functools
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

from tests.chart.rendering import NAMESPACE, SERVICES, Rendered
from tests.cluster.api_server import ApiServer
from tests.cluster.objects import ClusterError, Object
from tests.cluster.pod import Container, Pod
from tests.faults.network import PrivateNetwork
from tests.images.dockerfile import DOCKERFILES, ROOT, Stage, read_dockerfile

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
SOURCE_INSIDE, ENVIRONMENT_INSIDE = "/opt/pipelinerl/source", "/opt/pipelinerl/environment"
"""Not where they are on the machine: a checkout below /tmp would be hidden by the volume that pods have there."""
USER = 10001
COMPILERS = ("*gcc*", "*g++*", "cc", "c++", "c89*", "c99*", "*cpp*", "clang*", "ld", "ld.bfd", "ld.gold", "as")
DEFAULT_MODE = 0o644
_LABEL = re.compile(r"metadata\.labels\['([^']+)'\]")


@dataclass(frozen=True)
class Image:
    """`init`: the entry point is tini, which stays the first process."""

    init: bool = False
    user: int = 0
    group: int = 0
    workdir: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def image_of(reference: str) -> Image:
    name = reference.partition("@")[0].rpartition("/")[2].partition(":")[0]
    if name not in SERVICES:
        return Image()  # the manifest names the program
    file = read_dockerfile(DOCKERFILES[name])
    stages = {stage.name: stage for stage in file.stages}
    made_from = [file.final]
    while (base := Template(made_from[0].base).safe_substitute(FLAVOUR="cpu")) in stages:
        made_from.insert(0, stages[base])
    whole = Stage("", "", [instruction for stage in made_from for instruction in stage.instructions])
    user, _, group = whole.last("USER").partition(":")
    environment = {name: value for name, value in whole.pairs("ENV").items() if name not in ("PATH", "CC")}
    return Image(whole.exec_form("ENTRYPOINT") == ["tini", "--"], int(user), int(group), whole.last("WORKDIR"), environment)


@functools.cache
def compilers() -> list[str]:
    folders = (Path("/usr/bin"), Path("/usr/local/bin"))
    return sorted({str(path) for folder in folders for pattern in COMPILERS for path in folder.glob(pattern)})


def image_paths() -> dict[str, str]:
    """Folders of this machine that the containers see, and where: the checkout, the virtual environment, its interpreter."""
    interpreter = Path(os.path.realpath(sys.executable)).parents[1]
    own = {Path(sys.base_prefix).resolve(), interpreter} - {Path("/usr"), Path("/")}
    inside = {str(ROOT): SOURCE_INSIDE, str(Path(sys.prefix).resolve()): ENVIRONMENT_INSIDE}
    return {str(path): str(path) for path in sorted(own)} | inside


def image_files(pod: Pod, nameserver: str) -> dict[str, str]:
    """Files that the image or the kubelet brings. Users: root, and the one that the Dockerfiles make."""
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\npipelinerl:x:{USER}:{USER}::/nonexistent:/usr/sbin/nologin\n",
        "/etc/group": f"root:x:0:\npipelinerl:x:{USER}:\n",
        "/etc/hostname": f"{pod.name}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n{pod.ip} {pod.name}\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "/etc/resolv.conf": f"search {NAMESPACE}.svc.cluster.local svc.cluster.local cluster.local\n"
        f"nameserver {nameserver}\noptions ndots:5\n",
    }


@dataclass(frozen=True)
class PodBuilder:
    """`folder` takes volumes, claims and logs; `api_ip`: where pods find the API server."""

    rendered: Rendered
    folder: Path
    network: PrivateNetwork
    api: ApiServer
    api_ip: str

    def build(self, manifest: Object, changed: Callable[[], None]) -> Pod:
        """Raises `ClusterError` where a real pod would wait for ever."""
        pod = Pod(manifest, str(uuid.uuid4()), self.network.add(), changed)
        spec = manifest["spec"]
        if spec.get("enableServiceLinks", True):
            raise ClusterError(f"pod {pod.name}: links to Services are not modelled; set enableServiceLinks: false")
        volumes = self._volumes(pod)

        def container(entry: Object, default_policy: str) -> Container:
            image, own = image_of(entry["image"]), self._folder(pod) / entry["name"]
            own.mkdir()
            always = entry.get("restartPolicy", default_policy) == "Always"
            launch = self._launch(entry, pod, image, volumes)
            return Container(entry, manifest, pod.place, privileges(image, manifest, entry), launch, own, changed, always)

        pod.init = [container(entry, "") for entry in spec.get("initContainers", [])]
        pod.main = [container(entry, spec.get("restartPolicy", "Always")) for entry in spec["containers"]]
        return pod

    # --- volumes -------------------------------------------------------------------------------------------------

    def _volumes(self, pod: Pod) -> dict[str, tuple[Path, bool]]:
        """By name: the folder on this machine, and whether it is read-only, as what the API server fills is."""
        folder, spec = self.volume_folder(pod, ""), pod.manifest["spec"]
        folder.mkdir(parents=True)
        volumes = {volume["name"]: self._volume(volume, folder / volume["name"], pod) for volume in spec.get("volumes", [])}
        account = spec.get("serviceAccountName", "default")
        mounts_token = (self.rendered.find("ServiceAccount", account) or {}).get("automountServiceAccountToken", True)
        if spec.get("automountServiceAccountToken", mounts_token):
            files = {"token": self.api.token_of(account), "ca.crt": self.api.ca, "namespace": NAMESPACE.encode()}
            _write_atomically(folder / "kube-api-access", files, _group_of(pod))
            volumes[TOKEN_FOLDER] = folder / "kube-api-access", True
        return volumes

    def refresh_secrets(self, pods: Iterable[Pod]) -> None:
        """A pod that is being deleted keeps what it has: its Secrets may be gone already."""
        for pod in [pod for pod in pods if not pod.deleting]:
            for volume in pod.manifest["spec"].get("volumes", []):
                folder = self.volume_folder(pod, volume["name"])
                if "secret" in volume and (files := self._files(volume)) != _shown(folder):
                    _write_atomically(folder, files, _group_of(pod))

    def volume_folder(self, pod: Pod, volume: str) -> Path:
        return self._folder(pod) / "volumes" / volume

    def _folder(self, pod: Pod) -> Path:
        return self.folder / f"{pod.name}-{pod.uid[:8]}"

    def _volume(self, volume: Mapping[str, Any], folder: Path, pod: Pod) -> tuple[Path, bool]:
        """Raises `ClusterError` where what it shows is missing."""
        group = _group_of(pod)
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
            return folder, True
        if group is not None:  # read and write on all that is there, and new files inherit the group
            for path in (folder, *folder.rglob("*")):
                if not path.is_symlink():
                    os.chown(path, -1, group)
                    path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))
        return folder, False

    def _files(self, volume: Mapping[str, Any]) -> dict[str, bytes]:
        kind, source = ("Secret", volume["secret"]) if "secret" in volume else ("ConfigMap", volume["configMap"])
        name = source["secretName" if kind == "Secret" else "name"]
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
        decode: Callable[[str], bytes] = base64.b64decode if kind == "Secret" else str.encode
        return {key: decode(value) for key, value in (found.get("data") or {}).items()}

    # --- processes -----------------------------------------------------------------------------------------------

    def _launch(self, entry: Object, pod: Pod, image: Image, volumes: Mapping[str, tuple[Path, bool]]) -> dict[str, Any]:
        """The environment: the image's variables, the API server's address, which every pod gets, the container's `env`."""
        if entry.get("envFrom"):
            raise ClusterError(f"container {entry['name']}: envFrom is not modelled")
        path = f"{ENVIRONMENT_INSIDE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        environment = {"PATH": path, "PYTHONPATH": SOURCE_INSIDE, "HOME": "/", **image.environment, "HOSTNAME": pod.name}
        environment |= {"KUBERNETES_SERVICE_HOST": self.api_ip, "KUBERNETES_SERVICE_PORT": "443"}
        environment |= {variable["name"]: self._value(variable, pod) for variable in entry.get("env") or []}
        return {
            "hostname": pod.name,
            "image_paths": image_paths(),
            "absent": compilers(),
            "files": image_files(pod, self.network.host),
            "mounts": _mounts(entry, volumes),
            "read_only_root": bool((entry.get("securityContext") or {}).get("readOnlyRootFilesystem")),
            "init": image.init and not entry.get("command"),
            "workdir": image.workdir,
            "argv": [*(entry.get("command") or ()), *(entry.get("args") or ())],
            "env": environment,
        }

    def _value(self, variable: Mapping[str, Any], pod: Pod) -> str:
        source = variable.get("valueFrom")
        if not source:
            return str(variable.get("value") or "")
        if "fieldRef" in source:
            return self._field(source["fieldRef"]["fieldPath"], pod)
        reference = source["secretKeyRef"]
        data = self._data_of("Secret", reference["name"])
        if reference["key"] not in data:
            raise ClusterError(f"couldn't find key {reference['key']} in Secret {reference['name']}")
        return data[reference["key"]].decode()

    def _field(self, path: str, pod: Pod) -> str:
        """What the downward API says. Raises `ClusterError` for a path that it has not."""
        if keyed := _LABEL.fullmatch(path):
            return str(pod.manifest["metadata"]["labels"].get(keyed[1], ""))
        known = {"metadata.name": pod.name, "metadata.namespace": NAMESPACE, "metadata.uid": pod.uid, "status.podIP": pod.ip}
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


def _group_of(pod: Pod) -> int | None:
    return (pod.manifest["spec"].get("securityContext") or {}).get("fsGroup")


def _mounts(entry: Object, volumes: Mapping[str, tuple[Path, bool]]) -> list[dict[str, Any]]:
    """Outer folders first."""
    wanted = list(entry.get("volumeMounts") or [])
    wanted += [{"name": TOKEN_FOLDER, "mountPath": TOKEN_FOLDER}] if TOKEN_FOLDER in volumes else []
    mounts = []
    for mount in sorted(wanted, key=lambda mount: len(Path(mount["mountPath"]).parts)):
        if mount["name"] not in volumes or "subPath" in mount:
            raise ClusterError(f"container {entry['name']}: volumeMounts: not found, or with a subPath: {mount['name']!r}")
        folder, read_only = volumes[mount["name"]]
        read_only = read_only or mount.get("readOnly", False)
        mounts.append({"source": str(folder), "target": mount["mountPath"], "read_only": read_only})
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
