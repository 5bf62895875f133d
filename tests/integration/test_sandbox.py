"""Programs that try to get out, in each sandbox that this machine has. The same programs get out where there is none."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from services.verifier.confinement import children
from services.verifier.sandbox import Ended, Limits, Means, confinement_missing, landlock_version, python, run, strongest_means
from tests.support.hostile_programs import BESIDE, ESCAPES, HOGS, LEAVERS, Surroundings, left_by, surroundings_in
from tests.support.machine import ends_within, wait_until


class Alone:
    """A process of one thread, which `run` is for and this one, after tests with gRPC, is not."""

    def __init__(self, process: ProcessPoolExecutor) -> None:
        self._process = process
        self.pid: int = self.call(os.getpid)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._process.submit(function, *arguments).result()

    def attempt(self, source: str, means: Means, **limits: float) -> Ended:
        ended = self.call(run, *python(source), b"", Limits(**{"timeout_s": 30.0, **limits}), means)
        assert isinstance(ended, Ended)
        return ended


@contextmanager
def one_thread() -> Iterator[Alone]:
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        yield Alone(process)


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with one_thread() as process:
        yield process


def missing(means: Means, alone: Alone) -> str:
    """Why this machine does not have it; empty when it has."""
    try:
        ended = alone.attempt("print('up')", means)
    except FileNotFoundError:
        return f"{means} is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernel permits no {means}: {error}"
    return "" if ended.stdout == b"up\n" else ended.stderr.decode()


@pytest.fixture(scope="module", params=[Means.BUBBLEWRAP, Means.LANDLOCK])
def means(request: pytest.FixtureRequest, alone: Alone) -> Means:
    if why := missing(request.param, alone):
        pytest.skip(why)
    return request.param


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    with surroundings_in(tmp_path) as found:
        yield found


def state(pid: int) -> tuple[set[int], int, list[int]]:
    return os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid), children(pid)


@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out(name: str, means: Means, alone: Alone, surroundings: Surroundings) -> None:
    before = state(alone.pid)
    ended = alone.attempt(surroundings.filled(ESCAPES[name], alone.pid), means)
    assert b"escaped" not in ended.stdout, ended
    assert not ended.timed_out
    assert surroundings.untouched
    assert state(alone.pid) == before


def test_the_runs_folder_is_kept_out_of_what_a_program_may_read(means: Means, surroundings: Surroundings) -> None:
    """Where Python's own folder holds it, as in a project that is an environment itself."""
    programs = [surroundings.filled(program, 0) for name, program in ESCAPES.items() if "the run's" in name]
    assert len(programs) == 2
    with one_thread() as alone:
        alone.call(exec, f"import sys; sys.prefix = {str(surroundings.run_dir.parent)!r}")
        assert all(b"escaped" in alone.attempt(program, means).stdout for program in programs)
        alone.call(exec, f"import os; os.environ['PIPELINERL_PRIVATE_DIR'] = {str(surroundings.run_dir)!r}")
        assert not any(b"escaped" in alone.attempt(program, means).stdout for program in programs)
        writes = f"open('{surroundings.run_dir}/new', 'w').write('x'); print('escaped')"
        assert b"escaped" not in alone.attempt(writes, means).stdout
        assert b"escaped" in alone.attempt(surroundings.filled(BESIDE, 0), means).stdout


UNSAFE_WITHOUT_SANDBOX = {
    "traces its parent", "writes to Python's library", "takes its parent's priority",
    "moves its parent to one core", "leaves System V memory", "connects by a protocol without ports to Landlock",
    "connects with its first data", "opens a ring that opens sockets", "has a terminal",
    "sends by UDP", "takes namespaces", "takes namespaces by a child", "makes a child of its parent's",
    "starts a hundred processes",
}  # fmt: skip
"""What would hurt this process or outlast the test, or what a machine may forbid by itself."""


@pytest.mark.parametrize("name", sorted(ESCAPES.keys() - UNSAFE_WITHOUT_SANDBOX))
def test_the_same_program_gets_out_where_there_is_no_sandbox(name: str, alone: Alone, surroundings: Surroundings) -> None:
    ended = alone.attempt(surroundings.filled(ESCAPES[name], alone.pid), Means.NONE)
    assert b"escaped" in ended.stdout, ended


