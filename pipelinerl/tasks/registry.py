"""From a recipe's task section to its source of problems."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks.source import TaskSource


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
