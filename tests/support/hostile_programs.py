"""Programs that a model might write to get out of its sandbox, each of which prints `escaped` when it did.

`{...}` are filled in: `port` of a server on loopback, `victim` a file anybody may write, `secret` a file with a secret,
`run_dir` the run's folder, `parent` the process that runs the sandbox. What an attempt raises is printed, and is no escape.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

_SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"

_CLONE = (
    _SYSCALL
    + """
import os
clone = lambda flags: libc.syscall(56 if os.uname().machine == 'x86_64' else 220, flags, 0, 0, 0, 0)
"""
)

ESCAPES = {
    "connects by TCP": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).sendall(b'x')\nprint('escaped')",
    "sends by UDP": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))
print('escaped')""",
    "listens": "import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('escaped')",
    "binds an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0escape-{parent}')\nprint('escaped')",
    "opens a ring that opens sockets": _SYSCALL
    + "parameters = (ctypes.c_char * 256)()\nif libc.syscall(425, 4, parameters) >= 0: print('escaped')",
    "reads its parent's environment": "if b'=' in open('/proc/{parent}/environ', 'rb').read(): print('escaped')",
    "reads its parent's memory": "open('/proc/{parent}/mem', 'rb')\nprint('escaped')",
    "lists processes": "import os\nif '{parent}' in os.listdir('/proc'): print('escaped')",
    "traces its parent": _SYSCALL
    + "if libc.ptrace(0x4206, {parent}, 0, 0) == 0: print('escaped'); libc.ptrace(17, {parent}, 0, 0)",
    "reads a secret": "if 'secret' in open('{secret}').read(): print('escaped')",
    "reads a secret by a symbolic link": """
import os
os.symlink('{secret}', 'link')
if 'secret' in open('link').read(): print('escaped')""",
    "reads a secret by a hard link": """
import os
os.link('{secret}', 'hard')
if 'secret' in open('hard').read(): print('escaped')""",
    "reads a secret by ..": "if 'secret' in open('../' * 12 + '{secret}'[1:]).read(): print('escaped')",
    "reads the run's passwords": "if 'password' in open('{run_dir}/secrets/nats-admin').read(): print('escaped')",
    "reads the run's samples": "if 'sample' in open('{run_dir}/../run/samples').read(): print('escaped')",
    "writes a file elsewhere": "open('{victim}', 'a').write('x')\nprint('escaped')",
    "removes a file elsewhere": "import os\nos.unlink('{victim}')\nprint('escaped')",
    "renames a file elsewhere": "import os\nos.rename('{victim}', '{victim}.new')\nprint('escaped')",
    "cuts a file elsewhere": "import os\nos.truncate('{victim}', 0)\nprint('escaped')",
    "changes a file's mode": "import os\nos.chmod('{victim}', 0o600)\nprint('escaped')",
    "changes a file's times": "import os\nos.utime('{victim}', (1, 1))\nprint('escaped')",
    "changes a file's owner": "import os\nos.chown('{victim}', os.getuid(), os.getgid())\nprint('escaped')",
    "writes to Python's library": "import os\nopen(os.path.dirname(os.__file__) + '/escape.py', 'w')\nprint('escaped')",
    "writes to shared memory": "open('/dev/shm/escape-{parent}', 'w').write('x')\nprint('escaped')",
    "leaves System V memory": _SYSCALL + "if libc.shmget(0x{parent}, 4096, 0o1666) >= 0: print('escaped')",
    "writes into /tmp": "open('/tmp/escape-{parent}', 'w').write('x')\nprint('escaped')",
    "asks whether its parent is there": "import os\nos.kill({parent}, 0)\nprint('escaped')",
    "takes its parent's priority": "import os\nos.setpriority(os.PRIO_PROCESS, {parent}, 1)\nprint('escaped')",
    "moves its parent to one core": "import os\nos.sched_setaffinity({parent}, {{0}})\nprint('escaped')",
    "takes its parent's limits": "import resource\nresource.prlimit({parent}, resource.RLIMIT_CORE, (0, 0))\nprint('escaped')",
    "starts a process": "import os\nif os.fork() == 0: os._exit(0)\nprint('escaped')",
    "starts a program": "import subprocess\nsubprocess.run(['/bin/true'], check=True)\nprint('escaped')",
    "has a signal sent to its parent": """
import fcntl, os
reading, writing = os.pipe()
fcntl.fcntl(reading, fcntl.F_SETOWN, {parent})
print('escaped')""",
    "connects with its first data": """
import socket
opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
opened.sendto(b'x', 0x20000000, ('127.0.0.1', {port}))
print('escaped')""",
    "connects by a protocol without ports to Landlock": """
import socket
socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262).connect(('127.0.0.1', {port}))
print('escaped')""",
    "sends to a socket by a pair of its own": """
import socket
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
print('escaped')""",
    "takes namespaces": _SYSCALL + "if libc.unshare(0x10000000) == 0: print('escaped')",
    "takes namespaces by a child": _CLONE + "if (pid := clone(0x10000011)) == 0: os._exit(0)\nif pid > 0: print('escaped')",
    "makes a child of its parent's": _CLONE + "if (pid := clone(0x8011)) == 0: os._exit(0)\nif pid > 0: print('escaped')",
    "lets go of its orphans": _SYSCALL + "if libc.prctl(36, 0, 0, 0, 0) == 0: print('escaped')",
    "starts a hundred processes": """
import os, time
for _ in range(100):
    if os.fork() == 0: time.sleep(100); os._exit(0)
print('escaped')""",
    "outlives its parent": _SYSCALL + "if libc.prctl(1, 0, 0, 0, 0) == 0: print('escaped')",
    "has a terminal": "open('/dev/tty', 'w').write('x')\nprint('escaped')",
    "has memory without a name": "import os\nos.memfd_create('x')\nprint('escaped')",
}

