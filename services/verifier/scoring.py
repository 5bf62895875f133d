"""One item, one result, whatever the reward does short of ending the process."""

from __future__ import annotations

import json
import time
import traceback
from typing import Any

from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier.rewards.compose import ComposedReward, Reward
from services.verifier.rewards.item import BadReference, BadReward, RewardInput

_SHORT = 500
_FINISH_REASONS = {sequence_pb2.FINISH_REASON_STOP: "stop", sequence_pb2.FINISH_REASON_LENGTH: "length"}


def score_item(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    """Never raises: what the reward raises is the result's status."""
    started_s = time.perf_counter()
    result = _outcome(reward, item)
    result.sequence_id = item.sequence_id
    result.seconds = time.perf_counter() - started_s
    return result


def _outcome(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    try:
        return _ok(reward(_input(reward, item)))
    except BadReference as error:
        return _failed(verifier_pb2.VERIFY_STATUS_BAD_REFERENCE, str(error))
    except BadReward as error:
        return _failed(verifier_pb2.VERIFY_STATUS_BAD_REWARD, str(error))
    except MemoryError:
        pass  # the traceback holds what filled the memory; it is let go before anything else is done
    except BaseException as error:  # noqa: BLE001 - the process boundary; SystemExit is a reward's too
        traceback.print_exc()
        return _failed(verifier_pb2.VERIFY_STATUS_CRASHED, f"the reward raised {type(error).__name__}: {error}")
    return _failed(verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY, "the reward ran past reward.memory_mib")


def _input(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> RewardInput:
    return RewardInput(
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


def _reference(text: str) -> dict[str, Any]:
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReference("reference_json", f"not JSON: {error}") from error
    if not isinstance(reference, dict):
        raise BadReference("reference_json", f"a JSON object is needed, not {type(reference).__name__}")
    return reference


def _ok(reward: Reward) -> verifier_pb2.VerifyResult:
    return verifier_pb2.VerifyResult(
        status=verifier_pb2.VERIFY_STATUS_OK,
        reward=reward.value,
        components=reward.terms,
        message=reward.reason[:_SHORT],
    )


def _failed(status: verifier_pb2.VerifyStatus, message: str) -> verifier_pb2.VerifyResult:
    return verifier_pb2.VerifyResult(status=status, message=message[:_SHORT])
