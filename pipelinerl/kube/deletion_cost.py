"""Tells Kubernetes which pods of a Deployment to take first when it scales down: those whose stop costs least."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from pipelinerl.kube.client import KubeBackoff, KubeClient, KubeError

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
MOST = 2**31 - 1
"""The annotation is an int32."""
EVERY_S = 15.0
BACKOFF = KubeBackoff(first_s=EVERY_S, most_s=20 * EVERY_S)
CHANGED_SHARE, CHANGED_TOKENS = 0.2, 256
"""Of what was told last: a cost that differs by less is told as it was. An actor at work has sequences of all lengths in hand,
whose sum moves little; the order of busy pods is then true to a fifth, and that of idle and busy ones exact."""


def worth_telling(told: int | None, cost: int) -> bool:
    """Whether `cost` may change which pod is the cheapest; `told` None: nothing was told yet. Pure."""
    if told is None or (told == 0) != (cost == 0):
        return True
    return abs(cost - told) > max(CHANGED_TOKENS, CHANGED_SHARE * told)


async def keep_deletion_costs(client: KubeClient, costs: Callable[[], Mapping[tuple[str, str], int]]) -> None:
    """Keeps the annotation of each pod at its cost. Runs until cancelled.

    `costs()`: tokens by name and uid of the pod. Consumes these, produces annotations, waits for the clock and the API.
    Kubernetes advises against frequent updates of the annotation: it is written at most every `EVERY_S`, and only when the cost
    has changed enough to change an order of pods. Without API or permission one line says so, and a try is made rarely.
    """
    told: dict[tuple[str, str], int] = {}
    failures = 0
    while True:
        now, delay_s = costs(), EVERY_S
        told = {pod: cost for pod, cost in told.items() if pod in now}
        for pod, cost in now.items():
            if not worth_telling(told.get(pod), cost):
                continue
            try:
                await client.annotate_pod(*pod, {ANNOTATION: str(min(cost, MOST))})
            except KubeError as error:
                if error.status in (404, 409):  # gone meanwhile, or another one of its name
                    continue
                failures += 1
                log.log(
                    logging.WARNING if failures == 1 else logging.DEBUG,
                    "the deletion costs of the actors' pods are not kept up to date, scaling down may stop a busy actor: %s",
                    error,
                )
                delay_s = BACKOFF.after(error, failures)
                break
            if failures:
                log.info("the deletion costs of the actors' pods are kept up to date again")
            told[pod], failures = cost, 0
        await asyncio.sleep(delay_s)
