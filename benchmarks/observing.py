"""What it costs to be watched: steps and decoding with metrics and the open page beside steps and decoding without, in one run.

    python -m benchmarks.observing [--pairs 8] [--steps 12] [--only trainer|actor] [--output FILE]

`trainer` (observed_trainer.py), `actor` (observed_actor.py). Traces are off, as they are by default. A part that is not
measured this time keeps its last result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.result_files import kept_cases, write_result
from pipelinerl.local.services import available_cores, plan_threads

RESULT = Path(__file__).parent / "results" / "observing.json"
PARTS = ("trainer", "actor")


def measured(part: str, pairs: int, steps: int) -> dict[str, Any]:
    """The case of one part, by name. vLLM's variables are set before torch is imported."""
    if part == "trainer":
        from benchmarks.observed_trainer import run_trainer
        from benchmarks.trainer_cases import CASES

        return {"trainer": run_trainer(CASES["tiny"], pairs, steps)}
    threads = plan_threads(available_cores(), num_actors=1)
    os.environ.update(threads.actor_env() | {"VLLM_LOGGING_LEVEL": "WARNING"})
    from benchmarks.actor_cases import tiny
    from benchmarks.observed_actor import run_actor

    return {"actor": asyncio.run(run_actor(tiny(random_weights=False), threads, pairs))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="blocks or rounds of each side that are counted")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of a block")
    parser.add_argument("--only", choices=PARTS, help="one part; the results of the others are kept")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    parts = (arguments.only,) if arguments.only else PARTS
    cases = kept_cases(arguments.output, PARTS)
    for part in parts:
        found = measured(part, arguments.pairs, arguments.steps)
        print(part, json.dumps(found, indent=2), flush=True)
        cases |= found
        write(arguments.output, cases)


def write(path: Path, cases: dict[str, Any]) -> None:
    ordered = {part: cases[part] for part in PARTS if part in cases}
    machine = {"cores": available_cores(), "load_average_after": round(os.getloadavg()[0], 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    output = {"benchmark": "observing", "machine": machine, "cases": ordered}
    write_result(path, output)


if __name__ == "__main__":
    main()
