"""A reward process: `python -m services.verifier.worker`, started by the verifier, never by a person.

Consumes frames of items on its standard input, produces one frame for each item on its standard output as soon as it is
scored, so that the verifier knows which item runs. Before any reward's code is imported, both pipes move to descriptors
that children do not inherit; a reward reads from nowhere and prints to the verifier's log. The verifier unblocks it.
"""

from __future__ import annotations

import os
import select
import sys

from pipelinerl.errors import UserError
from pipelinerl.v1 import verifier_pb2
from services.verifier.confinement import CpuBackstop, MemoryLimit, attach_to_verifier, clear_leftover_children
from services.verifier.frames import RETIRED, WorkerHello, WorkerSetup, read_frame, write_frame
from services.verifier.rewards.compose import ComposedReward
from services.verifier.rewards.registry import make_reward
from services.verifier.scoring import score_item


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
