"""What stands for a container image: this checkout and its environment, read-only, under `/opt/pipelinerl`.

Entry point, command, user, working folder and variables are those of the Dockerfile; PATH and PYTHONPATH name the checkout and
its environment instead, and CC, which only the image has, is left out. Nothing else of the test's own environment is seen.
The machine's compilers are not there either, since the images have none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from tests.cluster.objects import ClusterError
from tests.images.dockerfile import Stage, read_dockerfile

SOURCE = Path(__file__).resolve().parents[2]
SOURCE_INSIDE, ENVIRONMENT_INSIDE = "/opt/pipelinerl/source", "/opt/pipelinerl/environment"
"""Not where they are on the machine: a checkout below /tmp would be hidden by the volume that pods have there."""
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
    absent: tuple[str, ...] = ()
    """Programs of this machine that the image has not: patterns of names."""

    def command(self, command: Sequence[str] | None, arguments: Sequence[str] | None) -> list[str]:
        """The Pod's `command` replaces entry point and arguments of the image, its `args` only the latter."""
        if command:
            return [*command, *(arguments or ())]
        return [*self.entrypoint, *(self.arguments if arguments is None else arguments)]


NATS = Image(entrypoint=("nats-server",), arguments=("--config", "nats-server.conf"))
"""The official image's entry point puts `nats-server` before arguments that begin with a dash, and execs."""
COMPILERS = ("*gcc*", "*g++*", "cc", "c++", "c89*", "c99*", "*cpp*", "clang*", "ld", "ld.bfd", "ld.gold", "as")
_NOT_HERE = ("PATH", "CC")


def docker_image(dockerfile: Path, **arguments: str) -> Image:
    file = read_dockerfile(dockerfile)
    stages = {stage.name: stage for stage in file.stages}
    made_from = [file.final]
    while (base := Template(made_from[0].base).safe_substitute(arguments)) in stages:
        made_from.insert(0, stages[base])
    whole = Stage("", "", [instruction for stage in made_from for instruction in stage.instructions])
    user, _, group = whole.last("USER").partition(":")
    entrypoint = whole.exec_form("ENTRYPOINT")
    if entrypoint != ["tini", "--"]:
        raise ClusterError(f"{dockerfile}: entry point {entrypoint} is not modelled")
    return Image(
        arguments=tuple(whole.exec_form("CMD")),
        init=True,
        user=int(user),
        group=int(group),
        workdir=whole.last("WORKDIR"),
        environment={name: value for name, value in whole.pairs("ENV").items() if name not in _NOT_HERE},
        absent=COMPILERS,
    )


def absent_files(image: Image) -> list[str]:
    """Programs of this machine that the image has not."""
    folders = [Path(folder) for folder in ("/usr/bin", "/usr/local/bin")]
    return sorted({str(path) for folder in folders for pattern in image.absent for path in folder.glob(pattern)})


def product_images() -> dict[str, Image]:
    names = ("actor", "trainer", "verifier")
    of = {name: docker_image(SOURCE / "services" / name / "Dockerfile", FLAVOUR="cpu") for name in names}
    return of | {"nats": NATS}


def image_of(reference: str, images: Mapping[str, Image]) -> Image:
    name = reference.partition("@")[0].rpartition("/")[2].partition(":")[0]
    for known, image in images.items():
        if name == known or name.endswith(f"-{known}"):
            return image
    raise ClusterError(f"image {reference!r}: no such image; there are {', '.join(images)}")


def image_paths() -> dict[str, str]:
    """Folders of this machine that the containers see, and where: the checkout, the virtual environment, its interpreter."""
    interpreter = Path(os.path.realpath(sys.executable)).parents[1]
    own = {Path(sys.base_prefix).resolve(), interpreter} - {Path("/usr"), Path("/")}
    inside = {str(SOURCE): SOURCE_INSIDE, str(Path(sys.prefix).resolve()): ENVIRONMENT_INSIDE}
    return {str(path): str(path) for path in sorted(own)} | inside


def image_environment(image: Image) -> dict[str, str]:
    path = f"{ENVIRONMENT_INSIDE}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "PYTHONPATH": SOURCE_INSIDE, "HOME": "/", **image.environment}


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
