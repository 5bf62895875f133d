"""What a person sees of a run: the view's rows and lines from metrics, and how the two displays show them."""

import io
from typing import Any

from rich.console import Console

from pipelinerl.local.progress import (
    Display,
    LiveDisplay,
    RunState,
    fraction_done,
    open_display,
    plain_line,
    rows,
    seconds_left,
    silence,
)
from pipelinerl.v1.actor_pb2 import ActorState


def metrics(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "policy_version": step,
        "time_s": 2.0 * step,
        "reward_mean": 0.5,
        "lag": {"mean": 1.25, "p95": 3, "max": 5},
        "ess": 0.9612,
        "tokens_generated_per_s": 3120.4,
        "tokens_trained_per_s": 2950.6,
        "weight_update": {"version": step - 1, "stall_s": 0.0723},
        "sequences": {"issued": 512, "trained": 384, "dropped_stale": 8, "dropped_filtered": 0, "failed": 0, "in_flight": 120},
        **more,
    }  # fmt: skip


def state(*steps: dict[str, Any], total: int = 100) -> RunState:
    """A run whose steps were heard of 10, 12, 14, ... seconds after the start."""
    run = RunState("tiny-run", total)
    for index, record in enumerate(steps):
        run.on_step(record, 10.0 + 2.0 * index)
    return run


def row(run: RunState, label: str, elapsed_s: float = 20.0) -> str:
    return dict(rows(run, elapsed_s))[label]


def test_rows_of_a_running_run() -> None:
    run = state(metrics(1, heldout_accuracy=0.4, heldout_version=0), metrics(2, weight_update=None, stall_s=None))
    shown = dict(rows(run, 14.0))
    assert shown["held-out accuracy"] == "40.0% (version 0)"
    assert shown["actor stall"] == "72 ms (version 0)", "it stays until there is a newer one"
    run.on_step(metrics(3, heldout_accuracy=0.55, heldout_version=2), 14.0)
    run.phase = "training"
    serving = ActorState(phase="ACTOR_PHASE_SERVING", policy_version=3, sequences_in_progress=64)
    run.actors = {"actor-0": serving, "actor-1": "starting"}
    run.restarts["actor-1"] += 1
    shown = dict(rows(run, 14.0))
    assert shown["step"] == "3 of 100 (3.0%), 14s passed, 3m 14s left"
    assert fraction_done(state(metrics(120))) == 1.0
    assert shown["policy version"] == "3"
    assert shown["train reward"].startswith("0.500  ")
    assert shown["held-out accuracy"] == "55.0% (version 2), from 40.0% (version 0), best 55.0%"
    assert shown["token lag"] == "mean 1.25, p95 3, max 5"
    assert shown["ESS"] == "0.961"
    assert shown["tokens/s"] == "3,120 generated, 2,951 trained"
    assert shown["actor stall"] == "72 ms (version 2)"
    assert shown["sequences"] == "512 issued, 384 trained, 120 in flight, 8 dropped stale"
    run.sequences = {"issued": 600, "trained": 384, "failed": 1, "in_flight": 215}  # from the status, between two steps
    assert row(run, "sequences") == "600 issued, 384 trained, 215 in flight, 1 failed"
    assert shown["actors"] == "actor-0 serving v3, 64 in progress; actor-1 starting, restarted 1x"
    assert shown["now"] == "training"


def test_rows_before_the_first_step_have_the_same_labels() -> None:
    before, after = rows(RunState("r", 10), 1.0), rows(state(metrics(1)), 20.0)
    assert [label for label, _ in before] == [label for label, _ in after]
    shown = dict(before)
    assert shown["step"] == "0 of 10 (0.0%), 1s passed"
    assert {shown[label] for label in ("policy version", "held-out accuracy", "ESS", "actor stall", "sequences")} == {"-"}
    assert shown["now"] == "starting"


def test_time_left_is_the_pace_of_the_newest_steps_less_what_has_passed() -> None:
    run = state(metrics(1), metrics(2), metrics(3), total=10)  # 2 s a step, the last one heard of at 14 s
    assert seconds_left(run, 14.0) == 14.0
    assert seconds_left(run, 17.5) == 10.5
    assert seconds_left(run, 24.0) == 4.0
    assert seconds_left(run, 24.5) is None, "the pace says nothing while nothing moves"
    assert seconds_left(state(metrics(1), total=10), 14.0) is None
    assert seconds_left(RunState("r", 10), 14.0) is None


