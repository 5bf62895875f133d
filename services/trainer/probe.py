"""The parity probe: is the served policy the trained policy?

A fixed token sequence is scored by every actor with the version it serves and by the trainer with that version's weights.
The largest absolute difference of token log-probabilities, in nats, is the run's `logprob_mismatch_max`. Unlike
`mismatch_kl` it contains no effect of a stale KV cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import numpy as np

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.types import Logprobs, PolicyVersion, TokenIds
from services.trainer.actor_client import ActorClient

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S = 60.0


def probe_tokens(vocabulary_size: int, num_tokens: int, seed: int) -> TokenIds:
    """int32[num_tokens], fixed by the seed: any tokens will do, the models only have to agree on them."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocabulary_size, size=num_tokens, dtype=np.int32)


def largest_difference(served: Logprobs, trained: Logprobs) -> float:
    """Nats. Both [tokens - 1]; infinite when the lengths differ or something is not finite."""
    if len(served) != len(trained) or not np.isfinite(served).all():
        return float("inf")
    return float(np.abs(served.astype(np.float64) - trained.astype(np.float64)).max())


async def measure_mismatch(
    members: Mapping[str, str], tokens: TokenIds, trained: Logprobs, version: PolicyVersion
) -> float | None:
    """Largest difference over all actors that serve `version`; None when none of them could say."""
    results = await asyncio.gather(
        *(_measure_one(name, address, tokens, trained, version) for name, address in members.items())
    )
    measured = [result for result in results if result is not None]
    return max(measured) if measured else None


async def _measure_one(
    name: str, address: str, tokens: TokenIds, trained: Logprobs, version: PolicyVersion
) -> float | None:
    try:
        async with ActorClient(name, address) as client:
            served, served_version = await client.score(tokens, SCORE_TIMEOUT_S)
    except (ServiceError, MessageError) as error:
        log.warning("parity probe goes on without %s: %s", name, error)
        return None
    if served_version != version:
        log.warning("parity probe: %s serves %s, not %s", name, served_version, version)
        return None
    return largest_difference(served, trained)
