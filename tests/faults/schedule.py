"""Random histories of a run's membership: who starts, breaks, dies, freezes, thaws or leaves, between and during updates. A
quarter of the members read the weight log.

Drawn from a seed and nothing else, so that a history that broke something can be played again. `play` performs one on a
`FaultStage` and ends with what must hold after any of them: one more update, and everyone who lives serves its bytes.
"""

import asyncio
import random
import signal
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.light_members import PHASES, Break, How, LightMember
from tests.faults.stage import SETTINGS, FaultStage

HOWS: tuple[How, ...] = ("dies", "freezes", "hangs", "fails")
MOST_MEMBERS = 5
NUM_STEPS = 12


@dataclass(frozen=True)
class Step:
    """`offer`: the next version, without waiting for it. The others are of `member`; `breaks` and `reads_log` of one that
    starts."""

    what: Literal["start", "kill", "freeze", "thaw", "leave", "offer"]
    member: str = ""
    breaks: Break | None = None
    reads_log: bool = False


def random_history(seed: int) -> Iterator[Step]:
    """At least every third step is an offer; the first step starts a member. Pure."""
    draw = random.Random(seed)
    running: list[str] = []
    frozen: list[str] = []
    killed: list[str] = []
    started, version = 0, 0
    for index in range(NUM_STEPS):
        possible = ["offer"] * 3
        possible += ["start"] * (3 if len(running) < 2 else 2 if len(running) + len(frozen) < MOST_MEMBERS else 0)
        possible += ["kill", "freeze", "leave"] if len(running) > 1 else []
        possible += ["thaw"] * (2 if frozen else 0)
        what = "start" if index == 0 else "offer" if index % 3 == 2 else draw.choice(possible)
        match what:
            case "offer":
                version += 1
                yield Step("offer")
            case "start":
                if killed and draw.random() < 0.5:  # as a platform restarts it, often before its registration has expired
                    name = killed.pop()
                else:
                    name = f"m{started}"
                    started += 1
                running.append(name)
                yield Step("start", name, _random_break(draw, version), draw.random() < 0.25)
            case "thaw":
                name = frozen.pop(draw.randrange(len(frozen)))
                running.append(name)
                yield Step("thaw", name)
            case "kill" | "freeze" | "leave":
                name = running.pop(draw.randrange(len(running)))
                {"freeze": frozen, "kill": killed}.get(what, []).append(name)
                yield Step(what, name)


def _random_break(draw: random.Random, version: int) -> Break | None:
    """Half of those that start break on their own, now or within the next two versions."""
    if draw.random() < 0.5:
        return None
    return Break(draw.choice(PHASES), draw.choice(HOWS), version + draw.randrange(3))


async def play(stage: FaultStage, history: Iterable[Step]) -> None:
    """Performs it, then thaws all and brings them to one more version. A run that nobody is left to serve gets a member."""
    version = 0
    gone: list[LightMember] = []
    for step in history:
        if step.what == "offer":
            await _with_somebody_left(stage, stage.offer(version))
            version += 1
        elif step.what == "start":
            await stage.start(step.member, step.breaks, reads_log=step.reads_log)
        else:
            member = _signal(stage, step)
            gone += [member] if step.what in ("kill", "leave") else []
    await stage.start("last")
    thawing = asyncio.create_task(_thaw_all(stage))
    try:
        await _with_somebody_left(stage, stage.offer(version))
        await _with_somebody_left(stage, stage.served())
        await stage.all_on(version, [m for m in stage.members if m not in gone and not _may_be_lost(m)])
    finally:
        thawing.cancel()


async def _thaw_all(stage: FaultStage) -> None:
    """Again and again: some freeze only on reaching the last version."""
    while True:
        for member in stage.members:
            if member.process.is_alive():
                member.send(signal.SIGCONT)
        await asyncio.sleep(0.2)


def _signal(stage: FaultStage, step: Step) -> LightMember:
    member = next(member for member in reversed(stage.members) if member.name == step.member)
    numbers = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "thaw": signal.SIGCONT, "leave": signal.SIGTERM}
    if member.process.is_alive():
        member.send(numbers[step.what])
    return member


async def _with_somebody_left(stage: FaultStage, waiting: Coroutine[Any, Any, None]) -> None:
    """Awaits what may wait for ever when no member can serve: then another one comes, as a platform would see to."""
    work = asyncio.create_task(waiting)
    while not (await asyncio.wait({work}, timeout=SETTINGS.deadline_s))[0]:
        if not any(member.is_running and not member.broke for member in stage.members):
            await stage.start(f"rescue-{len(stage.members)}")
    await work


def _may_be_lost(member: LightMember) -> bool:
    """Told to die or to hang for ever on reaching some version."""
    return member.spec.breaks is not None and member.spec.breaks.how in ("dies", "hangs")
