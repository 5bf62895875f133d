"""Resume state: the part of a checkpoint that is not tensors, and `lineage.json`.

`lineage.json` records the version at each start of this run's trainer, the recipe and its changes, and when training began. A
trainer writes it before publishing anything, so that no two trainers of a run use the same incarnation number. A checkpoint has
`run.json`, and `sequences.pb`: received sequences that wait for training, as length-delimited protobuf messages.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from pipelinerl.audit.journal import JOURNAL
from pipelinerl.audit.replay import Findings, events, read_history
from pipelinerl.errors import FieldError, PipelineRLError, ServiceError, UserError
from pipelinerl.messages.sequences import Sequence, decode_sequence, encode_sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.loading import check_resumable, recipe_yaml
from pipelinerl.rl.groups import FIRST_INCARNATION, Lineage
from pipelinerl.rl.ledger import SKIPPED, OpenGroup, Outcome, SequenceTracker, failed_sample
from pipelinerl.run_dir import CHANGES, CHECKPOINTS, LINEAGE, NOTHING_THERE, STATE_FORMAT, newest_state, resumable, write_whole
from pipelinerl.run_summary import METRICS, read_jsonl, totals_of
from pipelinerl.v1 import sequence_pb2
from services.trainer.checkpoint.files import tidy
from services.trainer.data.feeder import GroupTokens
from services.trainer.data.intake import HeldSequences
from services.trainer.learn.batch import TrainingGroup

log = logging.getLogger(__name__)

BEGAN = "training_began_s"


def read_lineage(run_dir: Path, run: str) -> Lineage | None:
    """Return the versions at which the trainers of `run` started; None before the first start. Raises `FieldError` if the
    folder belongs to another run, and `UserError` if `lineage.json` is malformed."""
    if not (run_dir / LINEAGE).is_file():
        return None
    try:
        content = _lineage_file(run_dir)
        found, lineage = content["run"], Lineage(tuple(int(start) for start in content["starts"]))
        if lineage.starts[0] != 0 or min(lineage.starts) < 0 or not isinstance(content["recipe"], dict):
            raise ValueError(f"starts {lineage.starts}, recipe {content['recipe']!r:.100}")
    except (ValueError, LookupError, TypeError) as error:
        path = run_dir / LINEAGE
        raise UserError(f"{path} lacks the run's name, recipe or trainer starts: {error!r}; restore it from a copy") from error
    if found != run:
        fix = f"is the folder of run {found!r}, not of {run!r}: give this run its own folder"
        raise FieldError("run_dir", str(run_dir), fix)
    return lineage


def write_lineage(run_dir: Path, run: str, lineage: Lineage, recipe: Recipe, changes: Iterable[str] = ()) -> None:
    """Write recipe.yaml, and `lineage.json` with the lineage and the recipe. Add `changes`, the recipe's changes at this start,
    to those of earlier starts. Keep the time at which training began."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "recipe.yaml", recipe_yaml(recipe))
    content: dict[str, Any] = {"run": run, "starts": list(lineage.starts), "recipe": recipe.model_dump(mode="json")}
    before = _lineage_file(run_dir)
    made = {str(lineage.starts[-1]): list(changes)} if changes else {}
    content[CHANGES] = {**before.get(CHANGES, {}), **made}
    write_whole(run_dir / LINEAGE, json.dumps(before | content) + "\n", durably=True)


def note_training_began(run_dir: Path, now_s: float) -> None:
    """Record in `lineage.json` when training began. Only the first call of a run has an effect."""
    content = _lineage_file(run_dir)
    if content and BEGAN not in content:
        write_whole(run_dir / LINEAGE, json.dumps({**content, BEGAN: now_s}) + "\n", durably=True)


def _lineage_file(run_dir: Path) -> dict[str, Any]:
    path = run_dir / LINEAGE
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(content, dict):
        raise TypeError("the file has no JSON object")
    return content


def group_tokens(run_dir: Path, reserved: int) -> GroupTokens:
    """Return the run's `GroupTokens` from group-key.json. If there is no such file, create it with a new key. Groups below
    number `reserved`, which were issued without this key, then need no proof. Raises `UserError` if the file is malformed."""
    path = run_dir / "group-key.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return GroupTokens(bytes.fromhex(content["key"]), int(content["first_group"]))
    except FileNotFoundError:
        made = GroupTokens(secrets.token_bytes(32), reserved)
        content = {"key": made.key.hex(), "first_group": reserved}
        write_whole(path, json.dumps(content) + "\n", mode=0o600, durably=True)
        return made
    except (ValueError, KeyError, TypeError) as error:
        fix = "restore the file, or remove it to get a new key"
        raise UserError(f"{path} does not contain a valid group key: {error!r}; {fix}") from error


