"""Actors whose log μ are not those of the policy that they name: what they send is no longer trained on.

Of tokens that were sampled by the very version that trains on them, of lag 0, actor and trainer compute the same probability,
up to rounding. The training step computes it anyway; nothing is computed twice. Tokens of other versions prove nothing, and an
actor may send none of lag 0. The name of an actor is what its sequences say. Pure state of one trainer, not in checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pipelinerl.messages.sequences import Sequence
from pipelinerl.recipe.fields import Recipe
from services.trainer.data.evaluation import in_sixteen_bits

FEWEST_TOKENS = 256
"""Of an actor, by which it is judged; then the count begins anew."""
BOUND_FLOAT32, BOUND_16_BIT, BOUND_QUANTIZED = 0.01, 1.0, 2.0
"""Nats by which log π and log μ of one token may differ. Ten times what a float32 probe may; in 16 bits a single token may be
far more off than the median, and more again where the engine's weights are quantised."""
REASON = "actor_quarantined"


def bound_of(recipe: Recipe) -> float:
    """Nats. Pure."""
    if recipe.actor.engine.quantization:
        return BOUND_QUANTIZED
    return BOUND_16_BIT if in_sixteen_bits(recipe) else BOUND_FLOAT32


class Quarantine:
    """`share`: of an actor's tokens of lag 0 that may be off by more than `bound`; 0 = nobody is judged."""

    def __init__(self, share: float, bound: float) -> None:
        self._share, self._bound = share, bound
        self._seen, self._off = Counter[str](), Counter[str]()
        self.actors: set[str] = set()

    def failure_of(self, sequence: Sequence) -> str:
        """Why it is not to be trained on; empty for a good one."""
        return f"{REASON}: {sequence.actor}" if sequence.actor in self.actors else ""

    def judge(self, log_weights: Mapping[str, NDArray[np.float32]]) -> dict[str, float]:
        """Of one step: log π − log μ of tokens of lag 0, by actor. Returns those to be quarantined from now on, with the share
        of their tokens that is off."""
        found = {}
        for actor, of_actor in log_weights.items():
            self._seen[actor] += len(of_actor)
            self._off[actor] += int((~(np.abs(of_actor) <= self._bound)).sum())  # one that is not finite, too
            if self._seen[actor] >= FEWEST_TOKENS:
                share = self._off.pop(actor, 0) / self._seen.pop(actor)
                if 0 < self._share < share and actor not in self.actors:
                    self.actors.add(actor)
                    found[actor] = share
        return found
