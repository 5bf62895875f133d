"""Isolate programs that a model wrote, and users' code that reads a model's output. Linux only.

`python -m services.verifier.sandbox` prints the name of the sandbox for programs on this machine.

`run` gives a program a folder and standard input, and limits its wall-clock time, CPU time, memory and output. Except with
`none`, the program can also read Python's files, but has no network, no other files and no other processes. The sandboxes are:

    bubblewrap   separate namespaces (user, processes, network, IPC, mounts), and a folder in memory of bounded size
    landlock     kernel rules on files, from Linux 6.2 on; the folder is read-only, because nothing would bound its size
    none         limits only; for programs that the caller trusts

With the first two, seccomp admits only listed system calls. These cannot open a network socket, or start or change another
process. `confine` puts the calling process under Landlock and seccomp for good, but lets it start a few processes. This module
does not protect against kernel bugs.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from pipelinerl.errors import PipelineRLError
from services.verifier.confinement import MIB, answer_call, attach_to_parent, keep_in_bounds, libc, lower_limit, prctl


class Means(StrEnum):
    """Kinds of sandbox, strongest first."""

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    NONE = "none"


class NoSandbox(PipelineRLError):
    """A sandbox for untrusted code cannot be set up in this process."""


@dataclass(frozen=True)
class Limits:
    timeout_s: float = 5.0
    """Maximum wall-clock seconds, from which the CPU limit per process follows."""
    memory_mib: int = 512
    """Maximum address space of a process, including the interpreter's."""
    output_bytes: int = 65_536
    """Maximum size of standard output, of standard error, and of each file that the program writes."""


@dataclass(frozen=True)
class Ended:
    """The result of a program. If a signal ended the program, `exit_code` is negative, such as -9 for SIGKILL."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool


_FILES = (
    "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat close close_range "
    "stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir "
    "getdents getdents64 lseek dup dup2 dup3 flock fsync fdatasync ftruncate fallocate fadvise64 copy_file_range "
    "sendfile splice tee mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 umask pipe pipe2"
)
_MEMORY = "mmap munmap mprotect mremap madvise brk mincore msync membarrier"
_WAITING = (
    "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 "
    "timerfd_create timerfd_settime timerfd_gettime nanosleep clock_nanosleep pause alarm getitimer setitimer "
    "futex futex_waitv get_robust_list set_robust_list rseq sched_yield restart_syscall"
)
_OWN_STATE = (
    "rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack arch_prctl "
    "set_tid_address gettid getpid getppid getpgid getpgrp getsid getuid geteuid getgid getegid getresuid getresgid getgroups "
    "getrandom clock_gettime clock_getres gettimeofday time times getrusage sysinfo uname getcpu sched_getaffinity getpriority "
    "getrlimit setrlimit execve execveat exit exit_group wait4 waitid"
)
_PAIRS = "recvfrom recvmsg recvmmsg shutdown getsockopt getsockname getpeername"
_SETSOCKOPT = (*product((1,), (2, 9, 13, 20, 21)), *product((6,), (1, 4, 5, 6, 18)))
"""Permitted levels and options of setsockopt. SOL_SOCKET (1): SO_REUSEADDR, SO_KEEPALIVE, SO_LINGER and timeouts. TCP (6):
TCP_NODELAY, keepalive settings and TCP_USER_TIMEOUT. None of them enlarges a socket's buffers, whose memory no limit counts."""
_SIGNALS = "kill tkill tgkill"
_SESSIONS = "setsid setpgid pidfd_open"
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032)
"""Permitted commands of fcntl: duplication, flags, locks and pipe sizes."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Permitted requests of ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_STREAM, _SEQPACKET, _MSG_FASTOPEN = 1, 5, 0x20000000
_ALLOW, _ASK, _REFUSE = 0x7FFF0000, 0x7FC00000, 0x00050000
_EQUAL, _MASKED_EQUAL = 4, 7
_CLONE_THREAD = 0x10000
_CLONE_ASIDE = 0x7E02_8000
"""Refused flags of clone: CLONE_PARENT, which makes the new process a sibling of the caller, and the flags of namespaces."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_PRCTL = (3, 15, 16, 23, _PR_SET_NO_NEW_PRIVS)
"""Permitted options of prctl: read the dumpable flag or the capability bounding set, read or set the name, set NO_NEW_PRIVS."""
_MOST_FILES = 512
"""Maximum open files per process under `confine`. Nothing else bounds the memory in the buffers of pipes and sockets."""
_CAPABILITY_VERSION = 0x20080522
_SECCOMP_SET_MODE_FILTER = 1
_LISTENER = 1 << 3 | 1 << 5
"""SECCOMP_FILTER_FLAG_NEW_LISTENER and _WAIT_KILLABLE_RECV."""
_FOLDER, _FOLDER_MIB = "/.program", 16
"""A program's folder in bubblewrap, and the maximum size of all files in it together."""
_NAME_SERVICE_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group", "/etc/ssl")