@pytest.mark.parametrize("name", HOGS)
def test_what_a_program_takes_is_bounded(name: str, means: Means, alone: Alone) -> None:
    ended = alone.attempt(HOGS[name], means, timeout_s=1.0, memory_mib=256)
    assert b"escaped" not in ended.stdout
    assert max(len(ended.stdout), len(ended.stderr)) <= Limits.output_bytes
    assert not children(alone.pid)
    assert alone.attempt("print('next')", means).stdout == b"next\n"


def test_a_program_gets_input_files_and_a_folder_and_its_end_is_told(means: Means, alone: Alone) -> None:
    program, files = python("import json, sys\nprint(input(), open('data.txt').read(), json.dumps(1))\nsys.exit(3)")
    ended = alone.call(run, program, {**files, "data.txt": b"data"}, b"line\n", Limits(timeout_s=30.0), means)
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.timed_out) == (3, b"line data 1\n", b"", False)
    assert alone.attempt("import os; os.abort()", means).exit_code < 0
    assert alone.attempt("import time; time.sleep(60)", means, timeout_s=0.2).timed_out
    assert alone.attempt("import numpy; print(numpy.arange(3).sum())", means, memory_mib=4096).stdout == b"3\n"


def test_the_strongest_means_of_this_machine_are_chosen(alone: Alone) -> None:
    expected = next((means for means in (Means.BUBBLEWRAP, Means.LANDLOCK) if not missing(means, alone)), Means.NONE)
    assert alone.call(strongest_means) is expected
    assert (expected is Means.NONE) <= (landlock_version() == 0)


CLONES = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
stacks = ctypes.create_string_buffer(1 << 16)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
made = 0
while made < 4000 and libc.clone(pause, ctypes.byref(stacks, 1 << 15), 0x10f00, None) > 0: made += 1
print(made, flush=True)
os._exit(0)"""
"""Threads without a stack of their own, which no limit of memory bounds; they wait in the kernel."""


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
def test_a_programs_threads_are_bounded_and_some_may_be(means: Means, alone: Alone) -> None:
    assert 500 < int(alone.attempt(CLONES, means).stdout) < 520
    threads = "import threading\nfor n in range(9): threading.Thread(target=print, args=(n,)).start()"
    assert len(alone.attempt(threads, means).stdout.split()) == 9


# --- the process above what is confined


START_S = 120.0
CONFINED = f"""
import os, signal, time
from services.verifier.confinement import attach_to_parent
from services.verifier.sandbox import confine
outside = os.getpid()
def raises(*_):
    if os.getpid() == outside: raise SystemExit
{{at_import}}
attach_to_parent()
confine()
{LEAVERS["leaves processes"].format(parent=os.getpid())}
{{ending}}"""
AT_IMPORT = {
    "children are reaped by the kernel": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "children are reaped by a handler": "signal.signal(signal.SIGCHLD, lambda *_: os.waitpid(-1, os.WNOHANG))",
    "an ended child is an error": "signal.signal(signal.SIGCHLD, raises)",
    "there is a deadline": """
signal.signal(signal.SIGALRM, raises)
os.register_at_fork(after_in_parent=lambda: signal.setitimer(signal.ITIMER_REAL, 0.05))""",
    "nothing may end it": "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
}
"""What users' code has set up for its own process before it is confined."""


@pytest.fixture
def none_left() -> Iterator[None]:
    yield
    for pid in left_by(os.getpid()):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
@pytest.mark.parametrize("at_import", AT_IMPORT)
@pytest.mark.parametrize(("ending", "code"), [("os._exit(75)", 75), ("os.kill(os.getpid(), signal.SIGUSR1)", -signal.SIGUSR1)])
def test_users_signals_and_timers_have_no_effect_outside(none_left: None, at_import: str, ending: str, code: int) -> None:
    """What has been left is gone, and the exit code is that of the process inside."""
    lifted = "signal.pthread_sigmask(signal.SIG_SETMASK, ())"
    program = CONFINED.format(at_import=AT_IMPORT[at_import], ending=f"time.sleep(0.2)\n{lifted}\n{ending}")
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == code
    assert left_by(os.getpid()) == []


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
def test_what_is_confined_ends_with_the_process_above_also_when_it_has_been_stopped(none_left: None) -> None:
    program = CONFINED.format(at_import="", ending="signal.pause()")
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    above = subprocess.Popen([sys.executable, "-c", starts, program], stdout=subprocess.DEVNULL)
    wait_until(lambda: len(left_by(os.getpid())) >= 4)
    (outside,) = children(above.pid)
    os.kill(outside, signal.SIGSTOP)
    above.kill()
    above.wait()
    assert ends_within(outside, START_S)
    assert left_by(os.getpid()) == []
