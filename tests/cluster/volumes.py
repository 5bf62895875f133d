"""Volumes of a pod as folders of this machine, with the owners and modes that the kubelet gives them.

emptyDir, ConfigMap, Secret and claims. A claim's folder outlives the pod; sizes, access modes,
memory as a medium and updates of mounted ConfigMaps are not modelled. Anything else is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.environment import PodFacts, data_of
from tests.cluster.objects import ClusterError, Objects, name_of

DEFAULT_MODE = 0o644


@dataclass(frozen=True)
class Volume:
    """`folder` on this machine. What the API server fills cannot be written to, whatever the mount says."""

    folder: Path
    read_only: bool


@dataclass(frozen=True)
class File:
    path: str
    content: bytes
    mode: int


@dataclass(frozen=True)
class VolumeMaker:
    """`folder`: of this pod; `claims`: where claims live; `token_files`: of its ServiceAccount, by file name."""

    objects: Objects
    facts: PodFacts
    folder: Path
    claims: Path
    token_files: Mapping[str, bytes]

    def make(self, volume: Mapping[str, Any]) -> Volume:
        """Raises `ClusterError` where what it shows is missing."""
        name, group = volume["name"], _fs_group(self.facts)
        if "persistentVolumeClaim" in volume:
            return Volume(self._claim(volume["persistentVolumeClaim"]["claimName"], group), read_only=False)
        folder = self.folder / name
        folder.mkdir(parents=True)
        if "emptyDir" in volume:
            folder.chmod(0o777)
            _give_to_group(folder, group)
            return Volume(folder, read_only=False)
        _write_atomically(folder, self._files(volume), group)
        return Volume(folder, read_only=True)

    def token_volume(self) -> Volume:
        """What admission adds to a pod whose ServiceAccount's token is mounted."""
        folder = self.folder / "kube-api-access"
        folder.mkdir()
        files = [File(name, content, DEFAULT_MODE) for name, content in self.token_files.items()]
        _write_atomically(folder, files, _fs_group(self.facts))
        return Volume(folder, read_only=True)

    def _claim(self, claim: str, group: int | None) -> Path:
        folder = self.claims / claim
        if not folder.is_dir():
            raise ClusterError(f'persistentvolumeclaim "{claim}" not found')
        _give_to_group(folder, group)
        return folder

    def _files(self, volume: Mapping[str, Any]) -> list[File]:
        if "configMap" in volume:
            source = volume["configMap"]
            found = self.objects.find("ConfigMap", source["name"])
        elif "secret" in volume:
            source = volume["secret"]
            found = self.objects.find("Secret", source["secretName"])
        else:
            kinds = sorted(set(volume) - {"name"})
            raise ClusterError(f"volume {volume['name']} of pod {name_of(self.facts.pod)}: {kinds} is not modelled")
        kind, name = ("configmap", source["name"]) if "configMap" in volume else ("secret", source["secretName"])
        if found is None:
            raise ClusterError(f'MountVolume.SetUp failed: {kind} "{name}" not found')
        data, mode = data_of(found), source.get("defaultMode", DEFAULT_MODE)
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        if missing := [item["key"] for item in items if item["key"] not in data]:
            raise ClusterError(f"MountVolume.SetUp failed: references non-existent {kind} key: {missing[0]} of {name}")
        return [File(item["path"], data[item["key"]], item.get("mode", mode)) for item in items]


def _fs_group(facts: PodFacts) -> int | None:
    return (facts.pod["spec"].get("securityContext") or {}).get("fsGroup")


def _give_to_group(folder: Path, group: int | None) -> None:
    """fsGroup: group read and write on all that is there, and new files inherit the group."""
    if group is None:
        return
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))


def _write_atomically(folder: Path, files: Iterable[File], group: int | None) -> None:
    """The kubelet's layout: the files in `..data`, a link to a folder of this version, and links to them beside it."""
    version = folder / "..2000_01_01"
    version.mkdir()
    for file in files:
        path = version / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(file.mode)
        if group is not None:
            os.chown(path, -1, group)
            path.chmod(file.mode | 0o440)
    (folder / "..data").symlink_to(version.name)
    for path in version.iterdir():
        (folder / path.name).symlink_to(f"..data/{path.name}")


def make_claim(claims: Path, name: str) -> None:
    """An empty file system that belongs to root, as most provisioners make it. One that is there stays."""
    (claims / name).mkdir(parents=True, mode=0o755, exist_ok=True)
