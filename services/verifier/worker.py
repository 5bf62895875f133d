"""What a worker process does to itself so that a reward can hurt one item and no more. Linux.

Limits address space and CPU time, dies with the verifier, and clears away processes that a reward left behind. It is
no jail: a reward's code is the user's and is trusted not to attack the machine; what is not trusted is how long it runs
and how much it takes on a model's output.

A reward process: `python -m services.verifier.worker`, started by the verifier, never by a person.

Consumes frames of items on its standard input, produces one frame for each item on its standard output as soon as it is
scored, so that the verifier knows which item runs. Before any reward's code is imported, both pipes move to descriptors
that children do not inherit; a reward reads from nowhere and prints to the verifier's log. The verifier unblocks it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys

from pipelinerl.errors import UserError
from pipelinerl.v1 import verifier_pb2
from services.verifier.frames import RETIRED, WorkerHello, WorkerSetup, read_frame, write_frame
from services.verifier.rewards.compose import ComposedReward, make_reward
from services.verifier.server import score_item
from services.verifier.worker_process import children, kill_tree

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CPU_SLACK_S = 5
_CLEARING_PASSES = 100
_MIB = 1024**2


def attach_to_verifier() -> None:
    """SIGKILL when the verifier's thread that started this process ends; orphans of a reward's children come here."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


class MemoryLimit:
    """Address space for rewards, beyond what the process has when this is made."""

    def __init__(self, memory_mib: int) -> None:
        self._own = _address_space()
        self._reserve = memory_mib * _MIB
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _lower_limit(resource.RLIMIT_AS, self._own + self._reserve)

    def is_half_gone(self) -> bool:
        """Whether rewards kept so much that the next one would have less than half of the limit to itself."""
        return _address_space() - self._own > self._reserve // 2


class CpuBackstop:
    """SIGXCPU for a reward that the verifier, whose deadline comes first, did not end: wall-clock limit times cores."""

    def __init__(self, timeout_s: float) -> None:
        self._allowance_s = int(timeout_s + 1) * (os.cpu_count() or 1) + _CPU_SLACK_S

    def renew(self) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + self._allowance_s)


def clear_leftover_children() -> bool:
    """Kills and reaps every process that this one started or adopted; False when they come faster than they go.

    One system call when there is none.
    """
    for _ in range(_CLEARING_PASSES):
        try:
            os.waitpid(-1, os.WNOHANG)
            for child in children(os.getpid()):
                kill_tree(child)
                os.waitpid(child, 0)
        except ChildProcessError:
            return True
    return False


def _lower_limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def main() -> int:
    attach_to_verifier()
    requests, results = _take_pipes()
    payload = read_frame(requests)
    if payload is None:
        return 0
    setup = WorkerSetup.from_json(payload)
    try:
        reward = make_reward(setup.reward, setup.task)
    except UserError as error:
        write_frame(results, WorkerHello(str(error), users_mistake=True).to_json())
        return 1
    write_frame(results, WorkerHello().to_json())
    return _Loop(reward, setup, requests, results).run()


class _Loop:
    def __init__(self, reward: ComposedReward, setup: WorkerSetup, requests: int, results: int) -> None:
        self._reward, self._requests, self._results = reward, requests, results
        self._more_came = select.poll()
        self._more_came.register(requests, select.POLLIN)
        self._pid = os.getpid()
        self._cpu = CpuBackstop(setup.reward.timeout_s)
        self._memory = MemoryLimit(setup.reward.memory_mib)

    def run(self) -> int:
        while (payload := read_frame(self._requests)) is not None:
            items = verifier_pb2.VerifyRequest.FromString(payload).items
            if not items:
                write_frame(self._results, verifier_pb2.VerifyResult().SerializeToString())
            for item in items:
                result, is_clean = self._score(item)
                write_frame(self._results, result.SerializeToString())
                if not is_clean:
                    return RETIRED
                if self._more_came.poll(0):
                    break  # only one thing is sent before all results are there: to stop
            if self._memory.is_half_gone():
                return RETIRED
        return 0

    def _score(self, item: verifier_pb2.VerifyItem) -> tuple[verifier_pb2.VerifyResult, bool]:
        """The result, and whether the process is as good as new for the next item."""
        self._cpu.renew()
        result = score_item(self._reward, item)
        if os.getpid() != self._pid:
            os._exit(0)  # a reward forked, and its child came back as if it were the worker
        is_clean = clear_leftover_children() and result.status != verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY
        return result, is_clean


def _take_pipes() -> tuple[int, int]:
    requests, results = os.dup(0), os.dup(1)  # descriptors that a program started by a reward does not get
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, results


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # threads that a reward left running do not keep the process
