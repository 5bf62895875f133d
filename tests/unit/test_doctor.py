"""`pipelinerl doctor`: each rule fires on its fault and is silent about healthy runs and recipes."""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.commands.validate import doctor
from pipelinerl.doctor import runs
from pipelinerl.doctor.findings import rules_of
from pipelinerl.doctor.recipes import ADOPTED, RECIPE_RULES, quick_findings
from pipelinerl.doctor.run_records import RunRecords
from pipelinerl.doctor.runs import RUN_RULES, findings_about
from pipelinerl.doctor.settings import SETTINGS_RULES
from pipelinerl.recipe.loading import known_recipes, load_recipe, set_value
from pipelinerl.recipe.preflight import Examination
from pipelinerl.recipe.rehearsal import Call
from pipelinerl.tasks.source import Problem
from tests.support.seeded_faults import HEALTHY_RECIPES, RECIPE, RECIPE_FAULTS, ROWS, RecipeFault, Row
from tests.unit.builders import make_recipe

Step = dict[str, Any]
FLAT = {"reward_mean": 0.3, "heldout_accuracy": None}


def step(number: int, of: int = 40) -> Step:
    """Step `number` of a healthy run, which learns."""
    done = number / of
    return {
        "step": number, "skipped": "", "learning_rate": 1e-4, "grad_norm": 3.0, "clipped": False, "entropy": 1.0 - done / 2,
        "ess": 0.98, "ess_by_lag": {"0": 1.0, "1": 0.97}, "clip_fraction": 0.01, "mask_fraction": 0.0, "mismatch_kl": 1e-9,
        "log_weight_abs_max": 0.3, "lag": {"mean": 1.0, "max": 2}, "largest_lag": 2, "max_lag_too_small": False,
        "reward_mean": 0.2 + 0.6 * done, "equal_reward_groups": 0.2, "groups_all_right": 0.1, "groups_all_wrong": 0.1,
        "identical_groups": 0.0, "answers_absent": 0.02, "answers_missed": 0.01, "completion_tokens_mean": 12.0,
        "truncated_fraction": 0.02, "sequences_trained": 64, "actor_busy_fraction": 0.8, "parity_failures": 0,
        "reported": {"chain_sum": {"answer": 0.3}}, "held_by_max_lag": False,
        "step_s": {"total": 1.0, "wait": 0.2, "compute": 0.7, "snapshot": 0.0, "send": 0.05},
        "sequences": {"issued": 64 * of, "trained": 64 * of, "dropped_stale": 0, "dropped_filtered": 0, "failed": 0},
    }  # fmt: skip


def sample(number: int, **changes: Any) -> Step:
    right = number % 2 == 0
    told = {"step": number, "heldout": False, "task": "chain_sum", "prompt": "3+4=", "completion": f"#{7 if right else 9}"}
    return told | {"answer": "7" if right else "9", "reference": "7", "reward": float(right), "terms": {}} | changes


def healthy(**changes: Any) -> RunRecords:
    recipe = make_recipe(**changes.pop("recipe", {}))
    return RunRecords(recipe, [step(number) for number in range(1, 41)], [sample(number) for number in range(40)], **changes)


def found(run: RunRecords) -> list[str]:
    return [f"{one.gravity} {one.id}" for one in findings_about(run)]


def with_figures(run: RunRecords, late: Step | None = None, **figures: Any) -> RunRecords:
    """The run with other figures in every step and, from step 21 on, those of `late`."""
    return replace(run, steps=[one | figures | ((late or {}) if one["step"] > 20 else {}) for one in run.steps])


def run_with(late: Step | None = None, /, recipe: Step | None = None, **figures: Any) -> RunRecords:
    return with_figures(healthy(recipe=recipe or {}), late, **figures)


def sampled(figures: Step, **changes: Any) -> RunRecords:
    return with_figures(replace(healthy(), samples=[sample(number, **changes) for number in range(10)]), **figures)


