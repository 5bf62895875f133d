"""Watches the actors' pods, so that one that is deleted has left at once and not when its heartbeat has expired.

The heartbeat stays what membership rests on: without the API, or the right to use it, a line says so and it is all there is.
"""

from __future__ import annotations

import logging

from pipelinerl.kube.client import in_cluster
from pipelinerl.kube.pods import PodWatch
from pipelinerl.service.settings import TrainerSettings
from services.trainer.weight_sync.updater import WeightUpdater

log = logging.getLogger(__name__)

WITHOUT = "an actor's departure is noticed by its own word or by its heartbeat"


async def watch_actor_pods(settings: TrainerSettings, updater: WeightUpdater) -> None:
    """Runs until cancelled; returns at once where there is nothing to watch."""
    client = in_cluster(settings)
    if client is None:
        return
    if not settings.actor_selector:
        log.warning("PIPELINERL_ACTOR_SELECTOR is empty: no pods are watched, %s", WITHOUT)
        return
    try:
        await PodWatch(client, settings.actor_selector, updater.pod_ends, without=WITHOUT).run()
    finally:
        await client.close()