def _seccomp(default: int, *rules: tuple[Any, ...]) -> bytes:
    """Return a seccomp program. A rule has an action, names of system calls, and comparisons of arguments, all of which must be
    true. `default`: action for other calls. Raises `OSError` if libseccomp is missing or fails."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(default)))
    try:
        for action, names, *comparisons in rules:
            wanted = b"".join(struct.pack("IiQQ", *comparison) for comparison in comparisons)  # `struct scmp_arg_cmp`
            for number in map(library.seccomp_syscall_resolve_name, names.encode().split()):
                if number < 0:  # unknown to this libseccomp or architecture
                    continue
                failed = library.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(comparisons), wanted)
                if failed:
                    raise OSError(-failed, f"seccomp rule for {names:.60}")
        with open(os.memfd_create("filter"), "r+b") as exported:
            if failed := library.seccomp_export_bpf(context, exported.fileno()):
                raise OSError(-failed, "seccomp_export_bpf")
            exported.seek(0)
            return exported.read()
    finally:
        library.seccomp_release(context)


@cache
def _filter(*, signals: bool, processes: bool = False, connects: bool = False) -> bytes:
    """Return a seccomp program that admits only listed system calls; others fail with EPERM. With `processes`, the filter's
    listener decides about new processes and threads."""
    rules: list[tuple[Any, ...]] = [
        (_ALLOW, " ".join((_FILES, _MEMORY, _WAITING, _OWN_STATE, _PAIRS))),
        (_REFUSE | errno.ENOSYS, "clone3"),  # a filter cannot read its flags; the C library then uses clone
        (_ALLOW, "prlimit64", (0, _EQUAL, 0, 0)),  # a process's own limits
        *((_ALLOW, "fcntl", (1, _EQUAL, command, 0)) for command in _FCNTL),
        *((_ALLOW, "ioctl", (1, _EQUAL, request, 0)) for request in _IOCTL),
        # no datagrams, which could be sent to other sockets
        *((_ALLOW, "socketpair", (1, _MASKED_EQUAL, 0xF, kind)) for kind in (_STREAM, _SEQPACKET)),
        (_ALLOW, "sendto sendmmsg", (3, _MASKED_EQUAL, _MSG_FASTOPEN, 0)),  # MSG_FASTOPEN would connect
        (_ALLOW, "sendmsg", (2, _MASKED_EQUAL, _MSG_FASTOPEN, 0)),
        *((_ALLOW, "setsockopt", (1, _EQUAL, level, 0), (2, _EQUAL, option, 0)) for level, option in _SETSOCKOPT),
        *((_ALLOW, "prctl", (0, _EQUAL, option, 0)) for option in _PRCTL),
    ]
    if signals:
        rules.append((_ALLOW, _SIGNALS))
    if processes:
        rules += [
            (_ALLOW, _SESSIONS),
            (_ALLOW, "prctl", (0, _EQUAL, _PR_SET_PDEATHSIG, 0), (1, _EQUAL, signal.SIGKILL, 0)),
            (_ASK, "fork vfork"),
            (_ASK, "clone", (0, _MASKED_EQUAL, _CLONE_ASIDE, 0)),
        ]
    else:
        rules.append((_ALLOW, "clone", (0, _MASKED_EQUAL, _CLONE_THREAD | _CLONE_ASIDE, _CLONE_THREAD)))
    if connects:  # TCP over IPv4 and IPv6, whose ports Landlock can restrict
        rules.append((_ALLOW, "connect"))
        for family, protocol in product((2, 10), (0, 6)):
            arguments = (0, _EQUAL, family, 0), (1, _MASKED_EQUAL, 0xF, _STREAM), (2, _EQUAL, protocol, 0)
            rules.append((_ALLOW, "socket", *arguments))
    return _seccomp(_REFUSE | errno.EPERM, *rules)


_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every architecture
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_CONNECT_TCP = 2
_LEAST, _SCOPED = 3, 6
"""First Landlock versions that can forbid truncating readable files (3), and sending signals out of the sandbox (6)."""
_SCOPES = 3
"""Landlock flags that forbid signals, and connections over abstract sockets, to processes outside the sandbox."""


def _call(number: int, *arguments: object) -> int:
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@cache
def landlock_version() -> int:
    """Return the kernel's version of Landlock; 0 if Landlock is missing or disabled."""
    try:
        return _call(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def _restrict_files(readable: Iterable[str | Path], connect_port: int | None) -> None:
    """Use Landlock to permit only reads and execution below `readable`, two devices, and TCP connections to `connect_port`."""
    version = landlock_version()
    rights = (1 << (16 if version >= 5 else 15)) - 1  # all that this version can forbid
    rules = struct.pack("QQQ", rights, 3 if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = _call(_LANDLOCK_CREATE, rules, ctypes.c_size_t(len(rules)), 0)  # older versions accept zeros at the end
    try:
        shared = dict(rule for path in readable for rule in _beside_private(os.path.realpath(path)))
        for path, allowed in {**shared, "/dev/null": _READ_FILE | _WRITE_FILE, "/dev/urandom": _READ_FILE}.items():
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                if not os.path.isdir(path):
                    allowed &= ~_READ_DIR
                _call(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", allowed, opened), 0)
            finally:
                os.close(opened)
        if connect_port is not None and version >= 4:
            _call(_LANDLOCK_ADD, ruleset, 2, struct.pack("QQ", _CONNECT_TCP, connect_port), 0)
        _give_up_privileges()
        _call(_LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _private_dirs(path: str) -> list[str]:
    """Return the folders at or below `path` that sandboxed code must not read: the run's folder and the temporary folder."""
    given = (os.environ.get(name, "") for name in ("PIPELINERL_PRIVATE_DIR", "TMPDIR"))
    return [private for each in given if each and os.path.commonpath((path, private := os.path.realpath(each))) == path]


def _beside_private(path: str) -> Iterator[tuple[str, int]]:
    """Yield rules that make all below `path` readable except private folders, which Landlock's rules cannot exclude."""
    private = _private_dirs(path)
    if not private:
        yield path, _EXECUTE | _READ_FILE | _READ_DIR
    elif path not in private:
        yield path, _READ_DIR
        for entry in os.scandir(path):  # entries that are added later cannot be read
            if not entry.is_symlink():  # a rule would apply to its target
                yield from _beside_private(entry.path)


def _give_up_privileges() -> None:
    """Drop all capabilities for good, because Landlock does not restrict all that /proc shows to root."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _restrict_calls(program: bytes, flags: int = 0) -> int:
    """Apply a seccomp program; with the flag `_LISTENER`, return the descriptor on which the kernel asks about calls."""
    instructions = ctypes.create_string_buffer(program)
    sock_fprog = struct.pack("HP", len(program) // 8, ctypes.addressof(instructions))
    return _call(317 if os.uname().machine == "x86_64" else 277, _SECCOMP_SET_MODE_FILTER, flags, sock_fprog)


def _python_paths() -> list[str]:
    paths = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", sys.base_prefix, sys.prefix)
    return [path for path in dict.fromkeys(paths) if os.path.exists(path)]


def python(source: str) -> tuple[list[str], dict[str, bytes]]:
    """Return the arguments `program` and `files` with which `run` runs the script `source`. The script may import the standard
    library and this environment's packages. Python skips start-up files, for a fast start."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    start = f"import builtins, sys; builtins.exit = builtins.quit = sys.exit; sys.path += {packages!r}; "
    start += "exec(compile(open('main.py').read(), 'main.py', 'exec'))"
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start], {"main.py": source.encode("utf-8", "replace")}


@dataclass(frozen=True)
class _Running:
    process: subprocess.Popen[bytes]
    status: Any
    printed: Any
    complained: Any
    listener: int | None


def run(program: Sequence[str], files: Mapping[str, bytes], stdin: bytes, limits: Limits, means: Means) -> Ended:
    """Run `program` in a folder with `files` until it ends or its time is over. The calling process must have one thread
    because the new process sets its limits between fork and exec. Raises `OSError` or `SubprocessError` if it cannot start."""
    with ExitStack() as stack:
        given, printed = (stack.enter_context(_in_memory(content)) for content in (stdin, b""))
        return _ended([_start(stack, program, files, given, printed, limits, means)], limits)[0]


Command = tuple[Sequence[str], Mapping[str, bytes]]


def run_pair(served: Command, asking: Command, limits: Limits, means: Means) -> tuple[Ended, Ended]:
    """Run two programs as `run` does, in separate sandboxes, until the second ends. A socket connects standard input and output
    of the first program with standard input of the second. The second can also write to this socket."""
    with ExitStack() as stack:
        ends = socket.socketpair()
        printed = stack.enter_context(_in_memory())
        running = []
        for (program, files), end, output in zip((served, asking), ends, (ends[0], printed), strict=True):
            with end:
                running.append(_start(stack, program, files, end, output, limits, means))
        first, second = _ended(running, limits)
        return first, second


def _start(
    stack: ExitStack, program: Sequence[str], files: Mapping[str, bytes], given: Any, printed: Any, limits: Limits, means: Means
) -> _Running:
    complained = stack.enter_context(_in_memory())
    folder, prefix, readable, calls, descriptors, status = None, [], [], b"", [], None
    if means is Means.BUBBLEWRAP:
        status = stack.enter_context(_in_memory())
        contents = [stack.enter_context(_in_memory(content)) for content in (_filter(signals=True), *files.values())]
        descriptors = [each.fileno() for each in (status, *contents)]
        prefix = _bubblewrap(descriptors, list(files))
    else:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="program-"))
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        if means is Means.LANDLOCK:
            readable, calls = [*_python_paths(), folder], _filter(signals=landlock_version() >= _SCOPED)
    outside, inside = map(stack.enter_context, socket.socketpair())
    is_asked = means is not Means.NONE and not _listener_refusal()
    asks = _seccomp(_ALLOW, (_ASK, "clone", (0, _MASKED_EQUAL, _CLONE_THREAD, _CLONE_THREAD))) if is_asked else b""

    def limited() -> None:
        lower_limit(resource.RLIMIT_CPU, int(limits.timeout_s) + 2, for_good=True)
        lower_limit(resource.RLIMIT_AS, limits.memory_mib * MIB, for_good=True)
        largest = max(limits.output_bytes, *map(len, files.values()))  # bubblewrap writes `files` under this limit
        lower_limit(resource.RLIMIT_FSIZE, largest, for_good=True)
        lower_limit(resource.RLIMIT_CORE, 0, for_good=True)
        lower_limit(resource.RLIMIT_NOFILE, 64, for_good=True)
        if is_asked:
            prctl(_PR_SET_NO_NEW_PRIVS, 1)
            socket.send_fds(inside, [b"."], [_restrict_calls(asks, _LISTENER)])
        if calls:
            _restrict_files(readable, None)
            _restrict_calls(calls)

    process = subprocess.Popen(
        [*prefix, *program],
        stdin=given,
        stdout=printed,
        stderr=complained,
        cwd=folder or "/",
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "OMP_NUM_THREADS": "1"},
        pass_fds=descriptors,
        start_new_session=True,
        preexec_fn=limited,
    )
    listener = socket.recv_fds(outside, 1, 1)[1][0] if is_asked else None
    if listener is not None:
        stack.callback(os.close, listener)
    return _Running(process, status, printed, complained, listener)


