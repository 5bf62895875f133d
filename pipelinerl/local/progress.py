"""Show a run's progress, with a live display on a terminal and with plain lines elsewhere.

Events of the run update `RunState`. The pure functions `rows` and `plain_line` turn this state into text, which never contains
a completion. A metric that is missing or null is shown as `-`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelinerl.errors import counted
from pipelinerl.run_summary import Record
from pipelinerl.v1 import actor_pb2
from pipelinerl.v1.actor_pb2 import ActorState

_BARS = "▁▂▃▄▅▆▇█"


def number(value: float | None, digits: int = 0) -> str:
    """Format as `12,345` or `0.123`; `-` for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(fraction: float | None) -> str:
    """Format 0.414 as `41.4%`; `-` for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def duration(seconds: float | None) -> str:
    """Format as `42s`, `3m 05s` or `2h 07m`; `-` for None."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def sparkline(values: Iterable[float], width: int) -> str:
    """Draw at most `width` bars, each the mean of about equally many values. Return "" for fewer than two values."""
    points = list(values)
    if len(points) < 2:
        return ""
    bins = min(width, len(points))
    edges = [i * len(points) // bins for i in range(bins + 1)]
    means = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


_UNSTEADY_S = 10.0
"""The remaining time is hidden when no step has ended for this many seconds or, if longer, the usual time of three steps."""


def phase_of(actor: ActorState | str) -> str:
    """Return an actor's phase, such as `serving`, or the reason why it is unknown."""
    if isinstance(actor, str):
        return actor
    return actor_pb2.ActorPhase.Name(actor.phase).removeprefix("ACTOR_PHASE_").lower()


@dataclass
class RunState:
    """The known state of a run."""

    run: str
    total_steps: int
    phase: str = "starting"
    heldout: list[tuple[int, float]] = field(default_factory=list)
    """(policy version, accuracy) of each evaluation."""
    history: deque[Record] = field(default_factory=lambda: deque(maxlen=400))
    """Metrics of the newest steps."""
    furthest: int = 0
    """The highest step so far, including steps that a restart undid."""
    heard_s: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=20))
    """(step, seconds from the runner's start until the step was reported) of the newest steps."""
    actors: Mapping[str, ActorState | str] = field(default_factory=dict)
    """Each actor's state, or the reason why it is unknown, by the actor's name."""
    sequences: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    """For each reason of failures, message of the first sequence that failed. It may quote a completion or a reward's error."""
    restarts: Counter[str] = field(default_factory=Counter)
    page: str = ""
    """URL of the live page; empty if it is not served."""
    stopping: bool = False
    """True while the run's processes are being stopped."""
    ended: bool = False
    moved_s: float = 0.0
    """Seconds from the runner's start to the report of the newest step."""

    @property
    def last(self) -> Record:
        return self.history[-1] if self.history else {}

    @property
    def step(self) -> int:
        return int(self.last.get("step") or 0)

    def on_step(self, metrics: Record, elapsed_s: float | None) -> None:
        """Record an optimizer step. `elapsed_s`: seconds from the runner's start to the step's report; with None, the step
        does not count for the pace. If the step was recorded before, a restart undid it: remove it and later steps first."""
        step = int(metrics.get("step") or 0)
        if 0 < step <= self.step:
            self.rewind(step - 1)
        self.furthest = max(self.furthest, step)
        self.history.append(metrics)
        if elapsed_s is not None:
            self.heard_s.append((self.step, elapsed_s))
            self.moved_s = elapsed_s
        if metrics.get("sequences"):
            self.sequences = metrics["sequences"]
        if metrics.get("heldout_accuracy") is not None:
            version = int(metrics.get("heldout_version", metrics.get("policy_version")) or 0)
            self.heldout = [one for one in self.heldout if one[0] < version]
            self.heldout.append((version, metrics["heldout_accuracy"]))

    def rewind(self, version: int) -> None:
        """Remove the steps after `version`, because the trainer continues from there, and measure the pace anew."""
        self.heard_s.clear()
        if version >= self.step:
            return
        while self.step > version:
            self.history.pop()
        if version > self.step:  # the history no longer has the metrics of `version`
            self.history.append({"step": version, "policy_version": version})
        self.heldout = [one for one in self.heldout if one[0] <= version]

    def on_end(self, how: str) -> None:
        """Record the end of the run: `done`, `interrupted` or `failed`."""
        self.phase, self.page, self.ended = how, "", True


def seconds_left(state: RunState, elapsed_s: float) -> float | None:
    """Return the seconds until the final step, at the pace of the newest steps; None if that pace is unknown or outdated."""
    pace_s, quiet_s = _pace_s(state), elapsed_s - state.moved_s
    if state.ended or pace_s is None or quiet_s > max(_UNSTEADY_S, 3 * pace_s):
        return None
    return max(0.0, (state.total_steps - state.step) * pace_s - quiet_s)


