"""Members that break in each phase of an update, random histories, a cable pulled, a disk full: real processes and signals.

The stage checks at the end of each test what must hold; here: the survivors serve the version, and the broken one, or its
successor, is brought back beside the others. `make test` plays `--histories` of the breaks and histories, from `--first-seed`.
"""

import asyncio
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.light_members import PHASES, Break, How, LightMember, Phase
from benchmarks.light_stage import Settings
from pipelinerl.bus.jetstream import Bus
from pipelinerl.errors import BusError
from tests.faults.network import Place, PrivateNetwork, private_network, why_not_here
from tests.faults.stage import SETTINGS, FaultStage, fault_stage

BROKEN_AT = 1
HOWS: tuple[How, ...] = ("dies", "freezes", "hangs", "fails")
MOST_MEMBERS, NUM_STEPS = 5, 12
BREAKS = [(phase, how) for phase in PHASES for how in HOWS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first, count = metafunc.config.getoption("--first-seed"), metafunc.config.getoption("--histories")
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(first, first + count))
    if "how" in metafunc.fixturenames:
        chosen = random.Random(first).sample(BREAKS, min(count, len(BREAKS)))
        metafunc.parametrize(("phase", "how"), sorted(chosen))


def replay(first_seed: int, histories: int) -> None:
    """Prints the command; pytest shows it with a failure."""
    chosen = f"--first-seed {first_seed} --histories {histories}"
    print(f"replay: .venv/bin/python -m pytest tests/faults/test_faults.py {chosen}")


async def play(stage: FaultStage, seed: int) -> None:
    """A random history, of the seed alone: who starts, breaks, dies, freezes, thaws or leaves, between and during updates.

    At least every third step offers a version, without waiting for it. Half of those that start break on their own, now or
    within two versions, and a quarter read the weight log. In the end all thaw and come to one more version.
    """
    draw, version = random.Random(seed), 0
    running, frozen, killed, gone = (list[LightMember]() for _ in range(4))
    for index in range(NUM_STEPS):
        possible = ["offer"] * 3
        possible += ["start"] * (3 if len(running) < 2 else 2 if len(running) + len(frozen) < MOST_MEMBERS else 0)
        possible += ["kill", "freeze", "leave"] if len(running) > 1 else []
        possible += ["thaw"] * (2 if frozen else 0)
        what = "start" if index == 0 else "offer" if index % 3 == 2 else draw.choice(possible)
        if what == "offer":
            await _with_somebody_left(stage, stage.offer(version))
            version += 1
        elif what == "start":  # a killed one, too, as a platform restarts it, often before its registration has expired
            name = killed.pop().name if killed and draw.random() < 0.5 else f"m{len(stage.members)}"
            breaks = Break(draw.choice(PHASES), draw.choice(HOWS), version + draw.randrange(3)) if draw.random() < 0.5 else None
            running.append(await stage.start(name, breaks, reads_log=draw.random() < 0.25))
        else:
            number, before, after = {
                "kill": (signal.SIGKILL, running, killed),
                "freeze": (signal.SIGSTOP, running, frozen),
                "thaw": (signal.SIGCONT, frozen, running),
                "leave": (signal.SIGTERM, running, gone),
            }[what]
            after.append(member := before.pop(draw.randrange(len(before))))
            gone += [member] if what == "kill" else []
            if member.process.is_alive():
                member.send(number)
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


async def test_after_any_history_one_more_update_reaches_everybody_alive(tmp_path: Path, seed: int) -> None:
    replay(seed, 1)
    async with fault_stage(tmp_path, settings=replace(SETTINGS, log="nats")) as stage:
        await play(stage, seed)


