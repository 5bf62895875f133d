"""The trainer's service, which also saves its policy every few steps: `python -m benchmarks.saving_trainer EVERY FOLDER`.

Started by `saved_runs.py` in place of `services.trainer`. A checkpoint would be far more than a curve needs: state of the
optimizer, sequences that are held, files brought onto the disk. Here the thread that trains writes the weights alone, as
`FOLDER/step-<version>`, and the step's record says as `saving_s` for how long, so that the time can be taken off.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pipelinerl.service.lifecycle import leave, run_service
from pipelinerl.service.settings import TrainerSettings
from services.trainer import loop
from services.trainer.__main__ import run
from services.trainer.learn.step import PreparedStep
from services.trainer.world import WEIGHTS


class SavingTrainer(loop.PolicyTrainer):
    """On one rank."""

    every: int
    folder: Path

    def step(self, prepared: PreparedStep) -> dict[str, Any]:
        figures, version = super().step(prepared), prepared.version + 1
        began_s = time.monotonic()
        if version % self.every == 0 or version == self._recipe.trainer.steps:
            self._save(self.folder / f"step-{version}")
        return {**figures, "saving_s": time.monotonic() - began_s}

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        model = self.learner.policy.model
        model.config.save_pretrained(folder)
        if model.generation_config is not None:  # which tokens end a completion
            model.generation_config.save_pretrained(folder)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in self.learner.gather(WEIGHTS)}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    SavingTrainer.every, SavingTrainer.folder = int(sys.argv[1]), Path(sys.argv[2])
    loop.PolicyTrainer = SavingTrainer  # what `load_policy_trainer` makes
    return run_service(TrainerSettings, "trainer", run)


if __name__ == "__main__":
    leave(main())
