"""A run's progress on the terminal: a live display on a terminal, plain lines anywhere else.

Draws what `progress_view.py` says; decides nothing. Model output never passes here.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

from pipelinerl.local.progress_view import RunState, fraction_done, plain_line, rows

if TYPE_CHECKING:
    from rich.console import Console, Group

PLAIN_EVERY_S = 5.0
"""Plain lines of steps come at most this often, the last step's always."""
_PHASE_EVERY_S = 2.0
"""Plain lines of phases before the first step come at most this often."""


class Display(Protocol):
    """Where progress is shown. Used as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def note(self, text: str) -> None:
        """A line that stays."""
        ...

    def show(self, state: RunState, elapsed_s: float) -> None:
        """The state as it is now."""
        ...


class PlainDisplay:
    """One line for a step, at most one every `every_s`; before the first step, what the run is at."""

    def __init__(self, stream: TextIO, every_s: float = PLAIN_EVERY_S) -> None:
        self._stream, self._every_s = stream, every_s
        self._shown_step, self._shown_at_s = 0, float("-inf")
        self._shown_phase, self._phase_at_s = "", float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def show(self, state: RunState, elapsed_s: float) -> None:
        phase_due = elapsed_s - self._phase_at_s >= min(_PHASE_EVERY_S, self._every_s)
        if state.step == 0 and state.phase != self._shown_phase and phase_due:
            self._shown_phase, self._phase_at_s = state.phase, elapsed_s
            self.note(state.phase)
        self._shown_step = min(self._shown_step, state.step)  # a restart undid steps: they are told again
        due = elapsed_s - self._shown_at_s >= self._every_s or state.step >= state.total_steps
        if state.step > self._shown_step and due:
            self._shown_step, self._shown_at_s = state.step, elapsed_s
            self.note(plain_line(state, elapsed_s))


class LiveDisplay:
    """Rich live display: a progress bar over the rows of the view."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._started = False
            with contextlib.suppress(OSError):  # the terminal is gone
                self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def show(self, state: RunState, elapsed_s: float) -> None:
        if not self._started:
            self._live.start()
            self._started = True
        self._live.update(_renderable(state, elapsed_s), refresh=True)


def _renderable(state: RunState, elapsed_s: float) -> Group:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    bar = Table.grid(expand=True)  # in a table, because a bar by itself ends without a newline
    bar.add_row(ProgressBar(total=1.0, completed=fraction_done(state)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows(state, elapsed_s):
        table.add_row(label, Text(text))
    return Group(Text(state.run, style="bold cyan"), bar, table)


def open_display(stream: TextIO = sys.stdout) -> Display:
    """The live display when `stream` is a terminal that can redraw, plain lines otherwise."""
    from rich.console import Console

    console = Console(file=stream)
    return LiveDisplay(console) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay(stream)
