"""How long a version takes to reach the others when one of three members dies or freezes, for each phase of an update.

    python -m benchmarks.recovery [--quick]

Light members (real protocol, NATS and Gloo; no engine), each repetition on a trainer and a nats-server of its own. Twice:
with the product's default times, and with the short ones that the fault tests use. `repeats` of a row run at the same
time; they mostly wait. Not measured: vLLM, networks that drop packets, a broken trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.light_members import PHASES, Break, LightMember, Phase
from benchmarks.light_stage import LightStage, Settings, light_stage, same_weights
from benchmarks.result_files import kept_rows, write_result
from pipelinerl.bus.protocol import StreamLimits
from pipelinerl.local.services import available_cores
from pipelinerl.recipe.fields import WeightUpdateConfig

RESULT = Path(__file__).parent / "results" / "recovery.json"
PRODUCT = Settings(StreamLimits().member_ttl_s, WeightUpdateConfig().deadline_s, 10.0)
SHORT = Settings(member_ttl_s=1.5, deadline_s=3.0, stall_timeout_s=2.0)
BROKEN_AT = 1
REPEATS = 5
How = Literal["dies", "freezes"]
HOWS: tuple[How, ...] = ("dies", "freezes")


@dataclass(frozen=True)
class Recovery:
    """Seconds from the break. `served_s`: until the last survivor served the version, 0 where all did before; `counted_s`:
    until the trainer was done with it. `pause_s`: longest pause of a survivor. `meetings`: groups a survivor had to join."""

    served_s: float
    counted_s: float
    pause_s: float
    meetings: int


async def recover(phase: Phase, how: How, settings: Settings) -> Recovery:
    """One break, in the first epoch for `joining`, else at version `BROKEN_AT`."""
    with tempfile.TemporaryDirectory() as folder:
        async with light_stage(Path(folder), settings, same_weights(megabytes=1), LightStage) as stage:
            a, b, c = await stage.start_all("a", "b", "c", breaks={"b": Break(phase, how, BROKEN_AT)})
            version = 0 if phase == "joining" else BROKEN_AT
            if version:
                await stage.update(0)
            before = len(a.reports)
            await stage.update(version)
            await stage.until(lambda: b.broke and min(a.version, c.version) >= version)
            return outcome(stage, b, [a, c], version, sum(r.kind == "joined" for r in a.reports[before:]))


def outcome(stage: LightStage, broken: LightMember, survivors: Sequence[LightMember], version: int, meetings: int) -> Recovery:
    at_s = next(report.at_s for report in broken.reports if report.kind == "breaks")
    serves = [report for member in survivors for report in member.served if report.number == version]
    return Recovery(
        served_s=max(0.0, max(report.at_s for report in serves) - at_s),
        counted_s=max(0.0, stage.history.served_s[version] - at_s),
        pause_s=max(report.pause_s for report in serves),
        meetings=meetings,
    )


def row(phase: Phase, how: How, times: str, measured: Sequence[Recovery]) -> dict[str, Any]:
    """Medians and maxima of one phase, one kind of break, one setting."""

    def pair(values: Sequence[float], digits: int) -> tuple[float, float]:
        return round(statistics.median(values), digits), round(max(values), digits)

    served, counted = pair([one.served_s for one in measured], 2), pair([one.counted_s for one in measured], 2)
    pause = pair([1000 * one.pause_s for one in measured], 1)
    return {
        "phase": phase,
        "the member": how,
        "times": times,
        "repeats": len(measured),
        "served_s": served[0],
        "served_max_s": served[1],
        "trainer_s": counted[0],
        "trainer_max_s": counted[1],
        "pause_ms": pause[0],
        "pause_max_ms": pause[1],
        "meetings": max(one.meetings for one in measured),
    }


async def measure(phases: Sequence[Phase], repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for phase in phases:
        for how in HOWS:
            for times, settings in (("default", PRODUCT), ("short", SHORT)):
                measured = await asyncio.gather(*(recover(phase, how, settings) for _ in range(repeats)))
                rows.append(row(phase, how, times, measured))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two phases, one repeat")
    parser.add_argument("--phases", nargs="+", choices=PHASES, help="some phases; the file keeps its rows of the others")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    repeats = 1 if arguments.quick else REPEATS
    phases = arguments.phases or (("receiving", "serving") if arguments.quick else PHASES)
    rows = kept_rows(arguments.output, "phase", phases) + asyncio.run(measure(phases, repeats))
    rows.sort(key=lambda row: PHASES.index(row["phase"]))
    machine = {"cores": available_cores(), "load_average_after": round(os.getloadavg()[0], 2)}
    settings = {"default": vars(PRODUCT), "short": vars(SHORT)}
    result = {"benchmark": "recovery", "machine": machine, "settings": settings, "rows": rows}
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
