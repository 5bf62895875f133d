"""One container as a process: `python -I -S shim.py run|exec SPEC.json`, what a container runtime's shim does, and no more.

`run` enters the pod's network namespace, makes mount, process, IPC and host name namespaces of its own, gives the process a
root file system and becomes its parent: signals go on to it, its exit code comes back (128 + signal where one ended it).
`exec` runs one more command inside. Standard library only, because it is started for every container and exec probe.

The root file system shows the system folders of this machine (an overlay, so that mount points can be made where the machine
has none) and the folders that the spec calls image; homes, /tmp, /var and whatever else lies on the machine are empty folders.
Nothing on the machine's own file systems is changed. There are no cgroups, no user namespaces and no seccomp filters.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc")
"""Folders of the machine that stand for the image's own."""
EMPTY = (
    "home",
    "media",
    "mnt",
    "opt",
    "root",
    "run",
    "srv",
    "tmp",
    "var",
    "var/cache",
    "var/lib",
    "var/log",
    "var/tmp",
)
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x20000000,
    0x40000000,
)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def main(mode: str, spec_file: str) -> int:
    spec = json.loads(Path(spec_file).read_text())
    if mode == "exec":
        return _execute(spec)
    _enter_namespace(spec["network_namespace"], CLONE_NEWNET)
    _checked(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID), "unshare")
    reads, writes = os.pipe()  # its end comes when the program has replaced the last one that could write to it
    with open(spec["pid_file"], "w") as pid_file:  # opened here: the child's change of root is this process's too
        child = os.fork()
        if child == 0:
            os.close(reads)
            _become_container(spec, writes)
        os.close(writes)
        _forward_signals(child)
        os.read(reads, 1)
        pid_file.write(str(child))
    return _wait_for(child)


def _execute(spec: dict[str, Any]) -> int:
    """Runs a command in the container whose first process is `spec["pid"]`."""
    namespaces = [
        os.open(f"/proc/{spec['pid']}/ns/{name}", os.O_RDONLY) for name in ("net", "ipc", "uts", "pid", "mnt")
    ]
    for namespace in namespaces:
        _checked(_libc.setns(namespace, 0), "setns")
        os.close(namespace)
    child = os.fork()
    if child == 0:
        _drop_privileges(spec)
        _replace_by(spec)
    return _wait_for(child)


def _become_container(spec: dict[str, Any], starting: int) -> None:
    """Never returns; closes `starting` when the program can take signals.

    An init process stays between the namespace and the program where the image's entry point is one.
    """
    _make_root(spec)
    _checked(_libc.sethostname(spec["hostname"].encode(), len(spec["hostname"])), "sethostname")
    _drop_privileges(spec)
    if spec["init"]:
        child = os.fork()
        if child != 0:
            _forward_signals(child)
            os.close(starting)
            os._exit(_wait_for(child))
    _replace_by(spec)


