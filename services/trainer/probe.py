"""The parity probe: is the served policy the trained policy?

A fixed token sequence is scored by every actor with the version it serves and by the trainer with that version's weights.
The largest absolute difference of token log-probabilities, in nats, is the run's `logprob_mismatch_max`; an answer that
cannot be compared is one of its `parity_failures`. Unlike `mismatch_kl` it contains no effect of a stale KV cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import Logprobs, PolicyVersion, TokenIds
from services.trainer.data.actor_client import ActorClient, ActorClients

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S = 60.0


def probe_tokens(vocabulary_size: int, num_tokens: int, seed: int) -> TokenIds:
    """int32[num_tokens], fixed by the seed: any tokens will do, the models only have to agree on them."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, vocabulary_size, size=num_tokens, dtype=np.int32)


@dataclass(frozen=True)
class Parity:
    """One probe. `mismatch`: largest difference, nats, always finite; None when no answer could be compared.

    `failures`: answers of actors that serve the version and cannot be compared, for numbers that are not finite or missing.
    """

    mismatch: float | None
    failures: int


def defect(served: Logprobs, trained: Logprobs) -> str:
    """Why the two cannot be compared; empty when they can."""
    if len(served) != len(trained):
        return f"{len(served)} log-probabilities where the trainer has {len(trained)}"
    if not np.isfinite(trained).all():
        return "log-probabilities of the trainer are not finite"
    return "" if np.isfinite(served).all() else "log-probabilities of the actor are not finite"


def largest_difference(served: Logprobs, trained: Logprobs) -> float:
    """Nats. Both [tokens - 1] and without `defect`."""
    return float(np.abs(served.astype(np.float64) - trained.astype(np.float64)).max())


async def measure_parity(
    members: Mapping[str, str],
    tokens: TokenIds,
    trained: Logprobs,
    version: PolicyVersion,
    client: ActorClients = ActorClient,
) -> Parity | None:
    """Over all actors that serve `version`; None when none of them could say."""
    answers = await asyncio.gather(*(_ask(client(name, address), tokens, version) for name, address in members.items()))
    served = {name: answer for name, answer in zip(members, answers, strict=True) if answer is not None}
    return compare(served, trained, version) if served else None


def compare(served: Mapping[str, Logprobs], trained: Logprobs, version: PolicyVersion) -> Parity:
    """The parity of the answers of actors, by name; logs each one that cannot be compared as an error."""
    defects = {name: problem for name, logprobs in served.items() if (problem := defect(logprobs, trained))}
    for name, problem in defects.items():
        log.error("parity probe of version %s fails on %s: %s", version, name, problem)
    differences = [largest_difference(logprobs, trained) for name, logprobs in served.items() if name not in defects]
    return Parity(max(differences, default=None), len(defects))


async def _ask(actor: ActorClient, tokens: TokenIds, version: PolicyVersion) -> Logprobs | None:
    """None when it does not answer, or serves another version."""
    try:
        async with actor:
            served, served_version = await actor.score(tokens, SCORE_TIMEOUT_S)
    except (ServiceError, MessageError) as error:
        log.warning("parity probe goes on without %s: %s", actor.name, error)
        return None
    if served_version != version:
        log.warning("parity probe: %s serves %s, not %s", actor.name, served_version, version)
        return None
    return served