def _pace_s(state: RunState) -> float | None:
    """Return the seconds per step over the newest steps; None if fewer than two are known."""
    if len(state.heard_s) < 2:
        return None
    (first_step, first_s), (last_step, last_s) = state.heard_s[0], state.heard_s[-1]
    return (last_s - first_s) / max(1, last_step - first_step)


def silence(state: RunState, elapsed_s: float) -> str:
    """Describe the services if no step has ended for `QUIET_S` or, if longer, the usual time of three steps; else return ""."""
    quiet_s = elapsed_s - state.moved_s
    if state.ended or state.stopping or quiet_s < max(QUIET_S, 3 * (_pace_s(state) or 0.0)):
        return ""
    serving = sum(phase_of(actor) == "serving" for actor in state.actors.values())
    others = _actor_texts(state)
    told = [f"no step for {duration(quiet_s)}: {state.phase}{_restarts_text(state)}"]
    if others or state.sequences:
        told.append(f"{serving} of {counted(len(others), 'actor')} serving" + (f" ({'; '.join(others)})" if others else ""))
    if state.sequences:
        told.append(f"sequences {_sequences_text(state.sequences)}")
    return " | ".join(told)


def checkpoint_text(version: int, written: int, total: int, passed_s: float) -> str:
    """Describe a checkpoint's progress: `written` of `total` bytes (0 = unknown), after `passed_s` seconds."""
    unit, name = (1e9, "GB") if max(written, total) >= 1e9 else (1e6, "MB")
    text = f"writing the checkpoint of version {version}: {written / unit:,.0f}"
    if total <= written:
        return f"{text} {name}, {duration(passed_s)} passed"
    left = f", {duration(passed_s * (total - written) / written)} left" if written and passed_s >= 1 else ""
    return f"{text} of {total / unit:,.0f} {name}{left}"


def rows(state: RunState, elapsed_s: float) -> list[tuple[str, str]]:
    """Return the live display's (label, text) rows. The labels are always the same."""
    last = state.last
    rewards = [one["reward_mean"] for one in state.history if one.get("reward_mean") is not None]
    return [
        ("step", f"{state.step} of {state.total_steps} ({percent(fraction_done(state))}), {_time_text(state, elapsed_s)}"),
        ("policy version", number(last.get("policy_version"))),
        ("train reward", f"{number(last.get('reward_mean'), 3)}  {sparkline(rewards, width=32)}".rstrip()),
        ("held-out accuracy", _heldout_text(state)),
        ("token lag", _lag_text(last)),
        ("ESS", number(last.get("ess"), 3)),
        ("tokens/s", _rates_text(last)),
        ("actor stall", _stall_text(state)),
        ("sequences", _sequences_text(state.sequences)),
        ("actors", "; ".join(_actor_texts(state)) or "-"),
        ("now", silence(state, elapsed_s) or state.phase + _restarts_text(state)),
        ("live page", state.page or "-"),
    ]


def plain_line(state: RunState, elapsed_s: float) -> str:
    """Return the newest step as one line, for logs and pipes."""
    last = state.last
    parts = [
        f"step {state.step}/{state.total_steps}",
        f"version {number(last.get('policy_version'))}",
        f"reward {number(last.get('reward_mean'), 3)}",
        f"heldout {percent(state.heldout[-1][1]) if state.heldout else '-'}",
        f"lag {_lag_text(last)}",
        f"ess {number(last.get('ess'), 3)}",
        f"tokens/s {_rates_text(last)}",
        f"stall {_stall_text(state)}",
        f"sequences {_sequences_text(state.sequences)}",
        _time_text(state, elapsed_s),
    ]
    return " | ".join(parts)


def fraction_done(state: RunState) -> float:
    return min(1.0, state.step / state.total_steps) if state.total_steps else 0.0


def _time_text(state: RunState, elapsed_s: float) -> str:
    left = seconds_left(state, elapsed_s)
    return f"{duration(elapsed_s)} passed" + (f", {duration(left)} left" if left is not None else "")


def _heldout_text(state: RunState) -> str:
    if not state.heldout:
        return "-"
    (first_version, first), (version, accuracy) = state.heldout[0], state.heldout[-1]
    if len(state.heldout) == 1:
        return f"{percent(accuracy)} (version {version})"
    best = max(value for _, value in state.heldout)
    return f"{percent(accuracy)} (version {version}), from {percent(first)} (version {first_version}), best {percent(best)}"


def _lag_text(last: Record) -> str:
    lag = last.get("lag") or {}
    return f"mean {number(lag.get('mean'), 2)}, p95 {number(lag.get('p95'))}, max {number(lag.get('max'))}"


