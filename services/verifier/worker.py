"""A reward process: `python -m services.verifier.worker`, started by the verifier, never by a person. Linux.

Consumes one item after the other on its standard input and produces the result of each on its standard output. The verifier
unblocks it. Before any reward's code is imported, both pipes move to
descriptors that children do not inherit; a reward reads from nowhere and prints to the verifier's log.

The process limits its address space and CPU time, dies with the verifier, and clears away processes that a reward left behind.
It is no jail: a reward's code is the user's and is trusted not to attack the machine; what is not trusted is how long it runs
and how much it takes on a model's output.

The verifier ends such a process by the same means with which the process clears away others (`kill_tree`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import Recipe, RewardConfig
from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier.rewards.compose import ComposedReward, make_reward
from services.verifier.rewards.item import BadReference, BadReward, RewardInput

RETIRED = 75
"""Exit code of a worker that leaves of its own accord, between two items, to be replaced by a fresh one."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CPU_SLACK_S = 5
_CLEARING_PASSES = 100
_MESSAGE_CHARACTERS = 500
_MIB = 1024**2
_FINISH_REASONS = {sequence_pb2.FINISH_REASON_STOP: "stop", sequence_pb2.FINISH_REASON_LENGTH: "length"}


def score_item(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    """One item, one result. Never raises: what the reward raises is the result's status."""
    started_s = time.perf_counter()
    result = _outcome(reward, item)
    result.sequence_id = item.sequence_id
    result.seconds = time.perf_counter() - started_s
    return result


def _outcome(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    try:
        scored = reward(
            RewardInput(
                prompt=item.prompt_text,
                completion=item.completion_text,
                answer=reward.find_answer(item.completion_text),
                reference=_reference(item.reference_json),
                completion_tokens=item.completion_tokens,
                max_tokens=item.max_tokens,
                finish_reason=_FINISH_REASONS.get(item.finish_reason, ""),
                task=item.task,
                sequence_id=item.sequence_id,
            )
        )
        return verifier_pb2.VerifyResult(
            status=verifier_pb2.VERIFY_STATUS_OK,
            reward=scored.value,
            components=scored.parts,
            message=scored.reason[:_MESSAGE_CHARACTERS],
        )
    except BadReference as error:
        status, message = verifier_pb2.VERIFY_STATUS_BAD_REFERENCE, str(error)
    except BadReward as error:
        status, message = verifier_pb2.VERIFY_STATUS_BAD_REWARD, str(error)
    except MemoryError:  # the traceback holds what filled the memory; it is let go before anything else is done
        status, message = verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY, "the reward ran past reward.memory_mib"
    except BaseException as error:  # noqa: BLE001 - the process boundary; SystemExit is a reward's too
        traceback.print_exc()
        status = verifier_pb2.VERIFY_STATUS_CRASHED
        message = f"the reward raised {type(error).__name__}: {error}"
    return verifier_pb2.VerifyResult(status=status, message=message[:_MESSAGE_CHARACTERS])


def _reference(text: str) -> dict[str, Any]:
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReference("reference_json", f"not JSON: {error}") from error
    if not isinstance(reference, dict):
        raise BadReference("reference_json", f"a JSON object is needed, not {type(reference).__name__}")
    return reference


def main() -> int:
    _attach_to_verifier()
    requests, results = _take_pipes()
    try:
        recipe = Recipe.model_validate_json(requests.recv_bytes())
        reward = make_reward(recipe.reward, recipe.task)
    except UserError as error:
        results.send_bytes(str(error).encode())
        return 1
    results.send_bytes(b"")
    try:
        return _serve(reward, recipe.reward, requests, results)
    except EOFError:
        return 0


def _serve(reward: ComposedReward, config: RewardConfig, requests: Connection, results: Connection) -> int:
    """Item by item. Returns `RETIRED` when the process is no longer as good as new. Raises `EOFError` at the pipe's end."""
    pid, own = os.getpid(), _address_space()
    reserve = config.memory_mib * _MIB
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower_limit(resource.RLIMIT_AS, own + reserve)
    while True:
        item = verifier_pb2.VerifyItem.FromString(requests.recv_bytes())
        _renew_cpu_limit(config.timeout_s)
        result = score_item(reward, item)
        if os.getpid() != pid:
            os._exit(0)  # a reward forked, and its child came back as if it were the worker
        is_clean = _clear_leftover_children() and result.status != verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY
        results.send_bytes(result.SerializeToString())
        half_is_gone = _address_space() - own > reserve // 2  # kept by rewards, and not there for the next one
        if not is_clean or half_is_gone:
            return RETIRED


def _attach_to_verifier() -> None:
    """SIGKILL when the verifier's thread that started this process ends; orphans of a reward's children come here."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_CHILD_SUBREAPER, 1)):
        if prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _take_pipes() -> tuple[Connection, Connection]:
    requests = Connection(os.dup(0), writable=False)  # descriptors that a program started by a reward does not get
    results = Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return requests, results


def _renew_cpu_limit(timeout_s: float) -> None:
    """SIGXCPU for a reward that the verifier, whose deadline comes first, did not end: wall-clock limit times cores."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowance_s = int(timeout_s + 1) * (os.cpu_count() or 1) + _CPU_SLACK_S
    _lower_limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + allowance_s)


def _clear_leftover_children() -> bool:
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


def children(pid: int) -> list[int]:
    """The direct children of all of a process's threads, by Linux's /proc; none when it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread ended
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL to the process, its descendants, also those in other process groups, and its own group; reaps nothing.

    Everything is stopped first, until a look finds nothing new, so that nothing is started behind our back.
    """
    stopped: set[int] = set()
    while found := {pid, *_descendants(pid)} - stopped:
        for process in found:
            _signal(process, signal.SIGSTOP)
        stopped |= found
    for process in stopped:
        _signal(process, signal.SIGKILL)
    kill_group(pid)


def kill_group(leader: int) -> None:
    """SIGKILL to what is left of the process group that `leader` led, if it led one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _lower_limit(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _address_space() -> int:
    """Bytes, as RLIMIT_AS counts them."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # threads that a reward left running do not keep the process
