"""`python -m services.verifier.worker`: score items in a process that the verifier starts. Linux only.

The process limits its address space and CPU time, dies with the verifier, and kills processes that a reward left behind
(`confinement`). A reward's output goes to the verifier's log.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.v1 import verifier_pb2
from services.verifier import confinement
from services.verifier.rewards.compose import ComposedReward, make_reward, score_item
from services.verifier.sandbox import NoSandbox, confine

RETIRED = 75
"""Exit code of a worker that ends itself in order to be replaced."""
_MISTAKE_CHARACTERS = 8000


def run_process(prepare: Callable[[Recipe], Callable[[Connection, Connection], int]]) -> NoReturn:
    """Run a process that the verifier starts. `prepare` imports users' code and returns a function, which serves requests
    from the process's input and returns the exit code. If `prepare` finds a user's mistake, the process reports it and ends."""
    confinement.attach_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipes = requests, results = confinement.take_pipes()
    mistake, code = "", 1
    try:
        serve = prepare(Recipe.model_validate_json(requests.recv_bytes()))
    except ImportError as error:  # raised by our scorers; a missing package of the user's code is a `UserError`
        mistake = f"reward.scorer: {error}; run pip install 'pipelinerl[verifier]'"
    except (UserError, NoSandbox) as error:
        mistake = f"{'reward.sandbox: ' if isinstance(error, NoSandbox) else ''}{error}"
    results.send_bytes(mistake[:_MISTAKE_CHARACTERS].encode(errors="replace"))
    if not mistake:
        code = serve(*pipes)
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads that users' code left running


def _prepared(recipe: Recipe) -> Callable[[Connection, Connection], int]:
    tasks = recipe.scored_tasks
    rewards = {name: make_reward(share.reward, share.task) for name, share in tasks.items()}
    if any(share.reward.sandbox and share.reward.is_function for share in tasks.values()):
        confinement.go_below_another()
        confine()
    return partial(_serve, rewards, tasks)


def _serve(
    rewards: Mapping[str, ComposedReward], tasks: Mapping[str, ProblemSet], requests: Connection, results: Connection
) -> int:
    """Score items until the input ends. Return `RETIRED` if memory is short or a reward's processes cannot be ended."""
    pid, own = os.getpid(), confinement.address_space()
    reserve = max(share.reward.memory_mib for share in tasks.values()) * confinement.MIB
    confinement.lower_limit(resource.RLIMIT_AS, own + reserve)
    while True:
        try:
            item = verifier_pb2.VerifyItem.FromString(requests.recv_bytes())
        except EOFError:
            return 0
        confinement.renew_cpu_limit(tasks[item.task].reward.timeout_s)
        result = score_item(rewards[item.task], item)
        if os.getpid() != pid:
            os._exit(0)  # in a child that the reward forked
        is_clean = confinement.clear_leftover_children() and result.status != verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY
        results.send_bytes(result.SerializeToString())
        half_is_gone = confinement.address_space() - own > reserve // 2  # memory that rewards kept is not left for later ones
        if not is_clean or half_is_gone:
            return RETIRED


if __name__ == "__main__":
    run_process(_prepared)
