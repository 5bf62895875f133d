"""A recorded step is the same batch again, to the bit, and a damaged or missing record is refused."""

import dataclasses
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelinerl.audit.journal import Journal, read_events
from pipelinerl.commands.replay import check_override, replay, rollback
from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.messages.sequences import Sequence, VersionSpan
from pipelinerl.recipe.fields import AlgorithmConfig, TrainerConfig
from pipelinerl.recipe.loading import load_recipe, recipe_yaml
from pipelinerl.run_dir import RunDir, resumable
from services.trainer.data.recording import RecordedStep, read_step, recorded_file, recorded_steps, write_step
from services.trainer.learn.batch import TrainingGroup
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.replay import Options, digests, line, nearest_start, plan_of, verdict
from tests.support.learner import EPISODES, episodes_of, group_of, model_of, sequences_of
from tests.unit.builders import checkpoint, model_folder

ABOUT = {"recipe": {"name": "r"}, "threads": 2}


def plain(value: Any) -> Any:
    """Everything that a sequence holds, with arrays as (dtype, bytes)."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tobytes()
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def several_versions(sequence: Sequence) -> Sequence:
    spans = (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3), VersionSpan(4, 3, sequence.num_completion_tokens, incarnation=2))
    terms, metrics = {"answer": 0.25, "format": 0.1 + 0.2}, {"tool_calls": 2.0}
    return dataclasses.replace(sequence, spans=spans, reward_components=terms, metrics=metrics, actor="actor-0", answer="é\0")


def batch() -> list[TrainingGroup]:
    first = [several_versions(one) for one in sequences_of([(3, 7), (3, 5), (3, 4)])]
    second = [dataclasses.replace(one, group_id="h", sequence_id=f"h.{at}") for at, one in enumerate(episodes_of(EPISODES))]
    odd = dataclasses.replace(second[0], behaviour_logprobs=-np.abs(second[0].behaviour_logprobs) - np.float32(1e-7))
    advantages = np.array([1 / 3, -0.1, np.nextafter(0.2, 1)])
    return [TrainingGroup(tuple(first), advantages), TrainingGroup((odd, *second[1:]), np.arange(4) / 7)]


def test_a_step_comes_back_to_the_bit_in_its_order(tmp_path: Path) -> None:
    groups = batch()
    write_step(tmp_path, RecordedStep(7, groups[::-1], ABOUT))
    write_step(tmp_path, RecordedStep(7, groups, ABOUT))  # as after a restart from a checkpoint
    found = read_step(tmp_path, 7)
    assert found.about == ABOUT
    assert [plain(one.sequences) for one in found.groups] == [plain(one.sequences) for one in groups]
    assert [one.advantages.tobytes() for one in found.groups] == [one.advantages.tobytes() for one in groups]
    assert recorded_steps(tmp_path) == [7]
    row = pq.read_table(recorded_file(tmp_path, 7)).to_pylist()[0]
    assert (row["step"], row["sequence_id"], dict(row["reward_terms"])["answer"]) == (7, "g.0", 0.25)
    assert row["versions"] == [3, 3, 4, 4, 4, 4, 4]
    assert row["incarnations"] == [1, 1, 1, 2, 2, 2, 2]


def test_observations_have_no_version_and_no_logprob(tmp_path: Path) -> None:
    write_step(tmp_path, RecordedStep(1, batch()[1:], ABOUT))
    row = pq.read_table(recorded_file(tmp_path, 1)).to_pylist()[0]
    observed = [version == -1 for version in row["versions"]]
    assert observed == [False] * 4 + [True] * 2 + [False] * 3
    assert [bool(np.isnan(one)) for one in row["logprobs"]] == observed


def test_a_damaged_record_is_refused_by_name(tmp_path: Path) -> None:
    write_step(tmp_path, RecordedStep(2, batch(), ABOUT))
    path = recorded_file(tmp_path, 2)
    whole, table = path.read_bytes(), pq.read_table(path)
    texts = table.set_column(table.schema.get_field_index("prompt_ids"), "prompt_ids", pa.array(["x"] * len(table)))
    edited = (table.replace_schema_metadata({b"pipelinerl": b"{}"}), table.replace_schema_metadata(None), texts)
    for damage in (whole[:-30], b"", b"PAR1" + whole[40:], *edited):
        path.write_bytes(damage) if isinstance(damage, bytes) else pq.write_table(damage, path)
        with pytest.raises(ServiceError, match=r"step-000002\.parquet"):
            read_step(tmp_path, 2)
    with pytest.raises(ServiceError, match="step 3 is not recorded"):
        read_step(tmp_path, 3)


def test_a_full_disk_ends_the_step_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "recorded").write_text("a file where the folder should be")
    with pytest.raises(ServiceError, match="record: true, but step 1 cannot"):
        write_step(tmp_path, RecordedStep(1, batch(), ABOUT))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1, 4, 0)),
        ({"first": 2}, (2, 4, 0)),
        ({"last": 3}, (1, 3, 0)),
        ({"first": 4, "last": 4}, (4, 4, 2)),
        ({"last": 0, "checkpoint": True}, (1, 0, 0)),
        ({"last": 2, "checkpoint": True}, (1, 2, 0)),
        ({"last": 4, "checkpoint": True}, (3, 4, 2)),
    ],
)
def test_the_range_is_what_was_recorded_and_begins_at_a_checkpoint(tmp_path: Path, options: Any, expected: Any) -> None:
    plan = plan_of(Options(**options), recorded(tmp_path))
    assert (plan.first, plan.last, plan.version, plan.begin.step) == (*expected, plan.version + 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"first": 0, "last": 3}, "--from.*steps 1 to 4"),
        ({"first": 2, "last": 5}, "--to"),
        ({"first": 4, "last": 3}, "--to.*below --from 4"),
        ({"first": 5, "last": 5, "tokens": True}, "--step"),
        ({"last": 0}, "--to"),
        ({"last": 9}, "--to.*steps 1 to 10, without 5, 6, 7, 8, 9"),
        ({"last": 5, "checkpoint": True}, "--to.*versions 0 to 4"),
        ({"last": -1, "checkpoint": True}, "--to.*versions 0 to 4"),
    ],
)
def test_a_range_that_was_not_recorded_is_refused_with_the_one_that_was(tmp_path: Path, options: Any, says: str) -> None:
    with pytest.raises(FieldError, match="record: true"):
        plan_of(Options(**options), tmp_path)
    recorded(tmp_path)
    if options.get("last") == 9:
        write_step(tmp_path, RecordedStep(10, batch(), ABOUT))
    with pytest.raises(FieldError, match=says):
        plan_of(Options(**options), tmp_path)


def recorded(run_dir: Path) -> Path:
    """A run with four steps and a checkpoint of version 2."""
    for step in range(1, 5):
        write_step(run_dir, RecordedStep(step, batch(), ABOUT))
    checkpoint(run_dir, 2)
    return run_dir


def test_the_replay_begins_at_the_newest_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    assert nearest_start(tmp_path, 5) == (0, None)
    for version in (2, 4, 6):
        checkpoint(tmp_path, version)
    assert nearest_start(tmp_path, 5) == (4, tmp_path / "checkpoints" / "step-4" / "resume")
    assert nearest_start(tmp_path, 4)[0] == 2  # step 4 begins at version 3


def test_digests_are_those_of_steps_that_count(tmp_path: Path) -> None:
    start = '{"event":"start","incarnation":%d,"version":%d,"keep":%d}\n'
    weights = '{"event":"weights","version":%d,"sha256":"%s"}\n'
    first = start % (1, 0, 0) + weights % (0, "zero") + weights % (1, "one")
    undone = weights % (2, "undone") + weights % (3, "undone")
    again = start % (2, 1, len(first)) + weights % (1, "one") + weights % (2, "two")
    (tmp_path / "ledger.jsonl").write_text(first + undone + again)
    assert digests(tmp_path) == {0: "zero", 1: "one", 2: "two"}
    for step in (1, 2, 3):  # step 3 was undone, and not taken again
        write_step(tmp_path, RecordedStep(step, batch(), ABOUT))
    assert plan_of(Options(), tmp_path).last == 2
    (tmp_path / "ledger.jsonl").write_text("")
    assert plan_of(Options(), tmp_path).last == 3, "without digests, the figures can still be compared"


def test_the_verdict_says_what_was_compared() -> None:
    assert verdict(3, [], False) == "all 3 versions have the digests of the run"
    assert verdict(3, [2], False).startswith("1 of 3 versions differ from the run, from version 2 on")
    assert "nothing was compared" in verdict(0, [], False)
    assert verdict(3, [2], True).startswith("an experiment")
    told = line(7, "b" * 64, "a" * 64, {"loss": 1e-9, "ess": 0.501, "kl": 9.0}, {"loss": 0.0, "ess": 0.5, "kl": 1.0}, False)
    assert told.startswith(f"step     7  {'b' * 12} DIFFERS from {'a' * 12}, in ess by 2.0e-03")


def refused(command: Callable[[Namespace], object], said: str, given: Namespace) -> None:
    with pytest.raises(FieldError, match=said):
        command(given)


def test_an_experiment_cannot_change_what_was_decided_before_its_data() -> None:
    check_override("trainer.learning_rate=1e-5")
    check_override("algorithm.loss=grpo")
    decided = ("sampling.temperature=0.5", "algorithm.advantage=value", "algorithm.max_lag=3", "algorithm={}", "trainer={}")
    for field in (*decided, "seed=4", "trainer.batch_size=4"):
        with pytest.raises(FieldError, match=field.partition("=")[0]):
            check_override(field)


@pytest.mark.parametrize(
    ("record", "options", "says"),
    [
        (False, {}, "record=true"),
        (True, {"tokens": True}, "needs --step"),
        (True, {"overrides": ["seed=2"]}, "seed"),
        (True, {"step": 3, "last": 4}, "leave out --from and --to"),
        (True, {"most": 0}, "at least 1"),
    ],
)
def test_a_replay_that_cannot_work_is_refused(tmp_path: Path, record: bool, options: dict[str, Any], says: str) -> None:
    refused(replay, "no such folder", arguments(tmp_path / "elsewhere"))
    refused(replay, r"recipe\.yaml", arguments(tmp_path))
    (tmp_path / "run.json").write_text('{"run": "try"}')
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(load_recipe("arithmetic", [f"record={str(record).lower()}"])))
    refused(replay, says, arguments(tmp_path, **options))


def test_a_rollback_sets_the_later_checkpoints_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a run"
    for version in (2, 4, 6):
        checkpoint(run, version)
    model = ["model.source=path", f"model.name={model_folder(tmp_path / 'model')}"]
    (run / "recipe.yaml").write_text(recipe_yaml(load_recipe("arithmetic", ["record=true", *model])))
    (run / "lineage.json").write_text('{"run": "try"}')
    refused(rollback, "no trainer of this run has started", Namespace(run=run, to=4))
    with Journal(run / "ledger.jsonl"):  # as in another pod
        refused(rollback, "a trainer or a rollback of", Namespace(run=run, to=4))
    (run / "run.json").write_text('{"run": "try"}')
    (run / "summary.json").write_text("{}")
    (run / "undone" / "1").mkdir(parents=True)  # of an earlier rollback
    refused(rollback, "continues anyway", Namespace(run=run, to=6))
    with RunDir(run, "try").locked():
        refused(rollback, "another command is using it", Namespace(run=run, to=4))
    monkeypatch.setattr(
        "subprocess.run",
        lambda command, **_: CompletedProcess(command, int(json.loads(command[-1]) == {"last": 3, "checkpoint": True})),
    )
    assert rollback(Namespace(run=run, to=3)) == 1, "a digest differs"
    checkpoint(run, 2, "{")
    refused(rollback, r"step-2.* is damaged.*remove", Namespace(run=run, to=2))
    assert list(resumable(run)) == [2, 4, 6]
    assert list(read_events(run / "ledger.jsonl")) == []
    assert rollback(Namespace(run=run, to=4)) == 0
    assert [event for _, event in read_events(run / "ledger.jsonl")] == [{"event": "rollback", "version": 4}]
    assert list(resumable(run)) == [2, 4]
    assert sorted(path.name for path in (run / "undone" / "2").iterdir()) == ["step-6", "summary.json"]
    said = capsys.readouterr().out
    assert f"pipelinerl run --resume '{run}'" in said
    assert f"{run}/undone/2: step-6, summary.json" in said


def arguments(run: Path, **options: Any) -> Namespace:
    defaults = {"first": None, "last": None, "step": None, "tokens": False, "most": 4, "overrides": []}
    return Namespace(run=run, **{**defaults, **options})


def test_a_replayed_step_has_the_settings_of_its_own_time() -> None:
    learner = Learner(wrap_model(model_of("llama-tied")), AlgorithmConfig(), TrainerConfig(learning_rate=1e-3))
    group = group_of(sequences_of([(3, 7), (3, 5), (3, 4)]))
    assert len(learner.prepare([group], 0).shares[0]) == 1
    learner.use(TrainerConfig(learning_rate=1e-2, tokens_per_microbatch=16))  # as after a resume with other settings
    prepared = learner.prepare([group], 0)
    assert (len(prepared.shares[0]), learner.step(prepared)["learning_rate"]) == (2, 1e-2)