def lost(reason: str, outcome: str = "failed", number: int = 1000) -> RunRecords:
    counts = {"issued": 2560, "trained": 2560 - number, outcome: number}
    return healthy(reasons={outcome: {reason: number}}, summary={"sequences": counts})


STUCK = {"reward_mean": 0.0, "equal_reward_groups": 1.0, "groups_all_right": 0.0, "groups_all_wrong": 1.0}
CLIPPED = {"algorithm": {"loss": "ppo_clip"}}
CPU = {"source": "hub", "name": "a/b", "max_context": 64, "dtype": "float32"}
MASKED = {"algorithm": {"mask": "icepop"}}
FORMAT = {"reward": {"format_pattern": "x", "format_weight": 0.5}}
JUDGE = {"url": "http://judge", "model": "j", "template": "{completion}", "pattern": r"(\d)"}
TWO = {"task": None, "tasks": [{"name": name, "task": {"name": name}} for name in ("a", "b")]}
SMALL = {"tasks": {"a": {"sequences": 62, "reward_mean": 0.5}, "b": {"sequences": 2, "reward_mean": 0.5}}}
WAITS = {"step_s": {"total": 1.0, "wait": 0.8, "compute": 0.1, "snapshot": 0.0, "send": 0.05}}
SLOW = {"step_s": {"total": 1.0, "wait": 0.2, "compute": 0.3, "snapshot": 0.1, "send": 0.4}}
BUSY = {"step_s": {"total": 1.0, "wait": 0.0, "compute": 0.97, "snapshot": 0.0, "send": 0.02}}


def heldout(version: int, low: float, high: float) -> Step:
    return {"version": version, "unanswered": 0, "sets": {"chain_sum": {"accuracy": {"low": low, "high": high}}}}


