"""Verdicts on held-out completions: what the verifier says of them by a deadline, and whether it means a right answer.

The verifier may be away for as long as it likes; what it has not judged by the deadline has no verdict. Not here: what
an evaluation makes of that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.verify import VerifyItem, VerifyOutcome

log = logging.getLogger(__name__)

JUDGE_BATCH = 64
"""Completions per verifier call: what one call loses, others keep."""


class Verifier(Protocol):
    """`pipelinerl.verify.VerifierClient`."""

    async def verify(self, items: Sequence[VerifyItem]) -> list[VerifyOutcome]: ...


def is_right(outcome: VerifyOutcome, correct_reward: float) -> bool:
    """Whether the terms of the answer alone reach `correct_reward` (> 0); format and length terms do not count."""
    terms = [term for name, term in outcome.components.items() if name == "answer" or name.startswith("answer.")]
    return outcome.ok and sum(terms) >= correct_reward * (1 - 1e-9)


async def judge(verifier: Verifier, items: Sequence[VerifyItem], deadline: float) -> dict[str, VerifyOutcome]:
    """Outcomes by sequence id, as far as the verifier gives them before `deadline` (seconds of the loop's clock)."""
    verdicts: dict[str, VerifyOutcome] = {}
    try:
        async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as tasks:
            for first in range(0, len(items), JUDGE_BATCH):
                tasks.create_task(_judge_batch(verifier, items[first : first + JUDGE_BATCH], verdicts))
    except TimeoutError:
        log.warning("held-out evaluation: %d of %d completions judged in time", len(verdicts), len(items))
    return verdicts


async def _judge_batch(verifier: Verifier, items: Sequence[VerifyItem], verdicts: dict[str, VerifyOutcome]) -> None:
    try:
        outcomes = await verifier.verify(items)
    except (ServiceError, MessageError) as error:
        log.warning("held-out evaluation goes on without %d verdicts: %s", len(items), error)
        return
    verdicts.update((outcome.sequence_id, outcome) for outcome in outcomes)