def _replace_by(spec: dict[str, Any]) -> None:
    try:
        os.chdir(spec["workdir"])
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])
    except OSError as error:
        print(f"{spec['argv'][0]} cannot be run in {spec['workdir']}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _forward_signals(child: int) -> None:
    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in FORWARDED:
        signal.signal(number, forward)


def _wait_for(child: int) -> int:
    """The exit code of `child`, whatever else ends before it."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


# Root file system ----------------------------------------------------------------------------------------------------


def _make_root(spec: dict[str, Any]) -> None:
    """Order matters: mount points are made while the root can still be written to, and volumes mounted when it cannot."""
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    scratch = spec["scratch"]
    _mount("tmpfs", scratch, "tmpfs", options="size=64m,mode=755")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{scratch}/{name}")
    root = f"{scratch}/root"
    _mount("overlay", root, "overlay", options=f"lowerdir=/,upperdir={scratch}/upper,workdir={scratch}/work")
    for path in spec["absent"]:
        os.unlink(root + path)
    covered = _cover(root)
    for source, target in spec["image_paths"].items():
        _bind(source, root + target, read_only=True)
    os.makedirs(_inside(root, spec["workdir"]), exist_ok=True)
    for path, text in spec["files"].items():
        _replace_file(root + path, text)
    _mount_kernel_file_systems(root)
    for mount in spec["mounts"]:
        _make_mount_point(mount["source"], _inside(root, mount["target"]))
    if spec["read_only_root"]:
        for path in (*covered, root):
            _mount("none", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    for mount in spec["mounts"]:
        _bind(mount["source"], _inside(root, mount["target"]), read_only=mount["read_only"])
    _pivot(root)


def _cover(root: str) -> list[str]:
    """Empty folders over all that is not the system's. Returns the file systems that they are on."""
    covered = []
    for name in sorted({*os.listdir("/"), *(path for path in EMPTY if "/" not in path)}):
        path = f"{root}/{name}"
        if name in SYSTEM or name in ("proc", "sys", "dev") or os.path.islink(f"/{name}"):
            continue
        if os.path.isfile(f"/{name}"):
            os.unlink(path)
            continue
        os.makedirs(path, exist_ok=True)
        _mount("tmpfs", path, "tmpfs", options="size=64m,mode=755")
        covered.append(path)
    for name in EMPTY:
        os.makedirs(f"{root}/{name}", exist_ok=True)
    return covered


def _mount_kernel_file_systems(root: str) -> None:
    for name in ("proc", "sys", "dev"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    _mount("proc", f"{root}/proc", "proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("/sys", f"{root}/sys", flags=MS_BIND)
    _mount("none", f"{root}/sys", flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    _mount("tmpfs", f"{root}/dev", "tmpfs", options="size=1m,mode=755")
    for name in DEVICES:
        _bind(f"/dev/{name}", f"{root}/dev/{name}", read_only=False)
    for name, target in {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}.items():
        os.symlink(f"/proc/self/{target}", f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm")
    _mount("tmpfs", f"{root}/dev/shm", "tmpfs", options="size=64m,mode=1777")


def _bind(source: str, target: str, *, read_only: bool) -> None:
    _make_mount_point(source, target)
    _mount(source, target, flags=MS_BIND | MS_REC)
    if read_only:
        _mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def _make_mount_point(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()


def _inside(root: str, path: str) -> str:
    """Where `path` of the container is: a symbolic link such as /var/run -> /run is followed below `root`."""
    at = root
    for part in Path(path).parts[1:]:
        at = f"{at}/{part}"
        if os.path.islink(at):
            target = os.readlink(at)
            at = (
                _inside(root, target) if target.startswith("/") else os.path.normpath(f"{os.path.dirname(at)}/{target}")
            )
    return at


def _replace_file(path: str, text: str) -> None:
    """A new file, whatever link or file of the machine was there."""
    if os.path.lexists(path):
        os.unlink(path)
    Path(path).write_text(text)


def _pivot(root: str) -> None:
    os.chdir(root)
    _checked(_libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


# Privileges and system calls -----------------------------------------------------------------------------------------


def _drop_privileges(spec: dict[str, Any]) -> None:
    if spec["drop_capabilities"]:
        for capability in range(LAST_CAPABILITY + 1):
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL past the kernel's last one
    os.setgroups(spec["groups"])
    os.setresgid(spec["gid"], spec["gid"], spec["gid"])
    os.setresuid(spec["uid"], spec["uid"], spec["uid"])
    if spec["no_new_privileges"]:
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
    # A shim that is killed takes its child along. Last, because a change of user would undo it.
    _checked(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    os.umask(0o022)


def _enter_namespace(path: str, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    _checked(_libc.setns(descriptor, kind), f"setns({path})")
    os.close(descriptor)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _checked(_libc.mount(*arguments), f"mount {source} on {target} {kind} {flags:#x} {options}")


def _checked(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