HELDOUT = [heldout(0, 0.4, 0.6), heldout(40, 0.1, 0.3)]
RUNS: dict[str, Callable[[], RunRecords]] = {
    "grave rewards-fail": lambda: lost("reward_crashed", number=1500),
    "warning episodes-fail": lambda: lost("episode_timeout", number=300),
    "warning actor-differs": lambda: lost("actor_quarantined", number=5),
    "warning sequences-lost drop long problems": lambda: lost("prompt too long", number=300),
    "warning sequences-lost": lambda: lost("engine"),
    "warning steps-skipped": lambda: replace(
        healthy(), steps=[step(1) | {"skipped": "loss not finite"}, *map(step, range(2, 41))]
    ),
    "grave dropped-stale": lambda: lost("lag", "dropped_stale", 2000),
    "warning dropped-filtered": lambda: lost("equal rewards", "dropped_filtered", 2400),
    "grave run-failed": lambda: healthy(summary={"error": "actor-0 died"}),
    "grave run-failed CUDA": lambda: replace(healthy(last_error="trainer: CUDA error"), steps=[], samples=[]),
    "note steps-lost": lambda: healthy(undone=3),
    "warning disk-fills": lambda: healthy(is_running=True, free_bytes=1e9, needed_bytes=2e9),
    "grave model-broken": lambda: replace(
        healthy(), samples=[sample(number, step=1, tokens=["!"] * 40) for number in range(8)]
    ),
    "grave model-broken 7.5 nats": lambda: run_with(entropy=7.5),
    "grave completions-empty": lambda: sampled(STUCK, completion=" ", answer=""),
    "warning turns-continued": lambda: sampled(FLAT, completion="#7\nUser: And 4+4?\n#8"),
    "grave all-cut 100%": lambda: run_with(recipe={"reward": {"truncated": "mask"}}, truncated_fraction=1.0, **FLAT),
    "warning all-cut 90%": lambda: run_with({"truncated_fraction": 0.9}, truncated_fraction=0.0, **FLAT),
    "warning all-cut model.max_context": lambda: run_with(truncated_fraction=0.8, **FLAT),
    "grave all-cut": lambda: run_with(truncated_fraction=1.0, answers_absent=1.0, **STUCK),
    "warning think-unclosed": lambda: sampled(FLAT, prompt="<think>\n", completion="Well,"),
    "grave completions-identical": lambda: run_with(identical_groups=1.0, **STUCK),
    "grave answers-absent 100% of the completions; 30% contain the reference); reward.answer_pattern": lambda: run_with(
        answers_absent=1.0, answers_missed=0.3, **{**STUCK, "equal_reward_groups": 0.5}
    ),
    "grave answers-absent": lambda: run_with(answers_absent=1.0, answers_missed=0.0, **STUCK),
    "grave answers-misread": lambda: sampled(FLAT, completion="3+4=7", answer="3", reward=0.0),
    "grave right-unrewarded 10 right": lambda: sampled(STUCK, reference="$7 ", answer="7.0 kg", reward=0.0),
    "grave right-unrewarded": lambda: sampled(STUCK, reward=0.0),
    "grave references-unrelated": lambda: with_figures(
        replace(healthy(), samples=[sample(one, answer=str(one % 9), reference=str(one * 5 % 11)) for one in range(60)]),
        reported={"chain_sum": {"answer": 0.09}}, **FLAT
    ),
    "grave groups-all-wrong": lambda: run_with(**STUCK),
    "grave groups-all-right": lambda: run_with(
        reward_mean=1.0, equal_reward_groups=1.0, groups_all_right=1.0, groups_all_wrong=0.0
    ),
    "grave reward-constant marks on a scale": lambda: run_with(recipe={"reward": {"scorer": "judge", "judge": JUDGE}}, **STUCK),
    "grave reward-constant": lambda: run_with(reward_mean=0.5, equal_reward_groups=1.0, groups_all_right=0.0),
    "warning reward-plateau reward 0.5 of 1; rewards are equal in 80%": lambda: run_with(
        {"reward_mean": 0.5, "equal_reward_groups": 0.8}
    ),
    "warning term-dominates answer 0 of 1": lambda: run_with(
        recipe=FORMAT, **FLAT, reported={"chain_sum": {"answer": 0.0, "format": 0.5}}
    ),
    "warning term-dominates answer 0.3 -> 0.1": lambda: run_with(
        {"reported": {"chain_sum": {"answer": 0.1}}}, term_spread={"answer": 0.4, "overlong": 1.0}
    ),
    "warning term-dominates": lambda: run_with(term_spread={"answer": 0.1, "format": 2.0}),
    "warning format-never": lambda: run_with(recipe=FORMAT, reported={"chain_sum": {"answer": 0.5, "format": 0.0}}),
    "warning task-starves": lambda: run_with(recipe=TWO, **SMALL),
    "warning length-drifts brevity": lambda: run_with({"completion_tokens_mean": 3.0}, **FLAT),
    "warning length-drifts": lambda: run_with({"completion_tokens_mean": 30.0}, **FLAT),
    "grave engine-differs probe answers": lambda: run_with(parity_failures=1),
    "grave engine-differs mismatch_kl": lambda: run_with({"mismatch_kl": 0.05}),
    "grave engine-differs": lambda: run_with(mismatch_kl=0.05),
    "warning ess-low": lambda: run_with(ess=0.2),
    "grave tokens-cut mask_low": lambda: run_with(recipe=MASKED, mask_fraction=0.99),
    "grave tokens-cut clip_low": lambda: run_with(recipe=CLIPPED, clip_fraction=0.9),
    "warning gradient-clipped": lambda: run_with(recipe={"trainer": {"max_grad_norm": 0.1}}, clipped=True),
    "grave policy-unmoved norm 1e-09": lambda: run_with(grad_norm=1e-9, **FLAT),
    "grave policy-unmoved": lambda: run_with(log_weight_abs_max=1e-5, **FLAT),
    "warning kl-grows": lambda: run_with({"reference_kl": 5.0}, reference_kl=0.01, **FLAT),
    "warning entropy-explodes": lambda: run_with({"entropy": 5.0}, entropy=1.0, **FLAT),
    "grave policy-collapsed": lambda: run_with({"reward_mean": 0.01}, **FLAT),
    "warning entropy-collapsed": lambda: run_with({"entropy": 0.001}, **FLAT),
    "warning heldout-apart": lambda: healthy(summary={"heldout": HELDOUT}),
    "warning heldout-apart at most 0.01": lambda: with_figures(
        healthy(summary={"heldout": [heldout(version, 0.0, 0.01) for version in (0, 40)]}), **FLAT
    ),
    "warning heldout-unanswered": lambda: healthy(summary={"heldout": [HELDOUT[0] | {"unanswered": 128}]}),
    "warning heldout-unanswered 12 answers": lambda: healthy(  # of a set of 24 rows
        summary={"heldout": [HELDOUT[0] | {"unanswered": 12, "accuracy": 0.5, "lower_bound": 0.25}]}
    ),
    "note bottleneck bound by lag": lambda: run_with(max_lag_too_small=True),
    "note bottleneck commit-bound": lambda: run_with(**SLOW),
    "note bottleneck verifier-bound": lambda: run_with(actor_busy_fraction=0.1, **WAITS),
    "note bottleneck actor-bound": lambda: run_with(**WAITS),
    "note bottleneck actors busy unknown": lambda: run_with(actor_busy_fraction=None, **SLOW),
    "note bottleneck The trainer keeps the actors waiting (trainer-bound": lambda: run_with(
        recipe={"model": CPU | {"dtype": "bfloat16"}}, actor_busy_fraction=0.1, **BUSY
    ),
    "note bottleneck on a CPU, lower it": lambda: run_with(recipe={"model": CPU}, actor_busy_fraction=0.1, **BUSY),
    "note bottleneck mean lag 9": lambda: run_with(lag={"mean": 9.0, "max": 12}),
}  # fmt: skip
"""For each rule, by gravity, id and words that the finding has, a run in which it must be the first finding."""


