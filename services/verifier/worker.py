"""`python -m services.verifier.worker`: score items in a process that the verifier starts. Linux only.

The process limits its address space and CPU time, dies with the verifier, and kills processes that a reward left behind
(`confinement`). A reward's output goes to the verifier's log.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypeVar

from pipelinerl.errors import UserError, as_unicode, located
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier import confinement
from services.verifier.rewards.compose import ComposedReward, make_reward
from services.verifier.rewards.item import BadReference, BadReward, RewardInput
from services.verifier.sandbox import NoSandbox, confine

RETIRED = 75
"""Exit code of a worker that must be replaced."""
MESSAGE_CHARACTERS = 500
_MISTAKE_CHARACTERS = 8000
_Result = TypeVar("_Result")
_FINISH_REASONS = {sequence_pb2.FINISH_REASON_STOP: "stop", sequence_pb2.FINISH_REASON_LENGTH: "length"}


def score_item(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    """Score one item. Never raises; an exception of the reward becomes the result's status."""
    answer = None

    def score() -> verifier_pb2.VerifyResult:
        nonlocal answer
        answer = reward.find_answer(item.completion_text, item.prompt_text)
        scored = reward(
            RewardInput(
                prompt=item.prompt_text,
                completion=item.completion_text,
                answer=answer,
                reference=_reference(item.reference_json),
                completion_tokens=item.completion_tokens,
                max_tokens=item.max_tokens,
                finish_reason=_FINISH_REASONS.get(item.finish_reason, ""),
                judgement=item.judgement,
                task=item.task,
                sequence_id=item.sequence_id,
            )
        )
        return verifier_pb2.VerifyResult(
            status=verifier_pb2.VERIFY_STATUS_OK,
            reward=scored.value,
            components=scored.parts,
            metrics=scored.metrics,
            message=as_unicode(scored.reason)[:MESSAGE_CHARACTERS],
            answer=(answer or "")[:MESSAGE_CHARACTERS],
        )

    return outcome(item.sequence_id, score, "reward", lambda error: _hint(error, item, answer))


def outcome(
    sequence_id: str, attempt: Callable[[], _Result], what: str, hint: Callable[[BaseException], str]
) -> _Result | verifier_pb2.VerifyResult:
    """Return what `attempt` returns, or a failed result if it raises. `what`: "reward" or "episode", for messages."""
    started_s = time.perf_counter()
    result: _Result | verifier_pb2.VerifyResult
    try:
        result = attempt()
    except BadReference as error:
        result = failed(verifier_pb2.VERIFY_STATUS_BAD_REFERENCE, str(error))
    except BadReward as error:
        result = failed(verifier_pb2.VERIFY_STATUS_BAD_REWARD, str(error))
    except MemoryError:  # the traceback holds the memory and is freed at the end of this block
        result = failed(verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY, f"the {what} exceeded reward.memory_mib")
    except BaseException as error:  # noqa: BLE001 - the process boundary; users' code may also raise SystemExit
        traceback.print_exc()
        result = failed(verifier_pb2.VERIFY_STATUS_CRASHED, f"the {what} raised {located(error)}{hint(error)}")
    if isinstance(result, verifier_pb2.VerifyResult):
        result.sequence_id, result.seconds = sequence_id, time.perf_counter() - started_s
    return result


def failed(
    status: verifier_pb2.VerifyStatus, message: str, sequence_id: str = "", seconds: float = 0.0
) -> verifier_pb2.VerifyResult:
    """Return a failed result. `message` may quote users' code and the policy's output."""
    message = as_unicode(message)[:MESSAGE_CHARACTERS]
    return verifier_pb2.VerifyResult(sequence_id=sequence_id, status=status, message=message, seconds=seconds)


def _hint(error: BaseException, item: verifier_pb2.VerifyItem, answer: str | None) -> str:
    if f"'{RewardInput.__name__}'" in str(error):
        return f"; the argument is an item, with the attributes {', '.join(RewardInput.__dataclass_fields__)}"
    if isinstance(error, KeyError):
        reference = _reference(item.reference_json)
        row = reference.get("row")
        fields = f", and its row {', '.join(row)}" if isinstance(row, dict) else ""
        return f"; item.reference has {', '.join(reference) or 'nothing'}{fields}"
    if answer is None and isinstance(error, AttributeError | TypeError):
        return "; item.answer is None, since reward.answer_pattern found nothing"
    return ""


def _reference(text: str) -> dict[str, Any]:
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReference("reference_json", f"not JSON: {error}") from error
    if not isinstance(reference, dict):
        raise BadReference("reference_json", f"a JSON object is needed, not {type(reference).__name__}")
    return reference


def run_process(prepare: Callable[[Recipe], Callable[[Connection, Connection], int]]) -> NoReturn:
    """Run a process that the verifier starts. `prepare` imports users' code and returns a function that serves. This function
    gets the process's input and output, and returns the exit code. The process reports a user's mistake, and ends."""
    confinement.attach_to_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipes = requests, results = confinement.take_pipes()
    mistake, code = "", 1
    try:
        serve = prepare(Recipe.model_validate_json(requests.recv_bytes()))
    except ImportError as error:  # raised by our scorers; a missing package of the user's code is a `UserError`
        mistake = f"reward.scorer: {error}; pip install 'pipelinerl[verifier]'"
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
    """Score items until the input ends. Return `RETIRED` if memory is short or a reward's processes survive."""
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
        half_is_gone = confinement.address_space() - own > reserve // 2  # a reward may keep memory that later ones lack
        if not is_clean or half_is_gone:
            return RETIRED


if __name__ == "__main__":
    run_process(_prepared)