BESIDE = "print(open('{run_dir}/../beside').read())"
"""Prints `escaped` where the folder that the run's is in can be read."""

MAY = {"lists processes", "starts a process", "starts a program"}
"""What users' code may do in its sandbox, since the verifier ends all that it started."""

LEAVERS = {
    how: f"""
import ctypes, os
ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork(): os._exit(0)
        os.execv('/bin/sleep', ['sleep', '600.{{parent}}'])
{ending}"""
    for how, ending in {
        "leaves processes": "print('left')",
        "leaves processes and ends": "os._exit(0)",
        "leaves processes and crashes": "ctypes.string_at(0)",
        "leaves processes and hangs": "while True: pass",
    }.items()
}
"""In sessions of their own, without a parent; `left_by` finds them."""

HOGS = {
    "forks without end": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "takes all memory": "hoard = []\nwhile True: hoard.append(bytearray(1 << 24))",
    "takes memory in C": "b'x' * (1 << 40)",
    "computes in C": "print(10 ** (10 ** 9) % 7)",
    "sleeps": "import time\ntime.sleep(1000)",
    "stops itself": "import os, signal\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)",
    "ignores signals": """
import signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
while True: pass""",
    "prints without end": "while True:\n try: print('x' * 65536, flush=True)\n except OSError: pass",
    "complains without end": """
import sys
while True:
    try: print('x' * 65536, file=sys.stderr, flush=True)
    except OSError: pass""",
    "makes 10,000 files": "for number in range(10_000): open(f'file{number}', 'w').write('x')",
    "fills its folder": """
for number in range(10_000):
    try: open(f'file{number}', 'wb').write(bytes(1 << 16))
    except OSError: break
else: print('escaped')""",
    "starts threads without end": """
import threading, time
while True:
    try: threading.Thread(target=time.sleep, args=(100,)).start()
    except Exception: pass""",
    "nests without end": "exec('(' * 10**6)",
    "recurses in C": "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()",
    "raises with a huge text": "raise ValueError('x' * (1 << 28))",
    "fills buffers of sockets": """
import socket
sent, pairs = 0, []
try:
    while sent < 200_000_000:
        pairs.append(socket.socketpair())
        for end in pairs[-1]:
            end.setblocking(False)
            try: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            except OSError: pass
            try:
                while True: sent += end.send(bytes(1 << 16))
            except BlockingIOError: pass
    print('escaped')
except OSError: pass""",
    "closes all it has": "import os\nos.closerange(0, 256)\nwhile True: pass",
}


def left_by(parent: int) -> list[int]:
    """Processes that `LEAVERS` left, which were filled in with `parent`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"sleep\x00600.{parent}\0" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(int(pid))
    return found


@dataclass
class Surroundings:
    """What a program must not reach."""

    server: socket.socket
    secret: Path
    victim: Path
    run_dir: Path
    """In a folder that may be readable, with a file `beside` it."""
    parents: set[int] = field(default_factory=set)
    """With which programs were filled."""

    def filled(self, program: str, parent: int) -> str:
        self.parents.add(parent)
        port, paths = self.server.getsockname()[1], {"secret": self.secret, "victim": self.victim, "run_dir": self.run_dir}
        return program.format(port=port, parent=parent, **paths)

    @property
    def untouched(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.server.accept()
            return False
        state = self.victim.stat()
        return (state.st_mode & 0o777, state.st_size, self.victim.read_text()) == (0o666, 6, "intact")


@contextlib.contextmanager
def surroundings_in(folder: Path) -> Iterator[Surroundings]:
    secret, victim = folder / "secret.txt", folder / "victim.txt"
    secret.write_text("secret")
    victim.write_text("intact")
    victim.chmod(0o666)
    (secrets := (run_dir := folder / "cwd" / "run") / "secrets").mkdir(parents=True)
    (secrets / "nats-admin").write_text("admin:password")
    (run_dir / "samples").write_text("a sample")
    run_dir.with_name("beside").write_text("escaped")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield (surroundings := Surroundings(server, secret, victim, run_dir))
    for left, parent in product(("/tmp", "/dev/shm"), surroundings.parents):
        Path(left, f"escape-{parent}").unlink(missing_ok=True)
