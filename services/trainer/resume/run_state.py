"""What a checkpoint holds beside tensors: books, feeder, held sequences, position in the log, figures, the recipe.

Two files: `run.json`, and `sequences.pb` with the held sequences as length-delimited protobuf messages. A failed sample is
kept by its reason alone. Reads and writes these files; who captures the parts, and when, is the caller's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from pipelinerl.algorithms.grouping import CompletedGroup
from pipelinerl.codec import decode_sequence, encode_sequence
from pipelinerl.errors import PipelineRLError, ServiceError
from pipelinerl.types import Sequence
from pipelinerl.v1 import sequence_pb2
from services.trainer.learn.batch import TrainingGroup
from services.trainer.resume.files import write_durably, write_json_durably
from services.trainer.sequences.books import failed_sample
from services.trainer.sequences.intake import HeldSequences

FORMAT = 1
RUN_STATE, SEQUENCES = "run.json", "sequences.pb"


@dataclass(frozen=True)
class RunState:
    """The trainer between two optimizer steps, but for its tensors. What is a mapping is JSON-able."""

    run: str
    policy_version: int
    starts: tuple[int, ...]
    """The lineage of the trainer that wrote it."""
    recipe: Mapping[str, Any]
    recipe_hash: str
    journal_bytes: int
    """Length of the journal up to here."""
    books: Mapping[str, Any]
    """`Books.to_state()`."""
    next_group: int
    """The feeder's."""
    position: int
    """Last message of SEQUENCES that was read."""
    held: HeldSequences
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Of the run's report and intake."""

    def save(self, folder: Path) -> None:
        """Writes both files into `folder`; returns when they are on disk."""
        write_durably(folder / SEQUENCES, _delimited(_good_sequences(self.held)))
        content = {own.name: getattr(self, own.name) for own in fields(self)}
        write_json_durably(folder / RUN_STATE, {"format": FORMAT, **content, "held": _held_to_json(self.held)})


def load_run_state(folder: Path) -> RunState:
    """Raises `ServiceError` naming the folder when it holds no whole state of this version."""
    try:
        content = json.loads((folder / RUN_STATE).read_text(encoding="utf-8"))
        if content.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}: it was written by another version of pipelinerl")
        sequences = {s.sequence_id: s for s in _read_delimited((folder / SEQUENCES).read_bytes())}
        held = _held_from_json(content.pop("held"), sequences, content["run"])
        return RunState(**{**content, "starts": tuple(content["starts"]), "held": held})
    except (OSError, ValueError, KeyError, TypeError, DecodeError, PipelineRLError) as error:
        raise ServiceError(
            f"the checkpoint in {folder.parent} cannot be read: {error!r}. Remove that folder to go on from the one before it"
        ) from error


def _good_sequences(held: HeldSequences) -> Iterator[Sequence]:
    for taken in held.taken:
        yield from taken.sequences
    for ready in held.ready:
        yield from ready.sequences
    yield from (sequence for sequence in held.open if not sequence.failure)


def _held_to_json(held: HeldSequences) -> dict[str, Any]:
    """By ids; the sequences are in the other file."""
    return {
        "taken": [{"ids": _ids(group.sequences), "advantages": group.advantages.tolist()} for group in held.taken],
        "ready": [{"group": group.group_id, "ids": _ids(group.sequences)} for group in held.ready],
        "open": [
            {"id": s.sequence_id, **({"failure": s.failure, "group_size": s.group_size} if s.failure else {})}
            for s in held.open
        ],
    }


def _held_from_json(content: Mapping[str, Any], sequences: Mapping[str, Sequence], run: str) -> HeldSequences:
    def those(ids: Iterable[str]) -> tuple[Sequence, ...]:
        return tuple(sequences[sequence_id] for sequence_id in ids)

    return HeldSequences(
        taken=tuple(TrainingGroup(those(g["ids"]), np.array(g["advantages"])) for g in content["taken"]),
        ready=tuple(CompletedGroup(g["group"], those(g["ids"])) for g in content["ready"]),
        open=tuple(_failed(entry, run) if "failure" in entry else sequences[entry["id"]] for entry in content["open"]),
    )


def _failed(entry: Mapping[str, Any], run: str) -> Sequence:
    group_id, _, index = entry["id"].rpartition(".")
    return failed_sample(run, group_id, int(index), entry["group_size"], entry["failure"])


def _ids(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.sequence_id for sequence in sequences]


def _delimited(sequences: Iterable[Sequence]) -> bytes:
    out = BytesIO()
    for sequence in sequences:
        message = sequence_pb2.Sequence()
        message.ParseFromString(encode_sequence(sequence))
        serialize_length_prefixed(message, out)
    return out.getvalue()


def _read_delimited(data: bytes) -> Iterator[Sequence]:
    source = BytesIO(data)
    while (message := parse_length_prefixed(sequence_pb2.Sequence, source)) is not None:
        yield decode_sequence(message.SerializeToString())
