"""What a source of problems is, a pure function of split and index, and which one a recipe's task section names.

The same (split, index) gives the same problem in every process of every run with the same settings, so that a feeder
resumes from a number. Held-out problems never occur in training. How a problem becomes tokens is the trainer's business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.recipe.fields import TaskConfig


class Split(StrEnum):
    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True)
class Problem:
    """One problem. `reference` is JSON-able: `answer`, and for reasoning-gym `dataset` and `entry` (what its scorer needs)."""

    task: str
    question: str
    reference: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reference_json(self) -> str:
        return json.dumps(self.reference, separators=(",", ":"))


class TaskSource(Protocol):
    """Problems of one task."""

    def problem(self, split: Split, index: int) -> Problem:
        """A file's training indices go on after its end, into another epoch.

        Raises `FieldError` when the task has too few distinct problems for its held-out split.
        """
        ...


def make_source(config: TaskConfig, seed: int) -> TaskSource:
    """Raises `FieldError` or `UserError` for what the user can mend. Imports what the source needs (about a second)."""
    if config.source == "jsonl":
        from pipelinerl.tasks.files import FileSource

        return FileSource(
            Path(config.path),
            task=config.name,
            prompt_field=config.prompt_field,
            answer_field=config.answer_field,
            seed=seed,
            num_heldout=config.heldout_problems,
        )
    from pipelinerl.tasks.reasoning_gym import ReasoningGymSource

    return ReasoningGymSource(
        config.name,
        config.config,
        seed=seed,
        num_heldout=config.heldout_problems,
        compact=config.prompt_style == "compact",
    )
