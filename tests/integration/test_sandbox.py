"""Programs that try to get out, in each sandbox that this machine has. The same programs get out where there is none."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.verifier import sandbox
from services.verifier.confinement import children
from services.verifier.sandbox import Ended, Limits, Means, landlock_version, python, run, strongest_means
from tests.support.hostile_programs import BESIDE, ESCAPES, HOGS, Surroundings, surroundings_in


def missing(means: Means) -> str:
    """Why this machine does not have it; empty when it has."""
    try:
        ended = run(*python("print('up')"), b"", Limits(timeout_s=30.0), means)
    except FileNotFoundError:
        return f"{means} is not installed"
    except (OSError, subprocess.SubprocessError) as error:
        return f"the kernel permits no {means}: {error}"
    return "" if ended.stdout == b"up\n" else ended.stderr.decode()


@pytest.fixture(scope="module", params=[Means.BUBBLEWRAP, Means.LANDLOCK])
def means(request: pytest.FixtureRequest) -> Means:
    if why := missing(request.param):
        pytest.skip(why)
    return request.param


def attempt(source: str, means: Means, **limits: float) -> Ended:
    return run(*python(source), b"", Limits(**{"timeout_s": 30.0, **limits}), means)


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[Surroundings]:
    with surroundings_in(tmp_path) as found:
        yield found


@pytest.mark.parametrize("name", ESCAPES)
def test_no_program_gets_out(name: str, means: Means, surroundings: Surroundings) -> None:
    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), children(os.getpid())
    ended = attempt(surroundings.filled(ESCAPES[name], os.getpid()), means)
    assert b"escaped" not in ended.stdout, ended
    assert not ended.timed_out
    assert surroundings.untouched
    assert before == (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), children(os.getpid()))


def test_the_runs_folder_is_kept_out_of_what_a_program_may_read(
    means: Means, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Python's own folder holds it, as in a project that is an environment itself."""
    paths = [*sandbox._python_paths(), str(surroundings.run_dir.parent)]
    monkeypatch.setattr(sandbox, "_python_paths", lambda: paths)
    programs = [surroundings.filled(program, os.getpid()) for name, program in ESCAPES.items() if "the run's" in name]
    assert len(programs) == 2
    assert all(b"escaped" in attempt(program, means).stdout for program in programs)
    monkeypatch.setenv("PIPELINERL_PRIVATE_DIR", str(surroundings.run_dir))
    assert not any(b"escaped" in attempt(program, means).stdout for program in programs)
    writes = f"open('{surroundings.run_dir}/new', 'w').write('x'); print('escaped')"
    assert b"escaped" not in attempt(writes, means).stdout
    assert b"escaped" in attempt(surroundings.filled(BESIDE, 0), means).stdout


UNSAFE_WITHOUT_SANDBOX = {
    "traces its parent", "writes to Python's library", "takes its parent's priority",
    "moves its parent to one core", "leaves System V memory", "connects by a protocol without ports to Landlock",
    "connects with its first data", "opens a ring that opens sockets", "has a terminal",
    "sends by UDP", "takes namespaces", "takes namespaces by a child", "makes a child of its parent's",
    "starts a hundred processes",
}  # fmt: skip
"""What would hurt this process or outlast the test, or what a machine may forbid by itself."""


@pytest.mark.parametrize("name", sorted(ESCAPES.keys() - UNSAFE_WITHOUT_SANDBOX))
def test_the_same_program_gets_out_where_there_is_no_sandbox(name: str, surroundings: Surroundings) -> None:
    ended = attempt(surroundings.filled(ESCAPES[name], os.getpid()), Means.NONE)
    assert b"escaped" in ended.stdout, ended


@pytest.mark.parametrize("name", HOGS)
def test_what_a_program_takes_is_bounded(name: str, means: Means) -> None:
    ended = attempt(HOGS[name], means, timeout_s=1.0, memory_mib=256, folder_mib=4)
    assert b"escaped" not in ended.stdout
    assert max(len(ended.stdout), len(ended.stderr)) <= Limits.output_bytes
    assert not children(os.getpid())
    assert attempt("print('next')", means).stdout == b"next\n"


def test_a_program_gets_input_files_and_a_folder_and_its_end_is_told(means: Means) -> None:
    program, files = python("import json, sys\nprint(input(), open('data.txt').read(), json.dumps(1))\nsys.exit(3)")
    ended = run(program, {**files, "data.txt": b"data"}, b"line\n", Limits(timeout_s=30.0), means)
    assert (ended.exit_code, ended.stdout, ended.stderr, ended.timed_out) == (3, b"line data 1\n", b"", False)
    assert attempt("import os; os.abort()", means).exit_code < 0
    assert attempt("import time; time.sleep(60)", means, timeout_s=0.2).timed_out
    assert attempt("import numpy; print(numpy.arange(3).sum())", means, memory_mib=4096).stdout == b"3\n"


def test_the_strongest_means_of_this_machine_are_chosen() -> None:
    expected = next((means for means in (Means.BUBBLEWRAP, Means.LANDLOCK) if not missing(means)), Means.NONE)
    assert strongest_means() is expected
    assert (expected is Means.NONE) <= (landlock_version() == 0)
