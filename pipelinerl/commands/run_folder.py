"""`pipelinerl report`, `pipelinerl audit` and `pipelinerl dead-letters`, which read a run. Only `report` writes a file.

The user names the folder of a local run, or a NATS server and a run's name. In a pod, environment variables name both.
While a local run is running, its own nats-server is used. After its end, a temporary nats-server serves a copy of its streams.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl.audit.audit import as_json, audit_run, lines
from pipelinerl.bus.jetstream import Bus, connect
from pipelinerl.bus.permissions import ADMIN
from pipelinerl.bus.protocol import check_run_name, group_id_of
from pipelinerl.errors import FieldError, MessageError
from pipelinerl.local.credentials import Credentials
from pipelinerl.local.ending import write_report
from pipelinerl.local.nats import NAME as NATS
from pipelinerl.local.nats import nats_command, nats_reached
from pipelinerl.local.processes import Launch, ServiceProcess, living_names
from pipelinerl.messages.sequences import DeadLetter, decode_dead_letter, decode_group
from pipelinerl.run_dir import LINEAGE, NAMED_IN, RunDir, read_json, run_name
from pipelinerl.service.logs import printable
from pipelinerl.service.settings import StreamsSettings

_COLUMNS = ("TIME", "GROUP", "DELIVERIES", "ACTOR", "REASON", "PROMPT")


def report(args: argparse.Namespace) -> int:
    """Write the report and print its path. Raises `FieldError` if the folder is not a run's."""
    print(write_report(args.run_dir))
    return 0


def audit(args: argparse.Namespace) -> int:
    """Print the audit. Return exit code 0 if it finds no problem, else 1. Without streams, only the files are audited."""
    run = run_name(args.run_dir)
    if not any((args.run_dir / file).is_file() for file in NAMED_IN):
        raise FieldError("RUN_DIR", str(args.run_dir), "has neither run.json nor lineage.json: give the folder of a run")
    streams = _streams_of(args, run)
    elsewhere = streams is not None and streams.func is not streams_in_folder
    at_work = (lambda: True) if elsewhere else (lambda: "trainer" in living_names(RunDir(args.run_dir, "")))
    done = asyncio.run(audit_run(run, args.run_dir, streams, at_work))
    print(json.dumps(as_json(done, args.versions), indent=2) if args.json else "\n".join(lines(done, args.versions)))
    return 0 if done.ok else 1


def dead_letters(args: argparse.Namespace) -> int:
    """Print the prompt groups that were given up. Raises `FieldError` without streams, `BusError` if NATS does not answer."""
    letters, unreadable = asyncio.run(_read(args))
    if unreadable:
        print(f"{unreadable} messages are not dead letters of this run and are left out", file=sys.stderr)
    if args.json:
        for letter in letters:
            print(json.dumps(letter))
    elif letters:
        print(table([_COLUMNS, *map(_row, letters)]))
    else:
        print("no prompt group was given up", file=sys.stderr)
    return 0


async def _read(args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Return the dead letters, oldest first, and the number of messages that cannot be read."""
    folder, where = args.run_dir, "give the folder of a run, or --nats URL --run NAME"
    run = args.run or (run_name(folder) if folder else "")
    if folder and not args.nats and (folder / NAMED_IN[0]).is_file() and not (folder / LINEAGE).is_file():
        return [], 0  # The local run was stopped before its trainer started.
    opened = None if folder and args.nats else _streams_of(args, run)
    if opened is None:
        what = "" if args.nats or not folder else "holds no streams of a run; "
        raise FieldError("RUN_DIR", str(folder or ""), f"{what}{where}")
    letters, unreadable = [], 0
    async with opened() as bus:
        for payload in await bus.dead_letters():
            try:
                letters.append(_described(decode_dead_letter(payload, expected_run=bus.run)))
            except MessageError:
                unreadable += 1
    return letters, unreadable


def _described(letter: DeadLetter) -> dict[str, Any]:
    shown: dict[str, Any] = {"time": "?", "group_id": group_id_of(letter.msg_id)}
    with suppress(ValueError, OverflowError, OSError):
        shown["time"] = datetime.fromtimestamp(letter.at_s, UTC).isoformat(timespec="seconds")
    shown |= {name: getattr(letter, name) for name in ("msg_id", "deliveries", "actor", "reason")}
    shown["bytes"] = len(letter.prompt_group)
    try:
        group = decode_group(letter.prompt_group)
    except MessageError:
        return shown | {"prompt_group_base64": base64.b64encode(letter.prompt_group).decode()}
    same = ("task", "problem_index", "num_samples", "done_samples", "issued_version", "prompt_text", "reference_json")
    return shown | {name: getattr(group, name) for name in same} | {"prompt_token_ids": group.prompt_token_ids.tolist()}


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    prompt = one_line(letter.get("prompt_text", f"({letter['bytes']} bytes, unreadable)"), 40)
    reason = one_line(letter["reason"], 60)
    return (letter["time"], letter["group_id"] or "?", str(letter["deliveries"]), letter["actor"], reason, prompt)


def one_line(text: str, length: int) -> str:
    """Return a text as one line of at most `length` characters, without control characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 1] + "…"


def table(lines: list[tuple[str, ...]]) -> str:
    """Return the lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


# Where the streams are

_STORE = "jetstream"
"""Name of the folder in which nats-server keeps its streams."""
_STOP_WITHIN_S = 5.0


def _streams_of(args: argparse.Namespace, run: str) -> partial[Any] | None:
    """Return a function that opens the run's streams, or None if neither arguments nor environment variables name any."""
    if args.nats:
        return partial(connect, args.nats, check_run_name(run, "--run"), credentials=args.credentials, tls_dir=args.tls_dir)
    if args.run_dir and (args.run_dir / "nats" / _STORE).is_dir():
        return partial(streams_in_folder, args.run_dir)
    found = StreamsSettings()
    if not found.nats_url:
        return None
    run = check_run_name(run or found.run, "--run")
    return partial(connect, found.nats_url, run, credentials=found.nats_credentials, tls_dir=found.nats_tls_dir)


@asynccontextmanager
async def streams_in_folder(folder: Path) -> AsyncIterator[Bus]:
    """Yield a bus with the streams of the folder's run. If the run is not running, the bus serves a copy. Raises `FieldError`
    if the address of the run's NATS cannot be read."""
    run, run_dir = run_name(folder), RunDir(folder, "")
    credentials = run_dir.credentials
    async with AsyncExitStack() as stack:
        if living_names(run_dir):
            if not (url := str(read_json(file := run_dir.address(NATS)).get("url") or "")):
                raise FieldError("RUN_DIR", str(file), "does not say where the run's nats-server is; wait until it has started")
        else:
            copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipelinerl-streams-")))
            await asyncio.to_thread(shutil.copytree, run_dir.nats_store.resolve() / _STORE, copy / _STORE)
            credentials = Credentials(copy / "secrets")
            log = copy / "nats.log"
            command = nats_command(copy, log, extra=credentials.make(run))
            process = await ServiceProcess.start(Launch(NATS, command, os.environ, log, copy / "address.json"))
            stack.push_async_callback(process.terminate, _STOP_WITHIN_S)
            url = await nats_reached(copy, process)
        async with connect(url, run, credentials=credentials.nats(ADMIN), tls_dir=credentials.tls_dir) as bus:
            yield bus
