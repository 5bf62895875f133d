"""`pipelinerl dead-letters RUN_DIR`: lists the prompt groups that were given up, with the reason. It puts none back."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.commands.streams import add_server_arguments, streams_of
from pipelinerl.run_dir import run_name

if TYPE_CHECKING:
    from pipelinerl.messages.sequences import DeadLetter

NAME = "dead-letters"
HELP = "list a run's abandoned prompt groups"

_COLUMNS = ("TIME", "GROUP", "DELIVERIES", "ACTOR", "REASON", "PROMPT")
_REASON_CHARACTERS, _PROMPT_CHARACTERS = 60, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="folder of a local run, finished or not")
    add_server_arguments(parser)
    parser.add_argument("--run", metavar="NAME", default="", help="name of that run")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with the whole prompt")


def execute(args: argparse.Namespace) -> int:
    """Raises `FieldError` for a place without streams, `BusError` when NATS does not answer."""
    import asyncio
    import json

    letters, unreadable = asyncio.run(_read(args))
    if unreadable:
        print(f"{unreadable} messages are no dead letters of this run and are left out", file=sys.stderr)
    if args.json:
        for letter in letters:
            print(json.dumps(letter))
    elif letters:
        print(table([_row(letter) for letter in letters]))
    else:
        print("no prompt group was given up", file=sys.stderr)
    return 0


async def _read(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Each dead letter as JSON, the oldest first, and how many messages cannot be read."""
    from pipelinerl.errors import FieldError, MessageError
    from pipelinerl.messages.sequences import decode_dead_letter

    folder, where = args.run_dir, "give the folder of a run, or --nats URL --run NAME"
    opened = None if folder and args.nats else streams_of(args, args.run or (run_name(folder) if folder else ""))
    if opened is None:
        what = "" if args.nats or not folder else "holds no streams of a run; "
        raise FieldError("RUN_DIR", str(folder or ""), f"{what}{where}")
    letters, unreadable = [], 0
    async with opened() as bus:
        for payload in await bus.dead_letters():
            try:
                letters.append(described(decode_dead_letter(payload, expected_run=bus.run)))
            except MessageError:
                unreadable += 1
    return letters, unreadable


def described(letter: DeadLetter) -> dict[str, Any]:
    """As JSON, with what its prompt group says where that can be read. Pure."""
    import base64

    from pipelinerl.bus.protocol import group_id_of
    from pipelinerl.errors import MessageError
    from pipelinerl.messages.sequences import decode_group

    shown: dict[str, Any] = {
        "time": _date(letter.at_s),
        "group_id": group_id_of(letter.msg_id),
        "msg_id": letter.msg_id,
        "deliveries": letter.deliveries,
        "actor": letter.actor,
        "reason": letter.reason,
        "bytes": len(letter.prompt_group),
    }
    try:
        group = decode_group(letter.prompt_group)
    except MessageError:
        return shown | {"prompt_group_base64": base64.b64encode(letter.prompt_group).decode()}
    return shown | {
        "task": group.task,
        "problem_index": group.problem_index,
        "num_samples": group.num_samples,
        "done_samples": list(group.done_samples),
        "issued_version": group.issued_version,
        "prompt_text": group.prompt_text,
        "prompt_token_ids": group.prompt_token_ids.tolist(),
        "reference_json": group.reference_json,
    }


def _date(at_s: float) -> str:
    """UTC; "?" beyond what a calendar holds."""
    from datetime import UTC, datetime

    try:
        return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "?"


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    prompt = _cut(letter.get("prompt_text", f"({letter['bytes']} bytes that are no prompt group)"), _PROMPT_CHARACTERS)
    reason = _cut(letter["reason"], _REASON_CHARACTERS)
    return (letter["time"], letter["group_id"] or "?", str(letter["deliveries"]), letter["actor"], reason, prompt)


def _cut(text: str, length: int) -> str:
    """One line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"


def table(rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as their longest entry. Pure."""
    lines = [_COLUMNS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)