def _rates_text(last: Record) -> str:
    generated, trained = last.get("tokens_generated_per_s"), last.get("tokens_trained_per_s")
    return f"{number(generated)} generated, {number(trained)} trained"


def _stall_text(state: RunState) -> str:
    for record in reversed(state.history):
        update = record.get("weight_update") or {}
        if (stall_s := update.get("stall_s", record.get("stall_s"))) is not None:
            version = update.get("version")
            return f"{stall_s * 1000:.0f} ms" + (f" (version {version})" if version is not None else "")
    return "-"


def _sequences_text(sequences: Mapping[str, int]) -> str:
    if not sequences:
        return "-"
    shown = [(name, sequences.get(name, 0)) for name in ("issued", "trained", "in_flight")]
    lost = [(name, sequences.get(name, 0)) for name in ("dropped_stale", "dropped_filtered", "failed")]
    return ", ".join(f"{number(count)} {name.replace('_', ' ')}" for name, count in [*shown, *(row for row in lost if row[1])])


def _restarts_text(state: RunState) -> str:
    others = [f"{name} {times}x" for name, times in state.restarts.items() if name not in state.actors]
    return f" (restarted: {', '.join(others)})" if others else ""


def _actor_texts(state: RunState) -> list[str]:
    texts = []
    for name, actor in state.actors.items():
        text, restarts = f"{name} {phase_of(actor)}", state.restarts[name]
        if not isinstance(actor, str) and actor.phase in (actor_pb2.ACTOR_PHASE_SERVING, actor_pb2.ACTOR_PHASE_DRAINING):
            text += f" v{actor.policy_version}, {actor.sequences_in_progress} in progress"
        texts.append(text + (f", restarted {restarts}x" if restarts else ""))
    return texts


QUIET_S = 60.0
"""Minimum time without a step after which a line reports the pause. The time doubles with each such line."""
_PHASE_EVERY_S = 2.0
"""Minimum time between lines about the phase, before the first step."""


class Display(contextlib.AbstractContextManager["Display"]):
    """Print plain lines. The line of a step is printed at most every `every_s` seconds, and always for the final step. Other
    lines report phases before the first step and during the stop, and long pauses."""

    def __init__(self, stream: TextIO, every_s: float = 5.0) -> None:
        self._stream, self._every_s = stream, every_s
        self._shown_step, self._shown_at_s = 0, float("-inf")
        self._shown_phase, self._phase_at_s, self._noted = "", float("-inf"), ""
        self._quiet_from_s, self._quiet_s = 0.0, 0.0
        """Seconds from the runner's start to the newest step, and from that step to the newest report of a pause (0 = none)."""

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, text: str) -> None:
        """Print a line that the display does not overwrite."""
        self._noted = text
        print(text, file=self._stream, flush=True)

    def show(self, state: RunState, elapsed_s: float) -> None:
        self._shown_step = min(self._shown_step, state.step)  # Steps that a restart undid are shown again.
        due = elapsed_s - self._shown_at_s >= self._every_s or state.step >= state.total_steps
        if state.step > self._shown_step and due:
            self._shown_step, self._shown_at_s = state.step, elapsed_s
            self.note(plain_line(state, elapsed_s))
        every_s = self._every_s if state.stopping else min(_PHASE_EVERY_S, self._every_s)
        is_shown = not state.ended if state.stopping else not state.heard_s
        is_new = state.phase not in (self._shown_phase, self._noted)
        if is_shown and is_new and elapsed_s - self._phase_at_s >= every_s:
            self._shown_phase, self._phase_at_s = state.phase, elapsed_s
            self.note(state.phase)
        if state.moved_s != self._quiet_from_s:
            self._quiet_from_s, self._quiet_s = state.moved_s, 0.0
        if elapsed_s - state.moved_s >= 2 * self._quiet_s and (told := silence(state, elapsed_s)):
            self._quiet_s = elapsed_s - state.moved_s
            self.note(told)


class LiveDisplay(Display):
    """A progress bar above a table, redrawn in place on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __exit__(self, *_: object) -> None:
        if self._live.is_started:
            with contextlib.suppress(OSError):  # The terminal may be closed.
                self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def show(self, state: RunState, elapsed_s: float) -> None:
        bar = Table.grid(expand=True)  # A bar outside a table would end without a newline.
        bar.add_row(ProgressBar(total=1.0, completed=fraction_done(state)))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in rows(state, elapsed_s):
            table.add_row(label, Text(text))
        if not self._live.is_started:
            self._live.start()
        self._live.update(Group(Text(state.run, style="bold cyan"), bar, table), refresh=True)


def open_display(stream: TextIO | None = None) -> Display:
    """Return a display for `stream` (default: standard output): live on a terminal that can redraw, otherwise plain lines."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else Display(stream)
