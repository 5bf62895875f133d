"""What may differ between the recipe that a run was started with and the one it is resumed with.

`MAY_CHANGE` and `MUST_STAY` are the decision, field by field; a field that is in neither is a mistake of ours that a test
finds. Pure. Reads no files, and judges values nowhere: that the new recipe is valid by itself is `recipe.py`'s business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelinerl.errors import UserError
from pipelinerl.recipe.fields import PUBLISHED, Recipe, section_of

MAY_CHANGE = frozenset({
    "description", "trackers",
    "trainer.steps", "trainer.max_skipped_steps", "trainer.give_up_after_groups",
    "trainer.threads", "trainer.nproc", "trainer.context_parallel", "trainer.shard_ranks", "trainer.reshard_after_forward",
    "trainer.gradient_checkpointing", "trainer.compile", "trainer.tokens_per_microbatch",
    "actor.count", "actor.sequences_in_progress", "actor.verify_batch", "actor.publish_buffer",
    "actor.engine.kv_cache_gib", "actor.engine.gpu_memory_utilization", "actor.engine.tensor_parallel_size",
    "actor.engine.enforce_eager", "actor.engine.max_batched_tokens", "actor.engine.threads",
    "weights.backend", "weights.chunk_mib", "weights.staging_buffers", "weights.deadline_s", "weights.recompute_kv",
    "weights.probe_every", "weights.probe_tokens", "weights.join_timeout_s",
    "evaluation.every_steps", "evaluation.timeout_s",
    "checkpoint.*",
})  # fmt: skip
"""How long, how often and with what means. `section.*` is everything in a section."""

MUST_STAY = frozenset({
    "name", "mode", "seed",
    "model.*", "task.*", "reward.*", "sampling.*", "algorithm.*",
    "trainer.batch_size", "trainer.learning_rate", "trainer.schedule", "trainer.warmup_steps", "trainer.decay_steps",
    "trainer.final_learning_rate", "trainer.optimizer", "trainer.beta1", "trainer.beta2", "trainer.epsilon",
    "trainer.weight_decay", "trainer.max_grad_norm", "trainer.lora.*",
    "actor.engine.quantization", "weights.wire_dtype", "evaluation.temperature",
})  # fmt: skip
"""What is learned, from what, and how it is measured: with another value it is another run."""


class Absent(StrEnum):
    """Stands for a value that there is not."""

    MISSING = "(missing)"
    UNKNOWN = "(no such field in this version)"


@dataclass(frozen=True)
class Change:
    """One field that differs. `field` is dotted; `old` and `new` are JSON values, or `Absent`."""

    field: str
    old: Any
    new: Any
    allowed: bool

    def __str__(self) -> str:
        return f"{self.field}: {_shown(self.old)} → {_shown(self.new)}"


class ChangedRecipe(UserError):
    """A run cannot go on with this recipe. Attribute: `refused`, the changes that forbid it."""

    def __init__(self, refused: Sequence[Change]) -> None:
        self.refused = tuple(refused)
        gone = [change for change in refused if change.new is Absent.UNKNOWN]
        lines = ["a run that is resumed keeps its recipe; put these back, or start a new run:"]
        lines += [f"  - {change}" for change in refused]
        if gone:
            lines.append(
                "what this version does not know cannot be put back: resume with the version that began the run"
            )
        super().__init__("\n".join(lines))


def check_resumable(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """The changes from `old` (a resolved recipe as plain data) to `new`, all of them allowed.

    Raises `ChangedRecipe` with every one that is not.
    """
    changes = recipe_changes(old, new)
    refused = [change for change in changes if not change.allowed]
    if refused:
        raise ChangedRecipe(refused)
    return changes


def recipe_changes(old: Mapping[str, Any], new: Recipe) -> list[Change]:
    """Every field that differs, in the recipe's order.

    `old` may be of another version of the program: a field that it lacks had today's default, one that today's recipe
    lacks is reported as such. A section that one of the two has and the other has not (`null`) is one change.
    """
    pairs = _differences(_as_published(old), new.model_dump(mode="json"), Recipe)
    return [Change(path, was, now, may_change(path)) for path, was, now in pairs]


def recipe_hash(recipe: Recipe) -> str:
    """SHA-256, hex, of the resolved recipe as JSON without spaces, keys sorted."""
    text = json.dumps(recipe.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def may_change(path: str) -> bool:
    """Whether a dotted field, or a whole optional section, may change. Unknown ones may not."""
    return bool(MAY_CHANGE & _names(path))


def must_stay(path: str) -> bool:
    """Whether the table says outright that a field may not change."""
    return bool(MUST_STAY & _names(path))


def leaf_fields(model: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all fields that are no sections."""
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is None:
            yield prefix + name
        else:
            yield from leaf_fields(section, f"{prefix}{name}.")


def _names(path: str) -> set[str]:
    """The entries of a table that cover a path: itself, what is in it, and what it is in."""
    parts = path.split(".")
    return {path, *(".".join(parts[:count]) + ".*" for count in range(1, len(parts) + 1))}


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], model: type[BaseModel], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        was, now = old[name] if name in old else _default(field), new[name]
        if section is not None and isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, section, f"{prefix}{name}.")
        elif was != now:
            yield prefix + name, was, now
    for name in old:
        if name not in model.model_fields:
            yield prefix + name, old[name], Absent.UNKNOWN


def _default(field: FieldInfo) -> Any:
    """As JSON has it."""
    if field.is_required():
        return Absent.MISSING
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def _as_published(old: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the settings that a loss brings along, which are the defaults of its section."""
    algorithm = old.get("algorithm")
    if not isinstance(algorithm, Mapping):
        return old
    return {**old, "algorithm": {**PUBLISHED.get(str(algorithm.get("loss")), {}), **algorithm}}


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, Absent) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."
