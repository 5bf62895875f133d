"""Programs a second in each sandbox of this machine, beside a bare `subprocess` that runs the same programs, in turn.

    python -m benchmarks.sandbox [--rounds 15] [--programs 40] [--output FILE]

A program reads a number and prints its double, one after another, as a reward worker runs tests. The bare side writes the
program into a folder and starts the same interpreter with the same options. `ratio`: median over rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result_files import write_result
from pipelinerl.local.services import available_cores
from services.verifier.sandbox import Limits, Means, python, run

RESULT = Path(__file__).parent / "results" / "sandbox.json"
GOAL = 0.5
SOURCE = "print(2 * int(input()))"
INTERPRETER = [os.path.realpath(sys.executable), "-I", "-S", "-B", "main.py"]


def bare(number: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "main.py").write_text(SOURCE)
        done = subprocess.run(INTERPRETER, input=b"%d\n" % number, cwd=folder, capture_output=True, timeout=30, check=True)
        return done.stdout


def per_second(means: Means | None, programs: int) -> float:
    """None: without a sandbox."""
    began_s = time.perf_counter()
    for number in range(programs):
        stdin = b"%d\n" % number
        printed = bare(number) if means is None else run(*python(SOURCE), stdin, Limits(timeout_s=30.0), means).stdout
        assert printed == b"%d\n" % (2 * number), printed
    return programs / (time.perf_counter() - began_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of each side that are counted")
    parser.add_argument("--programs", type=int, default=40, help="in a round")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    sides: tuple[Means | None, ...] = (None, Means.BUBBLEWRAP, Means.LANDLOCK)
    rates: dict[Means | None, list[float]] = {side: [] for side in sides}
    load = round(os.getloadavg()[0], 2)
    for number in range(arguments.rounds):
        for side in sides if number % 2 else reversed(sides):
            rates[side].append(per_second(side, arguments.programs))
    rows = [
        {
            "means": means,
            "programs_per_s": round(statistics.median(rates[means]), 1),
            "bare_per_s": round(statistics.median(rates[None]), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(rates[means], rates[None], strict=True)), 3),
        }
        for means in sides[1:]
    ]
    machine = {"cores": available_cores(), "load_average_before": load}
    write_result(arguments.output, {"benchmark": "sandbox", "goal": GOAL, "machine": machine, "rows": rows})
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
