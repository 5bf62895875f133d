"""Tells Kubernetes what stopping this actor would cost, so that scaling down takes the cheapest pod first.

The cost is the work that a hand-over would pass on: tokens of the sequences in hand that are not stored yet, those that another
actor generated before included. Each has to be prefilled anew elsewhere. An idle actor costs 0.

Consumes the groups in hand and the engine's progress, produces the gauge and the pod's annotation
`controller.kubernetes.io/pod-deletion-cost`. It waits for the clock. Kubernetes advises against frequent updates of the
annotation: it is written at most every `EVERY_S` and only when the cost has changed enough to change an order of pods. Without
API or permission one line says so and generation does not notice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping

from pipelinerl.kube.client import KubeClient
from pipelinerl.kube.errors import KubeError
from pipelinerl.kube.pod_watch import Pauses
from services.actor.engine import InferenceEngine
from services.actor.held_groups import HeldGroups, Remainder
from services.actor.metrics import ActorMetrics

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
MOST = 2**31 - 1
"""The annotation is an int32."""
EVERY_S = 15.0
CHANGED_SHARE, CHANGED_TOKENS = 0.2, 256
"""Of what was told last: a cost that differs by less is told as it was. An actor at work has sequences of all lengths in hand,
whose sum moves little; the order of busy pods is then true to a fifth, and that of idle and busy ones exact."""


def work_in_hand(remainders: Iterable[Remainder], progress: Mapping[str, int]) -> int:
    """Tokens of all unstored samples: what there is of each, and what the engine has added since. Pure."""
    tokens = 0
    for remainder in remainders:
        tokens += sum(len(partial.completion_token_ids) for partial in remainder.partials)
        tokens += sum(progress.get(remainder.group.sequence_id(index), 0) for index in remainder.missing)
    return min(tokens, MOST)


def worth_telling(told: int | None, cost: int) -> bool:
    """Whether `cost` may change which pod is the cheapest; `told` None: nothing was told yet. Pure."""
    if told is None or (told == 0) != (cost == 0):
        return True
    return abs(cost - told) > max(CHANGED_TOKENS, CHANGED_SHARE * told)


class DeletionCost:
    """See the module. `client` None: no Kubernetes, only the gauge. `pod`: this one's name; `uid` may be empty."""

    def __init__(
        self,
        client: KubeClient | None,
        held: HeldGroups,
        engine: InferenceEngine,
        metrics: ActorMetrics,
        *,
        pod: str,
        uid: str,
        every_s: float = EVERY_S,
        pauses: Pauses | None = None,
    ) -> None:
        self._client, self._held, self._engine, self._metrics = client, held, engine, metrics
        self._pod, self._uid, self._every_s = pod, uid, every_s
        self._pauses = pauses or Pauses(first_s=every_s, most_s=20 * every_s)
        self._told: int | None = None
        self._failures = 0
        self._not_before_s = 0.0

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            cost = work_in_hand(self._held.remainders(), self._engine.progress())
            self._metrics.deletion_cost.set(cost)
            if self._client is not None and worth_telling(self._told, cost) and _now() >= self._not_before_s:
                await self._tell(self._client, cost)
            await asyncio.sleep(self._every_s * random.uniform(0.8, 1.2))  # actors that start together do not stay so

    async def _tell(self, client: KubeClient, cost: int) -> None:
        try:
            await client.annotate_pod(self._pod, self._uid, {ANNOTATION: str(cost)})
        except KubeError as error:
            self._failures += 1
            again = self._failures > 1
            log.log(
                logging.DEBUG if again else logging.WARNING,
                "the deletion cost of this pod is not kept up to date, scaling down may stop a busy actor: %s",
                error,
            )
            self._not_before_s = _now() + self._pauses.after(error, self._failures)
        else:
            if self._failures:
                log.info("the deletion cost of this pod is kept up to date again")
            self._told, self._failures = cost, 0


def _now() -> float:
    return asyncio.get_running_loop().time()
