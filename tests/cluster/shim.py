"""One container as a process: `python -I -S shim.py SPEC.json` as the first process of new mount, process, IPC and host name
namespaces (`unshare`) in the pod's network namespace. Gives them a root file system and becomes the container's program.

The root file system shows the system folders of this machine (an overlay, so that mount points can be made where the machine
has none) and the folders that the spec calls image; homes, /tmp, /var and whatever else lies on the machine are empty folders.
Nothing on the machine's own file systems is changed. There are no cgroups, no user namespaces and no seccomp filters.
Standard library and util-linux only, because it is started for every container.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc")
"""Folders of the machine that stand for the image's own."""
EMPTY = ("home", "media", "mnt", "opt", "root", "run", "srv", "tmp", "var", "var/cache", "var/lib", "var/log", "var/tmp")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main(spec_file: str) -> None:
    """Becomes the program; where the image's entry point is an init process, it stays before the program as one."""
    spec = json.loads(Path(spec_file).read_text())
    os.umask(0o022)
    with open(spec["started_file"], "w") as started_file:  # opened here: the file is outside of the new root
        _make_root(spec)
        socket.sethostname(spec["hostname"])
        os.chdir(spec["workdir"])
        child = os.fork() if spec["init"] else 0
        if child:
            _forward_signals(child)
        if child or not spec["init"]:
            started_file.write("started")
    if child:
        sys.exit(_exit_code_of(child))
    os.execvpe(spec["argv"][0], spec["argv"], spec["env"])


def _forward_signals(child: int) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)


def _exit_code_of(child: int) -> int:
    """Once it has ended, whatever else ends before it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _make_root(spec: dict[str, Any]) -> None:
    """Order matters: mount points are made while the root can still be written to, and volumes mounted when it cannot."""
    scratch = spec["scratch"]
    _mount_tmpfs(scratch)
    for name in ("upper", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    root = f"{scratch}/root"
    _mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work", "overlay", root)
    for path in spec["absent"]:
        os.unlink(root + path)
    covered = _cover(root)
    for source, target in spec["image_paths"].items():
        _bind(source, root + target, read_only=True)
    os.makedirs(root + spec["workdir"], exist_ok=True)
    for path, text in spec["files"].items():
        Path(root + path).unlink(missing_ok=True)  # whatever link or file of the machine is there
        Path(root + path).write_text(text)
    _mount_kernel_file_systems(root)
    for mount in spec["mounts"]:
        _make_mount_point(mount["source"], root + mount["target"])
    if spec["read_only_root"]:
        for path in (*covered, root):
            _mount("-o", "remount,bind,ro", path)
    for mount in spec["mounts"]:
        _bind(mount["source"], root + mount["target"], read_only=mount["read_only"])
    os.chdir(root)
    subprocess.run(("pivot_root", ".", "."), check=True)
    subprocess.run(("umount", "--lazy", "."), check=True)
    os.chdir("/")


def _cover(root: str) -> list[str]:
    """Empty folders over all that is not the system's. Returns the file systems that they are on."""
    covered = []
    for name in sorted({*os.listdir("/"), *(path for path in EMPTY if "/" not in path)}):
        path = f"{root}/{name}"
        if name in (*SYSTEM, "proc", "sys", "dev") or os.path.islink(f"/{name}"):
            continue
        if os.path.isfile(f"/{name}"):
            os.unlink(path)
            continue
        os.makedirs(path, exist_ok=True)
        _mount_tmpfs(path)
        covered.append(path)
    for name in EMPTY:
        os.makedirs(f"{root}/{name}", exist_ok=True)
    return covered


def _mount_kernel_file_systems(root: str) -> None:
    for name in ("proc", "sys", "dev"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    _mount("-t", "proc", "-o", "nosuid,nodev,noexec", "proc", f"{root}/proc")
    _mount("--bind", "/sys", f"{root}/sys")
    _mount("-o", "remount,bind,ro", f"{root}/sys")
    _mount_tmpfs(f"{root}/dev")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")
    _mount_tmpfs(f"{root}/dev/shm", mode=1777)


def _bind(source: str, target: str, *, read_only: bool) -> None:
    _make_mount_point(source, target)
    _mount("--rbind", source, target)
    if read_only:
        _mount("-o", "remount,bind,ro", target)


def _make_mount_point(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()


def _mount_tmpfs(target: str, mode: int = 755) -> None:
    _mount("-t", "tmpfs", "-o", f"size=64m,mode={mode}", "tmpfs", target)


def _mount(*arguments: str) -> None:
    subprocess.run(("mount", *arguments), check=True)


if __name__ == "__main__":
    main(sys.argv[1])