def _ended(running: Sequence[_Running], limits: Limits) -> list[Ended]:
    """Wait until the last program ends or its time is over, kill all that still run, and return all results."""
    last = running[-1]
    try:
        timed_out = not _ends_within(running, limits.timeout_s)
    finally:
        for each in running:
            if each is not last or timed_out:
                each.process.kill()
            each.process.wait()
    ended = []
    for each in running:
        code = each.process.returncode
        if each.status is not None and each is last and not timed_out:
            if b'"exit-code"' not in _content(each.status, 4096):
                raise OSError(f"bubblewrap does not start: {_content(each.complained, 500).decode(errors='replace')}")
            code = 128 - code if code > 128 else code
        printed = b"" if isinstance(each.printed, socket.socket) else _content(each.printed, limits.output_bytes)
        ended.append(Ended(code, printed, _content(each.complained, limits.output_bytes), timed_out))
    return ended


def confine(readable: Iterable[str | Path] = (), connect_port: int | None = None) -> None:
    """Put the rest of this program, and all that it starts, under Landlock and seccomp for good. It may write no files. It may
    read `readable`, `sys.path` and files that Python needs, but not the run's folder. With `connect_port` it may connect to
    that TCP port of any host.

    This function forks and returns in the child; the parent limits the child's processes and ends with its exit code. Raises
    `NoSandbox` if this process has more than one thread, or if this machine lacks what the sandbox needs.
    """
    threads = len(os.listdir("/proc/self/task"))  # counted before `confinement_missing` uses another thread
    if missing := confinement_missing():
        raise NoSandbox(missing)
    if threads > 1:  # Landlock restricts only the calling thread
        raise NoSandbox(f"{threads} threads run instead of one; modules of rewards and environments must not start threads")
    try:
        outside, inside = socket.socketpair()
        if child := os.fork():
            keep_in_bounds(child, outside, inside)
        outside.close()
        attach_to_parent()
        lower_limit(resource.RLIMIT_NOFILE, _MOST_FILES, for_good=True)
        # A fork waits for an answer from the process outside. The end of another child must not interrupt this wait.
        signal.siginterrupt(signal.SIGCHLD, False)
        shared = (*_python_paths(), *filter(None, sys.path), *_NAME_SERVICE_FILES, f"/proc/{os.getpid()}", *readable)
        calls = _filter(signals=True, processes=True, connects=connect_port is not None)
        _restrict_files(shared, connect_port)
        listener = _restrict_calls(calls, _LISTENER)
        with inside:
            socket.send_fds(inside, [b"."], [listener])
        os.close(listener)
    except OSError as error:
        raise NoSandbox(f"a system call failed while the sandbox was set up: {error}") from error


