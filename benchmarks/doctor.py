"""Play runs with seeded faults and healthy runs, and count how often `pipelinerl doctor` names the cause first.

    python -m benchmarks.doctor RUNS                 # play what RUNS does not hold yet, judge everything, write the result
    python -m benchmarks.doctor RUNS --only cut      # play some of them; write nothing
    python -m benchmarks.doctor RUNS --played        # judge those that RUNS holds, and write the result

The faults are in benchmarks/faulty_runs.py. A run takes 20 to 60 s on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.faulty_runs import HEALTHY, RUN_FAULTS, RunFault, sums
from benchmarks.result_files import write_result
from pipelinerl.doctor import lessons
from pipelinerl.doctor.findings import rules_of
from pipelinerl.doctor.runs import FIGURE_RULES, examine_run, losses
from pipelinerl.doctor.settings import SETTINGS_RULES
from pipelinerl.run_summary import read_jsonl

_LIMIT_S = 170.0
_PIPELINERL = (sys.executable, "-m", "pipelinerl.cli")
RESULT = Path(__file__).parent / "results" / "doctor.json"


def play(fault: RunFault, folder: Path) -> None:
    """Play a fault's run, which may fail, as a user would."""
    recipe, _, template = fault.recipe.partition(" ")
    if recipe == "init":
        recipe = str(folder.with_suffix(".init") / "recipe.yaml")
        chosen = ["--from", template] if template else []
        subprocess.run([*_PIPELINERL, "init", str(folder.with_suffix(".init")), *chosen], check=True, capture_output=True)
    overrides = [f"--set={one}" for one in (*fault.overrides, f"trainer.steps={fault.steps}")]
    if fault.answers is not None:
        rows, path = sums(), folder.with_suffix(".jsonl")
        answers = fault.answers([row["answer"] for row in rows])
        path.write_text("".join(f"{json.dumps(row | {'answer': one})}\n" for row, one in zip(rows, answers, strict=True)))
        overrides.append(f"--set=task={{source: jsonl, path: {path}, name: sums, prompt_style: plain, heldout_problems: 64}}")
    start = [recipe, "--run-dir", str(folder), "--reward-rows", "0", *overrides]
    _run(start, folder, "" if fault.event == "resume" else fault.event)
    if fault.event == "resume":
        _run(["--resume", str(folder), f"--set=trainer.steps={2 * fault.steps}"], folder)


def _run(arguments: list[str], folder: Path, killed: str = "") -> None:
    """Run until the end or the time limit. `killed`: the process that is killed after the fifth step."""
    with folder.with_suffix(".log").open("a") as log:
        process = subprocess.Popen([*_PIPELINERL, "run", *arguments, "--no-page"], stdout=log, stderr=log)
        started = time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            if killed and len(read_jsonl(folder / "metrics.jsonl")) >= 5:
                os.kill(json.loads((folder / "pids.json").read_text())[killed], signal.SIGKILL)
                killed = ""
            if time.monotonic() > started + _LIMIT_S:
                process.terminate()  # the run stops cleanly; the doctor judges what it has recorded
                process.wait()


def judged(fault: RunFault, folder: Path) -> dict[str, Any]:
    """Return what the doctor says about a run. Notes count only if there is nothing else."""
    findings = examine_run(folder)
    told = [one.id for one in findings if one.gravity != "note"] or [one.id for one in findings]
    first, is_accused = next(iter(told), "nothing"), any(one.gravity == "grave" for one in findings)
    is_right = first in fault.expected if fault.expected else not is_accused
    found = [f"{one.gravity} {one.id}" for one in findings]
    return {"name": fault.name, "about": fault.about, "expected": list(fault.expected), "found": found, "first": first,
            "right": is_right}  # fmt: skip


def matrix(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each kind of fault: how many runs the doctor judged rightly, and what it said of the others. It is right
    if it names the cause first or, of a healthy run, finds nothing grave."""
    known = {"settings": SETTINGS_RULES, "lost data": (losses,), "lengths, answers, rewards": lessons.RULES,
             "numerics, policy, speed": FIGURE_RULES}  # fmt: skip
    kinds = {id_: kind for kind, families in known.items() for id_ in rules_of(*families)}
    rows = []
    for kind in (*known, "none: a healthy run"):
        runs = [one for one in results if kinds.get(next(iter(one["expected"]), ""), "none: a healthy run") == kind]
        wrong = ", ".join(f"{one['name']}: {one['first']}" for one in runs if not one["right"])
        rows.append(
            {"fault": kind, "runs": len(runs), "right": len(runs) - sum(not one["right"] for one in runs), "wrong": wrong}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of the runs, which keeps those that were played")
    parser.add_argument("--only", nargs="*", help="names of the runs to play; the result is not written")
    parser.add_argument("--played", action="store_true", help="play nothing: judge the runs that the folder has")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    results = []
    for fault in (*RUN_FAULTS, *HEALTHY):
        folder = args.runs / fault.name
        if (args.only and fault.name not in args.only) or (args.played and not folder.exists()):
            continue
        if not folder.exists():
            play(fault, folder)
        results.append(judged(fault, folder))
        mark, found = "ok   " if results[-1]["right"] else "WRONG", results[-1]["found"]
        print(f"{mark} {fault.name}: {', '.join(found) or 'nothing'}", flush=True)
    if not args.only:
        write_result(RESULT, {"rows": matrix(results), "runs": results})


if __name__ == "__main__":
    main()
