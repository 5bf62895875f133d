"""What a person sees of a run: the view's rows and lines from metrics, and how the two displays show them."""

import io
from typing import Any

from rich.console import Console

from pipelinerl.local.progress import Display, LiveDisplay, RunState, rows, seconds_left, silence
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
    assert row(run, "actor stall") == "72 ms (version 0)", "it stays until there is a newer one"
    run.on_step(metrics(3, heldout_accuracy=0.55, heldout_version=2), 14.0)
    run.phase = "training"
    serving = ActorState(phase="ACTOR_PHASE_SERVING", policy_version=3, sequences_in_progress=64)
    run.actors = {"actor-0": serving, "actor-1": "starting"}
    run.restarts["actor-1"] += 1
    shown = dict(rows(run, 14.0))
    assert shown["train reward"].startswith("0.500  ")
    assert (
        shown.items()
        >= {
            "step": "3 of 100 (3.0%), 14s passed, 3m 14s left",
            "policy version": "3",
            "held-out accuracy": "55.0% (version 2), from 40.0% (version 0), best 55.0%",
            "token lag": "mean 1.25, p95 3, max 5",
            "ESS": "0.961",
            "tokens/s": "3,120 generated, 2,951 trained",
            "sequences": "512 issued, 384 trained, 120 in flight, 8 dropped stale",
            "actors": "actor-0 serving v3, 64 in progress; actor-1 starting, restarted 1x",
            "now": "training",
        }.items()
    )


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
    run = state(metrics(7), metrics(8))
    run.rewind(5)
    assert (run.step, row(run, "policy version")) == (5, "5"), "before all that is remembered"


def test_plain_lines_come_at_their_pace_the_last_step_always() -> None:
    out = io.StringIO()
    display, run = Display(out, every_s=5.0), RunState("r", 6)
    with display:
        display.note("hello")
        for phase, at_s in (("starting", 0.0), ("waiting for actors", 1.0), ("waiting for sequences", 2.5)):
            run.phase = phase
            display.show(run, at_s)
        display.show(run, 5.0)
        for step, at_s in [(1, 10.0), (2, 12.0), (3, 15.5), (5, 16.0), (6, 17.0)]:
            run.on_step(metrics(step), at_s)
            display.show(run, at_s)
            display.show(run, at_s + 0.1)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["hello", "starting", "waiting for sequences"], "a fleeting phase is not told"
    assert [line.split(" | ")[0] for line in lines[3:]] == ["step 1/6", "step 3/6", "step 6/6"]


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
    run.on_step(metrics(2), 400.0)
    run.on_step(metrics(3), 500.0)
    assert silence(run, 1230.0) == "", "three times what a step takes"
    assert silence(run, 1235.0).startswith("no step for 12m 15s")


def test_the_live_display_shows_every_row_and_keeps_notes() -> None:
    out = io.StringIO()
    run = state(metrics(1), metrics(2))
    run.phase = "[red]not markup[/red]"
    with LiveDisplay(Console(file=out, force_terminal=True, width=110)) as display:
        display.show(run, 12.0)
        display.note("actor-0 [0] is started again")
        display.show(run, 13.0)
    shown = out.getvalue()
    assert all(text in shown for text in ("actor-0 [0] is started again", "[red]not markup[/red]", *dict(rows(run, 13.0))))
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is visible again"