def test_a_healthy_run_has_no_finding() -> None:
    assert found(healthy()) == []
    assert found(replace(healthy(), steps=[step(1)], samples=[])) == []
    few = {"dropped_stale": {"lag": 2}}
    assert found(replace(healthy(reasons=few, is_running=True), steps=[])) == []  # less than a batch says little


def test_a_damaged_record_silences_only_the_rules_that_need_it() -> None:
    damaged: Any = {"failed": 7}
    run = replace(with_figures(healthy(), **STUCK), reasons=damaged)
    assert found(run)[0] == "grave groups-all-wrong"


@pytest.mark.parametrize("first", RUNS)
def test_a_rule_names_its_fault_first(first: str) -> None:
    gravity, id_, *words = first.split(maxsplit=2)
    one, *_ = findings_about(RUNS[first]())
    assert (one.gravity, one.id) == (gravity, id_)
    assert all(word in one.brief for word in words)
    assert "contain the reference" not in first or (one.sample or {})["completion"] == "#7"


def test_every_rule_of_a_run_is_tested() -> None:
    assert list(rules_of(*RUN_RULES)) == list(dict.fromkeys(name.split()[1] for name in RUNS))


def test_success_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_figures(healthy(), {"equal_reward_groups": 0.95, "groups_all_right": 0.95, "entropy": 0.001, "reward_mean": 1.0})
    assert found(run) == ["note groups-all-right"]
    assert found(with_figures(healthy(), equal_reward_groups=0.8)) == [], "it still learns"
    samples = {"evaluation": {"samples": 16, "temperature": 1.0}}
    assert found(healthy(recipe=samples, summary={"heldout": [heldout(40, 0.6, 0.8) | {"unanswered": 80}]})) == []
    partial = heldout(40, 0.0, 0.01)
    partial["sets"]["chain_sum"]["reported"] = {"answer": 0.4}
    assert found(healthy(summary={"heldout": [partial]})) == [], "a function gives partial credit to answers that are not right"
    wild = {"sampling": {"group_size": 2, "max_tokens": 16, "temperature": 2.0}}
    assert found(healthy(recipe=wild)) == ["note temperature"], "it learns nevertheless"
    monkeypatch.setattr(runs, "known_parameters", lambda model: 1_000_000)
    toy = {"model": CPU, "trainer": {"learning_rate": 2e-3}}
    assert found(with_figures(healthy(recipe=toy), **FLAT)) == [], "a toy may learn at this rate"


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    recipe = deepcopy(RECIPE)
    for name, value in changes.items():
        set_value(recipe, name.split("."), deepcopy(value))
    return recipe


