"""Record the sequences of each optimizer step as Parquet, and read them back. docs/run-directory.md lists the columns.

Each step has one file with a row per branch, in the order of the step's groups and sequences. The files have plain columns, not
protobuf messages, because people also use them for analysis, offline training and distillation.
"""

from __future__ import annotations

import io
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipelinerl import __version__
from pipelinerl.errors import ServiceError, first_line
from pipelinerl.messages.sequences import Branch, FinishReason, Sequence, Turn, VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.run_dir import write_whole
from services.trainer.learn.batch import TrainingGroup

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "recorded"
_ABOUT = b"pipelinerl"
_NOT_SAMPLED = -1
"""Stands for the version and incarnation of an observation's token. The log-probability of such a token is NaN."""
_OF_SEQUENCE = (
    *("run", "sequence_id", "group_id", "sample_index", "group_size", "task", "actor", "reward", "generation_s"),
    *("prompt_text", "completion_text", "reference_json", "answer", "reason"),
)
"""Columns that copy the field of `Sequence` with the same name. All rows of a sequence have the same value."""


def recorded_file(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:06}.parquet"


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the numbers of the recorded steps, in order."""
    names = (path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


@dataclass(frozen=True)
class RecordedStep:
    """The groups of the step that turned policy version `step` - 1 into `step`. `about`: result of `software` for the step."""

    step: int
    groups: list[TrainingGroup]
    about: Mapping[str, Any]


def software(recipe: Recipe, ranks: int) -> dict[str, Any]:
    """Return the software, hardware and recipe that affect a step's result, as JSON-compatible values."""
    import torch
    import transformers

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    versions = {"pipelinerl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    threads = torch.get_num_threads()
    return {**versions, "device": device, "ranks": ranks, "threads": threads, "recipe": recipe.model_dump(mode="json")}


def write_step(run_dir: Path, recorded: RecordedStep) -> None:
    """Write a step durably, and replace an earlier record of it. Raises `ServiceError` if it cannot be written."""
    import pyarrow.parquet as pq

    path, content = recorded_file(run_dir, recorded.step), io.BytesIO()
    pq.write_table(to_table(recorded), content, compression="zstd")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_whole(path, content.getvalue(), durably=True)
    except OSError as error:
        why = f"the recipe has record: true, but step {recorded.step} cannot be recorded in {path}"
        raise ServiceError(f"{why}: {first_line(error)}") from error


def read_step(run_dir: Path, step: int) -> RecordedStep:
    """Read a step. Raises `ServiceError` if it was not recorded, or its file is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = recorded_file(run_dir, step)
    try:
        return from_table(step, pq.read_table(path))
    except FileNotFoundError:
        raise ServiceError(f"step {step} is not recorded: there is no {path}") from None
    except PermissionError as error:
        raise ServiceError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError, AttributeError) as error:
        raise ServiceError(f"{path} is damaged, or of another version of pipelinerl: {first_line(error)}") from error


def to_table(recorded: RecordedStep) -> pa.Table:
    """Return the step as a table with one row for each branch. Pure."""
    import pyarrow as pa

    pairs = [pair for group in recorded.groups for pair in zip(group.sequences, group.advantages.tolist(), strict=True)]
    rows = [(one, at, branch, advantage) for one, advantage in pairs for at, branch in enumerate(one.all_branches)]
    branches = [branch for _, _, branch, _ in rows]
    of_tokens = [_of_tokens(branch) for branch in branches]
    named, int32s = pa.map_(pa.string(), pa.float64()), pa.large_list(pa.int32())
    turn = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("finish_reason", pa.string())])
    columns = {
        "step": pa.array([recorded.step] * len(rows), pa.int32()),
        **{name: pa.array([getattr(one, name) for one, *_ in rows]) for name in _OF_SEQUENCE},
        "reward_terms": pa.array([list(one.reward_components.items()) for one, *_ in rows], named),
        "metrics": pa.array([list(one.metrics.items()) for one, *_ in rows], named),
        "advantage": pa.array([advantage for *_, advantage in rows], pa.float64()),
        "branch": pa.array([at for _, at, _, _ in rows], pa.int32()),
        "finish_reason": pa.array([branch.finish_reason for branch in branches], pa.string()),
        "turns": pa.array([[vars(one) for one in branch.turns] for branch in branches], pa.list_(turn)),
        "prompt_ids": pa.array([branch.prompt_token_ids for branch in branches], int32s),
        "completion_ids": pa.array([branch.completion_token_ids for branch in branches], int32s),
        "logprobs": pa.array([one[0] for one in of_tokens], pa.large_list(pa.float32())),
        "versions": pa.array([one[1] for one in of_tokens], int32s),
        "incarnations": pa.array([one[2] for one in of_tokens], int32s),
    }
    return pa.table(columns).replace_schema_metadata({_ABOUT: json.dumps(recorded.about).encode()})


def from_table(step: int, table: pa.Table) -> RecordedStep:
    """Return the step from which `to_table` made `table`. Pure."""
    of_tokens = ["prompt_ids", "completion_ids", "logprobs", "versions", "incarnations"]
    rows = table.drop_columns(of_tokens).to_pylist()
    for name in of_tokens:
        for row, ids in zip(rows, table[name], strict=True):
            row[name] = ids.values.to_numpy(zero_copy_only=False)
    groups = []
    for _, of_group in groupby(rows, key=lambda row: row["group_id"]):
        own = [list(of_one) for _, of_one in groupby(of_group, key=lambda row: row["sequence_id"])]
        advantages = np.array([of_one[0]["advantage"] for of_one in own])
        groups.append(TrainingGroup(tuple(map(_sequence, own)), advantages))
    about = json.loads(table.schema.metadata[_ABOUT])
    if lacking := {"recipe", "threads"} - about.keys():
        raise LookupError(f"its metadata lack {', '.join(sorted(lacking))}")
    return RecordedStep(step, groups, about)


def _of_tokens(branch: Branch) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.int32]]:
    """Return log μ, version and incarnation of each completion token, [tokens] each."""
    size = branch.num_completion_tokens
    logprobs = np.full(size, np.nan, np.float32)
    versions, incarnations = np.full(size, _NOT_SAMPLED, np.int32), np.full(size, _NOT_SAMPLED, np.int32)
    for span in branch.spans:
        versions[span.start : span.end], incarnations[span.start : span.end] = span.version, span.incarnation
    logprobs[versions != _NOT_SAMPLED] = branch.behaviour_logprobs
    return logprobs, versions, incarnations


def _sequence(rows: list[dict[str, Any]]) -> Sequence:
    first, others = rows[0], tuple(Branch(**_of_branch(row)) for row in rows[1:])
    terms, metrics = dict(first["reward_terms"]), dict(first["metrics"])
    same = {name: first[name] for name in _OF_SEQUENCE}
    return Sequence(**same, **_of_branch(first), reward_components=terms, metrics=metrics, branches=others)


def _of_branch(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "prompt_token_ids": row["prompt_ids"],
        "completion_token_ids": row["completion_ids"],
        "behaviour_logprobs": row["logprobs"][row["versions"] != _NOT_SAMPLED],
        "spans": tuple(_spans(row["versions"], row["incarnations"])),
        "turns": tuple(
            Turn(one["start"], one["end"], one["finish_reason"] and FinishReason(one["finish_reason"])) for one in row["turns"]
        ),
        "finish_reason": row["finish_reason"] and FinishReason(row["finish_reason"]),
    }


def _spans(versions: NDArray[np.int32], incarnations: NDArray[np.int32]) -> Iterator[VersionSpan]:
    """Yield the spans of a completion from each token's version and incarnation. Unsampled tokens are in no span."""
    edges = np.flatnonzero((np.diff(versions) != 0) | (np.diff(incarnations) != 0)) + 1
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(versions)], strict=True):
        if start < end and versions[start] != _NOT_SAMPLED:
            yield VersionSpan(int(versions[start]), start, end, int(incarnations[start]))
