"""From what the trainer measures to the number that an autoscaler of the actors follows, as a metric.

The number itself: `pipelinerl/rl/autoscaling.py`. Not known yet, the metric has no value, so that whoever follows
it keeps the replicas that there are. It scales nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.autoscaling import ActorCounts, ReplicasWanted
from pipelinerl.telemetry.metrics import MetricSet
from services.trainer.data.actor_client import ActorLoad
from services.trainer.records import StepRecord

PREFIX, NAME = "pipelinerl_actor", "replicas_wanted"
METRIC = f"{PREFIX}_{NAME}"
_USED_UP = ("trained", "dropped_stale", "dropped_filtered", "failed")


class ReplicaAdvice:
    """See the module."""

    def __init__(self, recipe: Recipe, registry: CollectorRegistry) -> None:
        self._advice = ReplicasWanted(
            slots=recipe.actor.sequences_in_progress,
            batch_size=recipe.trainer.batch_size,
            in_flight=most_in_flight(recipe),
        )
        self._used_up: int | None = None
        text = "Actors that would keep the trainer busy within the lag bound; none until that is measured."
        MetricSet(PREFIX, registry).reading(NAME, text, unit="actors").read(lambda: self._advice.wanted)

    def step(self, record: StepRecord) -> None:
        """One step's record, as it goes to metrics.jsonl."""
        used_up = sum(record["sequences"][state] for state in _USED_UP)
        before, self._used_up = self._used_up, used_up
        seconds = record["step_s"]
        self._advice.step(0 if before is None else used_up - before, seconds["total"] - seconds.get("wait", 0.0))

    def actors(self, loads: Mapping[str, ActorLoad], *, measuring: bool) -> None:
        """What all actors answer now; `measuring`: they are being evaluated."""
        counts = {
            name: ActorCounts(load.sequences_finished, load.busy_s, load.sequences_in_progress)
            for name, load in loads.items()
        }
        self._advice.actors(counts, measuring=measuring)

    def finish(self) -> None:
        self._advice.finish()


def most_in_flight(recipe: Recipe) -> int | None:
    """M: sequences that may be issued and not consumed; None where nothing but the actors' number bounds them. Pure."""
    if recipe.mode == "conventional":
        return recipe.algorithm.conventional_g * recipe.trainer.batch_size
    max_lag = recipe.algorithm.max_lag
    return None if max_lag is None else (1 + max_lag) * recipe.trainer.batch_size
