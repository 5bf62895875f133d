"""TensorBoard: event files in `<run dir>/tensorboard`, so that `tensorboard --logdir runs` shows every run by its name.

Writes the events itself, with TensorBoard's own writer and messages: needs neither torch nor TensorFlow.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.trainer.reporting.trackers.tracker import TrackedRun

FOLDER = "tensorboard"
_DT_STRING = 7


class TensorBoardTracker:
    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None
        self._step = 0

    def start(self, run: TrackedRun) -> None:
        """Steps of an earlier trainer from `run.version` on are those that its restart undid: readers leave them out."""
        self._step = run.version
        self._writer = EventFileWriter(str(Path(run.run_dir) / FOLDER))
        if run.incarnation > 1:
            self._add(
                Event(wall_time=time.time(), step=run.version + 1, session_log=SessionLog(status=SessionLog.START))
            )
        self._add(Event(wall_time=time.time(), step=run.version, summary=Summary(value=[_table("recipe", run.params)])))

    def step(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._step = step
        self._scalars(step, time_s, figures)

    def heldout(self, version: int, time_s: float, figures: Mapping[str, float]) -> None:
        self._scalars(version, time_s, figures)

    def end(self, figures: Mapping[str, float], *, finished: bool) -> None:
        self._scalars(self._step, time.time(), figures)
        assert self._writer is not None
        self._writer.close()

    def _scalars(self, step: int, time_s: float, figures: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._add(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        assert self._writer is not None, "start comes first"
        self._writer.add_event(event)
        self._writer.flush()


def _table(tag: str, params: Mapping[str, object]) -> Summary.Value:
    """A Markdown table, as the text plugin shows it."""
    rows = [
        f"| `{name}` | {json.dumps(value, ensure_ascii=False)} |".replace("\n", " ") for name, value in params.items()
    ]
    text = "\n".join(["| field | value |", "|---|---|", *rows])
    return Summary.Value(
        tag=f"{tag}/text_summary",
        metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
        tensor=TensorProto(
            dtype=_DT_STRING,
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        ),
    )