async def test_a_broken_actor_comes_back(tmp_path: Path, phase: Phase, how: How, request: pytest.FixtureRequest) -> None:
    replay(request.config.getoption("--first-seed"), request.config.getoption("--histories"))
    async with fault_stage(tmp_path) as stage:
        breaks = {"b": Break(phase, how, BROKEN_AT)}
        a, b, c = await stage.start_all("a", "b", "c", breaks=breaks)
        await stage.update(0)
        await stage.update(BROKEN_AT)
        await stage.all_on(BROKEN_AT, [a, c])
        await b.until_broken()  # later than the others are served, if a busy machine had put it out of the epoch
        back = b
        if how == "freezes":
            b.send(signal.SIGCONT)
        elif how != "fails":
            b.process.kill()
            back = await stage.start("b")
        await stage.all_on(BROKEN_AT, [back])
        await stage.update(2)
        await stage.all_on(2, [a, back, c])


async def test_joiners_get_the_served_version_together_and_beside_epochs_of_the_others(tmp_path: Path) -> None:
    async with fault_stage(tmp_path, settings=Settings(member_ttl_s=15.0, deadline_s=60.0, stall_timeout_s=30.0)) as stage:
        (first,) = await stage.start_all("a")
        await stage.update(0)
        joiners = [await stage.start(name) for name in "bcd"]
        await stage.all_on(0, joiners)
        await stage.until(lambda: sorted(stage.history.joined_s) == ["b", "c", "d"])
        assert [report.kind for report in first.reports] == ["joined", "serves"], "the others notice nothing"
        await stage.update(1)
        await stage.all_on(1, [first, *joiners])
        late = await stage.start("e", Break("staged", "freezes", 1))
        await late.until_broken()
        joiners.pop().send(signal.SIGTERM)
        await stage.until(lambda: stage.updater.num_present == 4)
        await stage.update(2)  # in an epoch of a, b and c
        late.send(signal.SIGCONT)
        await stage.all_on(2, [first, *joiners, late])


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    if reason := why_not_here():
        pytest.skip(f"a private network: {reason}")
    with private_network() as network:
        yield network


@asynccontextmanager
async def three_apart(
    network: PrivateNetwork, folder: Path, breaks: Break | None = None
) -> AsyncIterator[tuple[FaultStage, list[LightMember], Place]]:
    """Members a, b and c that serve version 0, each in a network namespace, and the place of b, which `breaks`."""
    async with fault_stage(folder, host=network.host) as stage:
        places = [network.add() for _ in "abc"]
        members = [
            await stage.start(name, breaks if name == "b" else None, address=at.address, namespace=at.namespace)
            for name, at in zip("abc", places, strict=True)
        ]
        await stage.until(lambda: stage.updater.num_present == 3)
        await stage.update(0)
        yield stage, members, places[1]


@pytest.mark.parametrize("phase", ["receiving", "staged", "committing", "serving"])
async def test_a_network_cut_during_an_update_stops_nobody_else(tmp_path: Path, network: PrivateNetwork, phase: Phase) -> None:
    async with three_apart(network, tmp_path, Break(phase, "freezes", 1)) as (stage, (a, b, c), place):
        await stage.offer(1)
        await b.until_broken()
        place.cut()
        b.send(signal.SIGCONT)
        await stage.served()
        await stage.all_on(1, [a, c])
        place.mend()
        await stage.all_on(1, [b])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)), capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(("umount", "--lazy", str(folder)), check=True)


async def test_updates_wait_while_the_disk_of_the_streams_is_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with fault_stage(small_disk) as stage:
        a, b = await stage.start_all("a", "b")
        await stage.update(0)
        ballast = small_disk / "ballast"
        fill(ballast)
        while await takes_a_message(stage.bus):  # what the stream's last page still holds
            pass
        await stage.offer(1)
        await stage.until(lambda: any("publish 'announce'" in record.getMessage() for record in caplog.records))
        ballast.unlink()
        stage.server.port = int(stage.server.url.rpartition(":")[2])
        stage.server.stop()
        stage.server.start()
        await stage.served()
        await stage.all_on(1, [a, b])


async def takes_a_message(bus: Bus) -> bool:
    try:
        await bus.publish_control("failed", bytes(512), "nobody")
    except BusError:
        return False
    return True


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
