"""Whether a run can be resumed, judged by its folder alone: which recipe, which version, and every reason why not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.audit.journal import JOURNAL
from pipelinerl.commands.run import RESUME, resume
from pipelinerl.errors import FieldError, UserError
from pipelinerl.local.ending import write_report
from pipelinerl.local.processes import lives, living, running_pids
from pipelinerl.recipe.loading import RecipeError, recipe_from_data, recipe_yaml
from pipelinerl.run_dir import STATE_FORMAT, RunDir, find_run, newest_checkpoint, read_json, write_json

SLEEP = (sys.executable, "-S", "-c", "import sys; print(flush=True); sys.stdin.read()")
"""Says a line when it is up: before that the kernel may not know its arguments yet."""


def run_folder(path: Path, checkpoints: tuple[int, ...] = (), **trainer: Any) -> RunDir:
    path.mkdir(exist_ok=True)
    run = RunDir(path, "tiny-run")
    data = {"name": "tiny", "model": {"source": "hub", "name": "a/b"}, "task": {}, "trainer": trainer}
    recipe = recipe_from_data(data, "tiny")
    run.recipe.write_text(recipe_yaml(recipe))
    write_json(run.identity, {"run": "tiny-run", "recipe": "tiny", "started": "2026-03-04T05:06:07+00:00"})
    for version in checkpoints:
        (run.checkpoints / f"step-{version}" / "resume").mkdir(parents=True)
        about = {"format": STATE_FORMAT, "policy_version": version, "journal_bytes": 0}
        state = {**about, "recipe": recipe.model_dump(mode="json")}
        write_json(run.checkpoints / f"step-{version}" / "resume" / "run.json", state)
        write_json(path / "lineage.json", {"run": "tiny-run", "starts": [0], "recipe": state["recipe"]})
    return run


def cannot_go_on(run: RunDir, said: str, error: type[UserError] = FieldError, overrides: list[str] | None = None) -> None:
    with pytest.raises(error, match=said):
        resume(run, None, overrides or [])


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[int]:
    pipe, env = subprocess.PIPE, {**os.environ, **environment}
    with subprocess.Popen([*SLEEP, *arguments], stdin=pipe, stdout=pipe, env=env) as child:
        assert child.stdin is not None
        child.stdout.readline()
        yield child.pid
        child.stdin.close()


def test_a_run_goes_on_with_its_recipe_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run = run_folder(tmp_path, (20, 100, 40), steps=200, schedule="cosine")
    (run.checkpoints / "step-120").mkdir()  # weights alone
    (run.checkpoints / ".step-140").mkdir()  # being written when the trainer died
    (tmp_path / "addresses").mkdir()
    run.address("nats").write_text("{}")  # of a process that is gone
    with pytest.raises(FieldError, match="--placement"):
        resume(run, placement="[[0], [1]]")
    assert run.address("nats").exists(), "nothing changes before all checks"
    recipe, notes, _ = resume(find_run(tmp_path, RESUME))
    assert (recipe.trainer.steps, notes) == (200, ["tiny-run: continues from the checkpoint of version 100"])
    assert newest_checkpoint(run.path) == 100
    assert list((tmp_path / "addresses").iterdir()) == []
    recipe, notes, _ = resume(run, None, ["trainer.steps=300"])
    assert (recipe.trainer.steps, notes[1]) == (300, "recipe changed: trainer.steps: 200 → 300")
    assert notes[2] == "trainer.schedule = cosine: the decay now ends with the new last step"


def test_what_was_auto_is_auto_again(tmp_path: Path) -> None:
    run = run_folder(tmp_path, (5,), nproc=4)
    write_json(run.placement, {"trainer": [], "actors": [], "automatic": ["trainer.nproc"]})
    recipe, notes, _ = resume(run)
    assert (recipe.trainer.nproc, recipe.actor.count) == (None, 1)
    assert len(notes) == 1, "a machine with other GPUs is no change of the recipe"
    assert resume(run, None, ["trainer.nproc=2"])[0].trainer.nproc == 2


def test_what_was_edited_or_is_missing_since_is_noticed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", (5,))
    original = run.recipe.read_text()
    run.recipe.write_text(original.replace("clamp: 5.0", "clamp: 3.0"))
    cannot_go_on(run, r"algorithm\.clamp: 5\.0 → 3\.0", UserError)
    run.recipe.write_text(original)
    state = run.checkpoints / "step-5" / "resume" / "run.json"
    current = dict(read_json(state))
    write_json(state, {**current, "format": 2})
    cannot_go_on(run, r"of policy version 5 has format 2, .*finish the run with the release that wrote it")
    for damaged in ("[]", "{}", "{"):
        state.write_text(damaged)
        cannot_go_on(run, r"--resume = .*its newest checkpoint cannot be read: .*; restore its resume/run.json, or remove")
    write_json(state, current)
    (run.path / JOURNAL).write_text("damaged\n")
    cannot_go_on(run, r"ledger.jsonl: the line at byte 0 is not an event: .*; restore the file from a copy", UserError)
    (run.path / JOURNAL).write_text('{"event": "checkpoint"}\n')
    resume(run)
    (run.path / JOURNAL).unlink()
    (run.path / "lineage.json").unlink()
    cannot_go_on(run, r"--resume = .*lineage.json is missing: restore it")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    def refused(said: str, path: Path = tmp_path) -> None:
        with pytest.raises(FieldError, match=said) as raised:
            find_run(path, RESUME)
        assert raised.value.field == "--resume"

    refused("there is no such folder", tmp_path / "gone")
    run = run_folder(tmp_path)
    refused("is a file", run.recipe)
    unnamed, unusable = "does not name the run", "use 1-40 lowercase letters"
    for content, said in (("{", unnamed), ("[]", unnamed), ('{"name": "x"}', unnamed), ('{"run": "../x"}', unusable)):
        run.identity.write_text(content)
        refused(said)
    run.identity.unlink()
    refused("it has no run.json")
    run.recipe.unlink()
    refused("it has no recipe.yaml and no run.json")


def test_a_run_whose_process_lives_is_refused_and_the_process_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with process(PIPELINERL_RECIPE=str(run.recipe.resolve())) as trainer, process() as stranger:
        write_json(run.pids, {"nats": stranger, "trainer": trainer})
        cannot_go_on(run, rf"the run is still running: trainer \(pid {trainer}\); wait for its end")
        assert living(run) == running_pids(run) == {"trainer": trainer}
    assert resume(run)[1] == ["tiny-run: there is no checkpoint; the run starts again from version 0"]
    with pytest.raises(FieldError, match="the run has ended"):
        running_pids(run)


def test_a_pid_that_came_again_for_another_program_is_not_the_runs_and_unreadable_ones_are_named(tmp_path: Path) -> None:
    run, beside = run_folder(tmp_path / "run"), tmp_path / "run-2"
    with process(str(beside / "nats" / "nats.conf")) as other, process(str(run.path / "nats" / "nats.conf")) as ours:
        assert not lives(other, run.path), "a folder whose name begins alike is another"
        assert lives(ours, run.path)
        assert not lives(os.getpid(), run.path)
    assert not lives(ours, run.path)
    run = run_folder(tmp_path)
    for content in ("{", "[1]", '{"trainer": "x"}'):
        run.pids.write_text(content)
        cannot_go_on(run, r"its pids\.json cannot be read")


@pytest.mark.parametrize(
    ("taken", "steps", "summary", "refused"),
    [
        (100, 100, {"interrupted": False}, r"steps = 100: all of them have been taken; raise it: --set trainer\.steps=200"),
        (100, 101, {"interrupted": False}, ""),
        (60, 50, None, r"trainer\.steps = 50: 60 have been taken"),
        # ended between the last step and the run's end
        (100, 100, {"interrupted": True}, ""),
        (100, 100, {"interrupted": False, "error": "x"}, ""),
    ],
)
def test_a_run_goes_on_to_its_end(tmp_path: Path, taken: int, steps: int, summary: dict[str, Any] | None, refused: str) -> None:
    run = run_folder(tmp_path, (taken,))
    if summary is not None:
        write_json(run.summary, {"steps": taken, **summary})
    if refused:
        cannot_go_on(run, refused, FieldError, [f"trainer.steps={steps}"])
    else:
        _, notes, _ = resume(run, None, [f"trainer.steps={steps}"])
        assert notes[0].endswith(f"the checkpoint of version {taken}")


def test_the_scale_stays_unless_the_user_says_how_many(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    run.scale.write_text('{"actors": 2}')
    cannot_go_on(run, r"actor\.count = 0: a run on one machine needs at least 1", RecipeError, ["actor.count=0"])
    resume(run, None, ["trainer.steps=200"])
    assert run.scale.is_file(), "nor does anything change where it cannot go on"
    resume(run, None, ["actor.count=1"])
    assert not run.scale.is_file()


def test_the_recipe_of_another_version_names_the_fix(tmp_path: Path) -> None:
    run = run_folder(tmp_path, (5,))
    run.recipe.write_text(run.recipe.read_text().replace("sampling:", "sampling:\n  top_p: 1.0"))
    (tmp_path / "metrics.jsonl").touch()
    for attempt in (lambda: resume(run), lambda: write_report(tmp_path)):
        with pytest.raises(UserError, match=r"(?s)sampling\.top_p = 1\.0: no such field.*the version of pipelinerl that"):
            attempt()