def test_a_rewound_run_is_where_its_checkpoint_was() -> None:
    run = state(
        metrics(1, heldout_accuracy=0.4, heldout_version=0),
        metrics(2, reward_mean=0.25),
        metrics(3, heldout_accuracy=0.55, heldout_version=2),
        metrics(4, heldout_accuracy=0.6, heldout_version=3),
    )
    run.restarts["trainer"] += 1
    run.rewind(2)
    assert (run.step, run.furthest, run.last["reward_mean"]) == (2, 4, 0.25)
    assert run.heldout == [(0, 0.4), (2, 0.55)]
    assert seconds_left(run, 30.0) is None, "the pace is measured anew"
    assert row(run, "now") == "starting (restarted: trainer 1x)"
    run.on_step(metrics(3, heldout_accuracy=0.5, heldout_version=2), 40.0)
    run.on_step(metrics(4), 43.0)
    assert run.heldout == [(0, 0.4), (2, 0.5)], "measured again"
    assert seconds_left(run, 43.0) == 96 * 3.0
    run.on_step(metrics(2, reward_mean=0.75), 50.0)
    assert ([one["step"] for one in run.history], run.last["reward_mean"]) == ([1, 2], 0.75), "undoes those after it"


def test_a_run_is_rewound_to_before_all_that_is_remembered() -> None:
    run = state(metrics(7), metrics(8))
    run.rewind(5)
    assert (run.step, row(run, "policy version")) == (5, "5")
    run.rewind(0)
    assert (run.step, row(run, "policy version")) == (0, "-")


def test_plain_lines_come_at_their_pace_the_last_step_always() -> None:
    out = io.StringIO()
    display, run = Display(out, every_s=5.0), RunState("r", 6)
    with display:
        display.note("hello")
        display.show(run, 0.0)
        run.phase = "waiting for actors"
        display.show(run, 1.0)
        run.phase = "waiting for sequences"
        display.show(run, 2.5)
        display.show(run, 5.0)
        for step, at_s in [(1, 10.0), (2, 12.0), (3, 15.5), (5, 16.0), (6, 17.0)]:
            run.on_step(metrics(step), at_s)
            display.show(run, at_s)
            display.show(run, at_s + 0.1)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["hello", "starting", "waiting for sequences"], "a fleeting phase is not told"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["step 1/6", "step 3/6", "step 6/6"]
    assert "\x1b" not in out.getvalue()


def test_plain_lines_tell_again_the_steps_that_a_restart_undid() -> None:
    out = io.StringIO()
    display, run = Display(out, every_s=0), RunState("r", 9)
    for step in (4, 5):
        run.on_step(metrics(step), 1.0)
        display.show(run, 1.0)
    run.rewind(3)
    display.show(run, 2.0)
    run.on_step(metrics(4), 3.0)
    display.show(run, 3.0)
    told = [line.split(" | ")[0] for line in out.getvalue().splitlines()]
    assert told == ["step 4/9", "step 5/9", "starting", "step 4/9"], "and what the run is at in between"


def test_when_no_step_comes_it_is_told_why_after_a_minute_and_then_more_rarely() -> None:
    out = io.StringIO()
    display, run = Display(out), state(metrics(1))
    run.phase, run.actors = "waiting for sequences for step 2", {"actor-0": "down"}
    run.restarts |= {"actor-0": 2, "verifier": 1}
    for second in range(10, 400, 5):
        display.show(run, float(second))
    _, *told = out.getvalue().splitlines()
    assert [line.partition(":")[0] for line in told] == [f"no step for {time}" for time in ("1m 00s", "2m 00s", "4m 00s")]
    assert told[0] == (
        "no step for 1m 00s: waiting for sequences for step 2 (restarted: verifier 1x) | 0 of 1 actor serving "
        "(actor-0 down, restarted 2x) | sequences 512 issued, 384 trained, 120 in flight, 8 dropped stale"
    )
    assert row(run, "now", 70.0) == told[0]
    run.actors = {}
    assert "| 0 of 0 actors serving | sequences" in silence(run, 70.0)
    run.on_step(metrics(2), 400.0)
    run.on_step(metrics(3), 500.0)
    assert silence(run, 1230.0) == "", "three times what a step takes"
    assert silence(run, 1235.0).startswith("no step for 12m 15s")


def test_plain_line_has_everything_on_one_line_and_a_pipe_gets_such_lines() -> None:
    line = plain_line(state(metrics(1), metrics(2, heldout_accuracy=0.5, heldout_version=1)), 12.0)
    assert line == (
        "step 2/100 | version 2 | reward 0.500 | heldout 50.0% | lag mean 1.25, p95 3, max 5 | ess 0.961 | "
        "tokens/s 3,120 generated, 2,951 trained | stall 72 ms (version 1) | "
        "sequences 512 issued, 384 trained, 120 in flight, 8 dropped stale | 12s passed, 3m 16s left"
    )
    assert type(open_display(io.StringIO())) is Display


def test_the_live_display_shows_every_row_and_keeps_notes() -> None:
    out = io.StringIO()
    run = state(metrics(1), metrics(2))
    run.phase = "[red]not markup[/red]"
    with LiveDisplay(Console(file=out, force_terminal=True, width=110)) as display:
        display.show(run, 12.0)
        display.note("actor-0 [0] is started again")
        display.show(run, 13.0)
    shown = out.getvalue()
    assert "actor-0 [0] is started again" in shown
    assert "[red]not markup[/red]" in shown
    for label, _ in rows(run, 13.0):
        assert label in shown
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is visible again"
