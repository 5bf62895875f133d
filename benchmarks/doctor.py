"""Play runs with seeded faults and healthy runs, and count how often `pipelinerl doctor` names the cause first.

    python -m benchmarks.doctor RUNS                 # play what RUNS does not hold yet, judge everything, write the result
    python -m benchmarks.doctor RUNS --only cut      # play some of them; write nothing

The faults are in tests/support/seeded_faults.py. A run takes 20 to 60 s on two CPU cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.result_files import write_result
from pipelinerl.doctor.runs import examine_run
from tests.support.seeded_faults import HEALTHY, RUN_FAULTS, RunFault

_LIMIT_S = 240.0
RESULT = Path(__file__).parent / "results" / "doctor.json"


def play(fault: RunFault, folder: Path) -> None:
    """Play a fault's run, which may fail, as a user would."""
    command = [sys.executable, "-m", "pipelinerl.cli", "run", fault.recipe, "--run-dir", str(folder), "--no-page"]
    overrides = [f"--set={one}" for one in (*fault.overrides, f"trainer.steps={fault.steps}")]
    with folder.with_suffix(".log").open("w") as log:
        process = subprocess.Popen([*command, "--reward-rows", "0", *overrides], stdout=log, stderr=log)
        try:
            process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # the run stops cleanly; the doctor judges what it has recorded
            process.wait()


def judged(fault: RunFault, folder: Path) -> dict[str, Any]:
    findings = examine_run(folder)
    told = [one.id for one in findings if one.gravity != "note"]
    right = (told or [one.id for one in findings])[:1] if fault.expected else []
    ok = bool(right) and right[0] in fault.expected if fault.expected else not any(one.gravity == "grave" for one in findings)
    return {"fault": fault.name, "about": fault.about, "expected": list(fault.expected),
            "found": [f"{one.gravity}: {one.id}" for one in findings], "ok": ok}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs, which keeps those that were played")
    parser.add_argument("--only", nargs="*", help="names of faults to play")
    args = parser.parse_args()
    chosen = [one for one in (*RUN_FAULTS, *HEALTHY) if not args.only or one.name in args.only]
    args.runs.mkdir(parents=True, exist_ok=True)
    results = []
    for fault in chosen:
        folder = args.runs / fault.name
        if not folder.exists():
            play(fault, folder)
        results.append(judged(fault, folder))
        mark, found = "ok   " if results[-1]["ok"] else "WRONG", results[-1]["found"]
        print(f"{mark} {fault.name}: {', '.join(found) or 'nothing'}", flush=True)
    if not args.only:
        write_result(RESULT, {"runs": results})


if __name__ == "__main__":
    main()
