"""The real trainer, each optimizer step of which takes at least the time that virtual accelerators would need.

Run as `python -m benchmarks.virtual_trainer PROFILE FILE`, configured as `services.trainer` is; FILE tells at the end how well
the machine kept pace. One rank stands for all training accelerators.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from benchmarks.virtual_profile import Pace, Profile, arguments
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import RankSettings, TrainerSettings
from services.trainer.app import serve
from services.trainer.checkpoint.run_state import Start
from services.trainer.learn.step import PreparedStep
from services.trainer.loop import PolicyTrainer, load_policy_trainer


class PacedTrainer(PolicyTrainer):
    """`profile.accelerators` share each token's training."""

    def __init__(self, policy: PolicyTrainer, recipe: Recipe, profile: Profile) -> None:
        super().__init__(policy.learner, policy.tokenizer, policy.sender, recipe)
        self.pace, self._token_s = Pace(), profile.training * profile.flash_s / profile.accelerators

    def step(self, prepared: PreparedStep) -> dict[str, Any]:
        began_s = time.monotonic()
        figures = super().step(prepared)
        due_s = self.pace.due_s(began_s, figures["tokens_trained"] * self._token_s)
        time.sleep(max(0.0, due_s - time.monotonic()))  # on the compute thread, which would be computing
        return figures


async def run(settings: TrainerSettings, stop: asyncio.Event, context: LogContext) -> None:
    profile, file = arguments(sys.argv)
    policies: list[PacedTrainer] = []

    def load(recipe: Recipe, settings: TrainerSettings, ranks: RankSettings, start: Start) -> PolicyTrainer:
        policies.append(PacedTrainer(load_policy_trainer(recipe, settings, ranks, start), recipe, profile))
        return policies[0]

    try:
        await serve(settings, RankSettings(), stop, context, load)
    finally:
        for policy in policies:
            policy.pace.write(file)


if __name__ == "__main__":
    leave(run_service(TrainerSettings, "trainer", run))