Judge = Callable[[dict[str, Any], list[Row], int], list[dict[str, Any]]]


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Judge:
    """Returns the findings about `RECIPE` with changes; notes only if there is nothing else."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def judged(changes: dict[str, Any], rows: list[Row], tried: int) -> list[dict[str, Any]]:
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        (tmp_path / "seeded.yaml").write_text(yaml.safe_dump(changed(changes)))
        subject = str(tmp_path / "seeded.yaml")
        args = argparse.Namespace(subject=subject, overrides=[], gpu_memory=None, parameters=None, reward_rows=tried, json=True)
        code, told = doctor(args), json.loads(capsys.readouterr().out)
        assert code == any(one["gravity"] == "grave" for one in told["findings"])
        findings = [one for one in told["findings"] if one["id"] != "machine-lacks"]
        return [one for one in findings if one["gravity"] != "note"] or findings

    return judged


@pytest.mark.parametrize("fault", RECIPE_FAULTS, ids=lambda fault: fault.name)
def test_a_seeded_fault_of_a_recipe_is_the_first_finding(fault: RecipeFault, judge: Judge) -> None:
    first, *_ = judge(fault.changes, fault.rows(ROWS), 12 if fault.tried else 0)
    assert first["id"] == fault.expected, first


@pytest.mark.parametrize("name", HEALTHY_RECIPES)
def test_a_recipe_without_a_fault_has_no_finding(name: str, judge: Judge) -> None:
    changes, rows = HEALTHY_RECIPES[name]
    assert judge(changes, rows(ROWS), 12) == []


def test_a_reward_beside_the_recipe_is_found(judge: Judge, tmp_path: Path) -> None:
    text = "def score(item):\n    return float(item.answer == item.reference['answer'])\n"
    (tmp_path / "own_reward.py").write_text(text)
    assert judge({"reward.scorer": "own_reward:score"}, ROWS, 12) == []
    (tmp_path / "own_tags.py").write_text("def tagged(item):\n    return float(item.completion.startswith('<answer>'))\n")
    [unpaid] = judge({"reward.scorer": "own_tags:tagged"}, ROWS, 12)
    assert unpaid["id"] == "references-unpaid", "nothing is paid, so no wrong answer is"
    (tmp_path / "seeded.yaml").rename(tmp_path / "recipe.yaml")
    args = argparse.Namespace(subject=str(tmp_path), overrides=[], gpu_memory=None, parameters=None, reward_rows=2, json=False)
    args.reward_rows = 0
    assert doctor(args) == 0  # a folder of `pipelinerl init` is no run


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_shipped_recipes_have_no_finding(name: str) -> None:
    assert quick_findings(load_recipe(name, []), Examination()) == []


def test_every_rule_of_a_recipe_is_seeded() -> None:
    known = rules_of(*RECIPE_RULES, *SETTINGS_RULES).keys() | ADOPTED.keys()
    others = {"machine-lacks", "references-misread", "template", "reward-slow"}
    assert known - {fault.expected for fault in RECIPE_FAULTS} == others


def test_slow_trial_calls_are_named() -> None:
    recipe = make_recipe(model=CPU, reward={"timeout_s": 5.0})
    call = Call("", Problem("3+4=", {"answer": "7"}), "7", status="ok", reward=1.0, seconds=2.0)
    assert "reward-slow" in [one.id for one in quick_findings(recipe, Examination(calls=[call]))]