@cache
def confinement_missing() -> str:
    """Return what this machine lacks for `confine`; empty if nothing."""
    if landlock_version() < _SCOPED:
        return f"Landlock ABI {_SCOPED} (Linux 6.12) or later is needed; this kernel has {landlock_version()} (0 = no Landlock)"
    try:
        _filter(signals=True)
    except OSError as error:
        return f"libseccomp is needed: {error}"
    if refusal := _listener_refusal():
        return f"no seccomp listener can be added, for example because the container runtime has one: {refusal}"
    return ""


@cache
def _listener_refusal() -> str:
    """Return why this process cannot add a seccomp listener, of which Linux allows one per thread; empty if it can."""

    def listen() -> None:
        _give_up_privileges()
        os.close(_restrict_calls(_seccomp(_ALLOW), _LISTENER))

    with ThreadPoolExecutor(1) as thread:  # a filter only applies to its thread, and ends with it
        return str(thread.submit(listen).exception() or "")


def _bubblewrap(descriptors: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return bubblewrap's arguments before the program. `descriptors`: for the status, the seccomp filter and each file."""
    status, calls, *files = map(str, descriptors)
    found = os.path.abspath(shutil.which("bwrap") or "bwrap")  # the program's PATH may not include it
    command = [found, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for path in _python_paths():
        command += ["--ro-bind", path, path]
        for private in _private_dirs(os.path.realpath(path)):
            command += ["--tmpfs", private, "--remount-ro", private]
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--size", str(_FOLDER_MIB * MIB), "--tmpfs", _FOLDER]
    for name, descriptor in zip(names, files, strict=True):
        command += ["--file", descriptor, f"{_FOLDER}/{name}"]
    return [*command, "--remount-ro", "/", "--chdir", _FOLDER, "--json-status-fd", status, "--seccomp", calls, "--"]


def _in_memory(content: bytes = b"") -> Any:
    file = os.fdopen(os.memfd_create("sandbox"), "r+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _content(file: Any, most: int) -> bytes:
    return os.pread(file.fileno(), most, 0)


def _ends_within(running: Sequence[_Running], seconds: float) -> bool:
    """Return whether the last program ends in time, and answer the programs' requests for threads until then."""
    deadline_s, descriptor, waiting = time.monotonic() + seconds, os.pidfd_open(running[-1].process.pid), select.poll()
    try:
        for each in (descriptor, *(each.listener for each in running if each.listener is not None)):
            waiting.register(each, select.POLLIN)
        while (left_s := deadline_s - time.monotonic()) > 0:
            for ready, event in waiting.poll(1000 * left_s):
                if ready == descriptor:
                    return True
                if event & select.POLLIN:
                    answer_call(ready)
                else:
                    waiting.unregister(ready)  # all processes that could ask have ended
        return False
    finally:
        os.close(descriptor)


@cache
def strongest_means() -> Means:
    """Return the strongest sandbox that can run a test program on this machine."""
    program, files = python("print(1 + 1)")
    found = {Means.BUBBLEWRAP: bool(shutil.which("bwrap")), Means.LANDLOCK: landlock_version() >= _LEAST}
    for means in (means for means, is_there in found.items() if is_there):
        with suppress(OSError, subprocess.SubprocessError):
            if run(program, files, b"", Limits(timeout_s=20.0), means).stdout == b"2\n":
                return means
    return Means.NONE


if __name__ == "__main__":
    print(strongest_means())