RUN_STATE, SEQUENCES = "run.json", "sequences.pb"


@dataclass(frozen=True)
class RunState:
    """The trainer's state between two optimizer steps, without tensors. Mappings are JSON-compatible."""

    run: str
    policy_version: int
    recipe: Mapping[str, Any]
    journal_bytes: int
    """Length of the journal when the state was captured."""
    tracker: Mapping[str, Any]
    """`SequenceTracker.to_state()`."""
    next_group: int
    position: int
    """Position of the last message read from SEQUENCES; `NOTHING_THERE` after a rollback, to have the streams emptied."""
    held: HeldSequences
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Counts and totals with which the recorder, the intake and the optimizer loop continue after a restart."""

    def save(self, folder: Path) -> None:
        """Write `run.json` and `sequences.pb` into `folder`. The caller must sync them to disk."""
        held = self.held
        good = [sequence for group in held.taken for sequence in group.sequences]
        good += [sequence for group in held.ready for sequence in group]
        good += [sequence for sequence in held.open if not sequence.failure]
        with (folder / SEQUENCES).open("wb") as file:
            for sequence in good:
                serialize_length_prefixed(sequence_pb2.Sequence.FromString(encode_sequence(sequence)), file)
        content = {own.name: getattr(self, own.name) for own in fields(self)}
        content |= {"format": STATE_FORMAT, "held": _held_to_json(held)}
        (folder / RUN_STATE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def load_run_state(folder: Path) -> RunState:
    """Load the state from a checkpoint's folder `resume`. Raises `ServiceError`, which names the checkpoint, if the folder has
    no complete state in `STATE_FORMAT`."""
    try:
        content = json.loads((folder / RUN_STATE).read_text(encoding="utf-8"))
        if content.pop("format") != STATE_FORMAT:
            raise ValueError(f"its format is not {STATE_FORMAT}: it was written by another version of pipelinerl")
        sequences = {}
        with (folder / SEQUENCES).open("rb") as file:
            while (message := parse_length_prefixed(sequence_pb2.Sequence, file)) is not None:
                sequences[message.sequence_id] = decode_sequence(message.SerializeToString())
        held = _held_from_json(content.pop("held"), sequences, content["run"])
        return RunState(**content, held=held)
    except (OSError, ValueError, KeyError, TypeError, DecodeError, PipelineRLError) as error:
        raise ServiceError(
            f"the checkpoint in {folder.parent} cannot be read: {error!r}. Restore it, or remove it to resume from another one"
        ) from error


def _held_to_json(held: HeldSequences) -> dict[str, Any]:
    def ids(sequences: Iterable[Sequence]) -> list[str]:
        return [sequence.sequence_id for sequence in sequences]

    return {
        "taken": [{"ids": ids(group.sequences), "advantages": group.advantages.tolist()} for group in held.taken],
        "ready": [{"group": group[0].group_id, "ids": ids(group)} for group in held.ready],
        "open": [
            {"id": s.sequence_id, **({"failure": s.failure, "group_size": s.group_size} if s.failure else {})}
            for s in held.open
        ],
    }


def _held_from_json(content: Mapping[str, Any], sequences: Mapping[str, Sequence], run: str) -> HeldSequences:
    def those(ids: Iterable[str]) -> tuple[Sequence, ...]:
        return tuple(sequences[sequence_id] for sequence_id in ids)

    def failed(entry: Mapping[str, Any]) -> Sequence:
        group_id, _, index = entry["id"].rpartition(".")
        return failed_sample(run, group_id, int(index), entry["group_size"], entry["failure"])

    return HeldSequences(
        taken=tuple(TrainingGroup(those(g["ids"]), np.array(g["advantages"])) for g in content["taken"]),
        ready=tuple(those(g["ids"]) for g in content["ready"]),
        open=tuple(failed(entry) if "failure" in entry else sequences[entry["id"]] for entry in content["open"]),
    )


def journaled_state(run_dir: Path, run: str, version: int, recipe: Recipe) -> RunState:
    """From the journal and metrics.jsonl, reconstruct the state right after the step that made `version`. The state holds no
    sequences, so those in flight will be generated again. Raises `FieldError` if the journal ends before that step, and
    `LedgerViolation` if the journal contradicts itself."""
    tracker, sizes, kept = SequenceTracker(), dict[str, int](), set[str]()
    end, is_made, findings = None if version else 0, False, Findings()
    history = read_history(run_dir / JOURNAL, findings)
    for offset, event, undone_by in events(run_dir / JOURNAL, history, findings):
        kind, end = event["event"], offset if end is None and is_made else end
        if end is not None or undone_by is not None:
            continue
        if kind == "issue":
            sizes[event["group"]] = event["samples"]
            tracker.ledger.issue(f"{event['group']}.{index}" for index in range(event["samples"]))
        elif kind == "close":
            outcome, reason = Outcome(event["outcome"]), event.get("reason", "")
            tracker.ledger.close(event["ids"], outcome, reason)
            if outcome is Outcome.TRAINED or reason == SKIPPED:
                kept.update(sequence_id.rpartition(".")[0] for sequence_id in event["ids"])
        is_made = kind == "step" and event["version"] == version
    if end is None and not is_made:
        raise FieldError("--to", version, "the journal ends before the step that made this version; choose an earlier version")
    in_flight = dict.fromkeys(sequence_id.rpartition(".")[0] for sequence_id in tracker.ledger.in_flight())
    tracker.open_groups = {group: OpenGroup(sizes[group]) for group in in_flight}
    tracker.issued_groups, tracker.lost_groups = len(sizes), len(sizes) - len(kept | in_flight.keys())
    records = [record for record in read_jsonl(run_dir / METRICS) if record["step"] <= version]
    totals = totals_of(records)
    return RunState(
        run=run,
        policy_version=version,
        recipe=recipe.model_dump(mode="json"),
        journal_bytes=history.size if end is None else end,
        tracker=tracker.to_state(),
        next_group=len(sizes),
        position=NOTHING_THERE,
        held=HeldSequences(),
        figures={
            "tokens_arrived": totals.tokens_generated,
            "bad_messages": 0,
            "skipped_in_a_row": len([*takewhile(lambda record: record.get("skipped"), reversed(records))]),
            "report": {"time_s": records[-1]["time_s"] if records else 0.0, "totals": asdict(totals)},
        },
    )


RESUME, STATE = "resume", "state"
"""Folder names in a run directory: `checkpoints/step-<v>/resume/state`."""


@dataclass(frozen=True)
class Start:
    """Starting point of a trainer. `lineage`: all starts up to this one. `again`: True if the run had a trainer before."""

    lineage: Lineage = FIRST_INCARNATION
    again: bool = False
    folder: Path | None = None
    """Folder `…/resume` of the checkpoint to resume from; None = start at version 0."""
    state: RunState | None = None
    positions: Mapping[int, int] = field(default_factory=dict)
    """For each checkpoint, oldest first, by version: position of the last message of SEQUENCES read before the checkpoint."""
    saved_at_s: float | None = None
    """Unix time of the newest checkpoint, or of the start of training if there is none. None before training."""
    changes: tuple[str, ...] = ()
    """Changed recipe fields with old and new value, since the checkpoint in `folder` or, without one, since the last start."""

    @property
    def version(self) -> int:
        return self.state.policy_version if self.state else 0


def find_start(run_dir: Path, run: str, recipe: Recipe) -> Start:
    """Find where to start: at the newest checkpoint, or at version 0. Clean up after a killed trainer. Raises `UserError` if
    files are missing or a recipe change is not allowed, and the errors of `read_lineage` and `load_run_state`."""
    for parent in (run_dir, run_dir / CHECKPOINTS):
        tidy(parent)
    newest_state(run_dir, "run_dir")  # refuses a folder that lost files
    lineage = read_lineage(run_dir, run)
    if lineage is None:
        return Start()
    states = {path.parent: load_run_state(path.parent) for path in resumable(run_dir).values()}
    folder, state = list(states.items())[-1] if states else (None, None)
    if state is not None and state.run != run:
        raise FieldError("run_dir", str(run_dir), f"step-{state.policy_version} belongs to run {state.run!r}, not to {run!r}")
    earlier = _lineage_file(run_dir)
    changes = tuple(map(str, check_resumable(state.recipe if state else earlier["recipe"], recipe)))
    for change in changes:
        log.info("recipe changed: %s", change)
    if state is None:
        log.warning("an earlier trainer of this run left no checkpoint: training begins again at version 0")
    saved_at_s = folder.stat().st_mtime if folder else earlier.get(BEGAN)
    positions = {one.policy_version: one.position for one in states.values()}
    restarted = lineage.restarted(state.policy_version if state else 0)
    return Start(restarted, True, folder, state, positions, saved_at_s, changes)


def evaluates_first(start: Start, recipe: Recipe) -> bool:
    """Return whether to evaluate the version of `start`: an evaluation is due, and the checkpoint lacks its result. Pure."""
    every, version = recipe.evaluation.every_steps, start.version
    known = start.state.figures["report"]["totals"]["heldout"] if start.state else []
    due = version in (0, recipe.trainer.steps) or (every > 0 and version % every == 0)
    return due and not any(heldout["version"] == version for heldout in known)
