"""What stands for a container image: this checkout and its environment, read-only, at their own paths.

An image's entry point and user are the Dockerfile's. Of the test's own environment a container sees PATH and PYTHONPATH as they
are here, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.objects import ClusterError

SOURCE = Path(__file__).resolve().parents[2]
USER = 10001


@dataclass(frozen=True)
class Image:
    """`init`: the entry point is tini, which stays the first process. `entrypoint`: what stands before a Pod's args."""

    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    init: bool = False
    user: int = 0
    group: int = 0
    workdir: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, command: Sequence[str] | None, arguments: Sequence[str] | None) -> list[str]:
        """The Pod's `command` replaces entry point and arguments of the image, its `args` only the latter."""
        if command:
            return [*command, *(arguments or ())]
        return [*self.entrypoint, *(self.arguments if arguments is None else arguments)]


SERVICE = Image(init=True, user=USER, group=USER, workdir="/")
NATS = Image(entrypoint=("nats-server",), arguments=("--config", "nats-server.conf"))
"""The official image's entry point puts `nats-server` before arguments that begin with a dash, and execs."""

IMAGES = {"actor": SERVICE, "trainer": SERVICE, "verifier": SERVICE, "nats": NATS}


def image_of(reference: str, images: Mapping[str, Image] = IMAGES) -> Image:
    """By the last part of the repository: registry.example/team/pipelinerl-actor:1.2 is `actor`."""
    name = reference.partition("@")[0].rpartition("/")[2].partition(":")[0]
    for known, image in images.items():
        if name == known or name.endswith(f"-{known}"):
            return image
    raise ClusterError(f"image {reference!r}: no such image; there are {', '.join(images)}")


def image_paths() -> list[str]:
    """Folders of this machine that the containers see: the checkout, the virtual environment, its interpreter."""
    interpreter = Path(os.path.realpath(sys.executable)).parents[1]
    candidates = (SOURCE, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), interpreter)
    return sorted({str(path) for path in candidates if path not in (Path("/usr"), Path("/"))})


def image_environment(image: Image) -> dict[str, str]:
    """What a container starts with, before the Pod's own variables."""
    path = f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "PYTHONPATH": str(SOURCE), "HOME": "/", **image.environment}


def image_files(pod_name: str, ip: str, nameserver: str, namespace: str) -> dict[str, str]:
    """Files that the image or the kubelet brings. Users: root, and the one that the Dockerfiles make."""
    search = " ".join(f"{prefix}svc.cluster.local" for prefix in (f"{namespace}.", "")) + " cluster.local"
    return {
        "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\npipelinerl:x:{USER}:{USER}::/nonexistent:/usr/sbin/nologin\n",
        "/etc/group": f"root:x:0:\npipelinerl:x:{USER}:\n",
        "/etc/hostname": f"{pod_name}\n",
        "/etc/hosts": f"127.0.0.1 localhost\n::1 localhost\n{ip} {pod_name}\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
        "/etc/resolv.conf": f"search {search}\nnameserver {nameserver}\noptions ndots:5\n",
    }
