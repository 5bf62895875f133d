"""What keeping account costs per sequence, against how many there are: the ledger, its journal, and the audit of both.

    python -m benchmarks.audit [--sequences 1000 10000 …] [--quick]

A made-up run: groups of 8, about a thousand sequences in flight, 128 trained into each version, one sequence in 64 failed.
`ledger` is the pure state machine alone; `books` adds the journal, written and flushed at each step as the trainer does (no
fsync); `audit` reads that journal back and derives the ledger again, with `audit_bytes` of memory at most. Microseconds of CPU
time per sequence, the least of a few rounds. Checkpoints and streams are not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.result_files import write_result
from pipelinerl.audit.audit import audit_files
from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.local.services import available_cores
from pipelinerl.rl.ledger import Ledger, Outcome

RESULTS = Path(__file__).parent / "results" / "audit.json"
SEQUENCES = (1_000, 10_000, 100_000, 1_000_000)
GROUP, IN_FLIGHT, BATCH, FAILED_EVERY = 8, 1024, 128, 64
ROUNDS = 3

Batch = tuple[int, list[str], list[str]]


def made_up_run(count: int) -> Iterator[tuple[str, list[str]] | Batch]:
    """(group, ids) as groups are issued; (version, failed ids, trained ids) as steps end. All of them end."""
    waiting: deque[str] = deque()
    version = 0
    for number in range(count // GROUP):
        group = f"g{number:08d}"
        ids = [f"{group}.{index}" for index in range(GROUP)]
        waiting.extend(ids)
        yield group, ids
        last = number + 1 == count // GROUP
        while len(waiting) >= IN_FLIGHT + BATCH or (last and waiting):
            version += 1
            batch = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
            yield version, batch[::FAILED_EVERY], [name for i, name in enumerate(batch) if i % FAILED_EVERY]


def keep_ledger(count: int) -> Ledger:
    """The pure part."""
    ledger = Ledger()
    for event in made_up_run(count):
        if len(event) == 2:
            ledger.issue(event[1])
        else:
            ledger.close(event[1], Outcome.FAILED, "engine")
            ledger.close(event[2], Outcome.TRAINED)
    return ledger


def keep_books(count: int, folder: Path) -> Ledger:
    """The same with its journal."""
    ledger = Ledger()
    with Journal(folder / JOURNAL) as journal:
        journal.write({"event": "start", "incarnation": 1, "version": 0, "keep": 0})
        journal.write({"event": "reserve", "groups": count})
        for event in made_up_run(count):
            if len(event) == 2:
                group, ids = event
                ledger.issue(ids)
                journal.write({"event": "issue", "group": group, "samples": GROUP, "version": 0})
                continue
            version, failed, trained = event
            for outcome, reason, ended in ((Outcome.FAILED, "engine", failed), (Outcome.TRAINED, "", trained)):
                ledger.close(ended, outcome, reason)
                more = {"reason": reason} if reason else {"version": version}
                journal.write({"event": "close", "outcome": outcome.value, **more, "ids": ended})
            journal.write({"event": "step", "version": version, "counts": ledger.counts})
            journal.flush()
    (folder / "lineage.json").write_text('{"run": "made-up", "starts": [0]}')
    return ledger


def audit(folder: Path, expected: Ledger) -> None:
    found = audit_files(folder)
    assert found.ok, found.findings
    assert found.replay.counts == expected.counts


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(count: int, rounds: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"make_up": [], "ledger": [], "books": [], "audit": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            seconds["make_up"].append(cpu_seconds(partial(deque, made_up_run(count), maxlen=0)))
            seconds["ledger"].append(cpu_seconds(partial(keep_ledger, count)))
            seconds["books"].append(cpu_seconds(partial(keep_books, count, folder)))
            expected, size = keep_ledger(count), (folder / JOURNAL).stat().st_size
            seconds["audit"].append(cpu_seconds(partial(audit, folder, expected)))
            last = len(seconds["audit"]) == rounds
            memory = peak_bytes(partial(audit, folder, expected)) if last else 0
    least = {name: min(found) for name, found in seconds.items()}
    made_up_s = least.pop("make_up")  # the ids themselves
    least = {name: least[name] - (made_up_s if name != "audit" else 0.0) for name in least}
    return {
        "sequences": count,
        **{f"{name}_us": round(1e6 * found / count, 3) for name, found in least.items()},
        "journal_bytes": round(size / count, 1),
        "audit_bytes": round(memory / count, 1),
    }


def peak_bytes(work: Callable[[], object]) -> int:
    """Memory of Python objects beyond what there was."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="*", default=SEQUENCES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="few sequences, one round")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    rows = []
    for count in SEQUENCES[:2] if arguments.quick else arguments.sequences:
        rows.append(measure(count, 1 if arguments.quick else arguments.rounds))
        print(json.dumps(rows[-1]), flush=True)
    machine = {"cores": available_cores(), "load_average_before": load}
    result = {"benchmark": "audit", "machine": machine, "rows": rows}
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
