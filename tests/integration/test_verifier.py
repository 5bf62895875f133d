"""The verifier as a process: misbehaving rewards, their cost, its end; and the client that waits for it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pipelinerl.errors import MessageError, ServiceError, UserError
from pipelinerl.messages import verification
from pipelinerl.messages.verification import VerifierClient, status_name
from pipelinerl.service.retry import Backoff
from pipelinerl.v1 import verifier_pb2
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyItem, VerifyResult
from services.verifier.confinement import children, descendants
from services.verifier.sandbox import confinement_missing
from tests.support.certificates import Authority
from tests.support.chat_endpoint import endpoint
from tests.support.hostile_programs import BESIDE, ESCAPES, HOGS, LEAVERS, MAY, left_by, surroundings_in
from tests.support.machine import ends_within, free_port, until
from tests.support.verifier import ITEM, START_S, ScriptedVerifier, Verifier, sample, serving, verifier

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers confine themselves with Linux's means")

TASK, PATIENT, EXACT, FURTHER = "misdeeds", "patient", "exact", "further"
ENDLESS = ("sleep", "hang_in_c", "backtrack", "flood", "leave_children_and_hang", "run")
"""Misdeeds that only the reward's time limit may end. All others have so much time that a busy machine does not fail them."""


def recipe(**reward: Any) -> dict[str, Any]:
    file = {"source": "jsonl", "path": "unused.jsonl"}
    exact, further = (
        {"name": name, "task": file, "reward": {"scorer": scorer, "memory_mib": 256}}
        for name, scorer in ((EXACT, "exact"), (FURTHER, "regex"))
    )
    reward = {"scorer": "hostile_rewards:score", "timeout_s": 2.4, "memory_mib": 256} | reward
    patient = {"name": PATIENT, "task": file, "reward": reward | {"timeout_s": START_S}}
    return {
        "name": "test",
        "model": {"source": "path", "name": "unused"},
        "tasks": [{"task": file | {"name": TASK}}, patient, exact],
        "evaluation": {"sets": [further]},
        "reward": reward,
    }


@pytest.fixture(autouse=True)
def tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "BACKOFF", Backoff(first_s=0.02, most_s=0.2))


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifier]:
    with verifier(tmp_path_factory.mktemp("hostile"), recipe()) as running:
        yield running.wait_until_serving()


def items(completions: Sequence[str], task: str = "") -> list[VerifyItem]:
    """Of `task`, or else of the one whose time limit each needs."""
    tasks = [task or (TASK if text.partition(" ")[0] in ENDLESS else PATIENT) for text in completions]
    return [
        VerifyItem(sequence_id=f"g.{index}", task=task, completion_text=text, reference_json='{"answer": "1"}')
        for index, (task, text) in enumerate(zip(tasks, completions, strict=True))
    ]


async def outcomes(running: Verifier, completions: Sequence[str], task: str = "") -> list[VerifyResult]:
    async with VerifierClient(running.address.grpc) as client:
        return await client.verify(items(completions, task))


def test_a_judge_scores_and_no_worker_has_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    with endpoint("Fine. SCORE: 7", (401, "who are sk-very-secret?")) as server:
        judge = {
            "url": server.url,
            "model": "big",
            "template": "{reference} or {completion}?",
            "pattern": r"SCORE: (\d+)",
            "full_marks": 10.0,
            "concurrency": 1,
            "api_key_env": "JUDGE_KEY",
        }
        with verifier(tmp_path, recipe(scorer="judge", judge=judge)) as running:
            running.wait_until_serving()
            first, second = asyncio.run(outcomes(running, ["one", "two"]))
            workers = [Path(f"/proc/{pid}/environ").read_bytes() for pid in children(running.process.pid)]
            log = running.log
    assert (first.status, first.reward) == (VERIFY_STATUS_OK, pytest.approx(0.7))
    message = "the judge failed, and a retry would not help: HTTP 401: who are ***?"
    assert (status_name(second.status), second.message) == ("crashed", message)
    assert server.asked[0][1]["Authorization"] == "Bearer sk-very-secret"
    assert workers
    assert not any(b"sk-very-secret" in environment for environment in workers)
    assert "sk-very-secret" not in log


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
async def test_a_reward_in_a_sandbox_gets_out_no_more_than_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started in a folder that holds the run's, and temporary files, it reads what is beside and nothing in them."""
    folder, run_dir, temporary = tmp_path / "verifier", tmp_path / "cwd" / "run", tmp_path / "cwd" / "temporary"
    folder.mkdir()
    temporary.mkdir(parents=True)
    (temporary / "file").write_text("password")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("PYTHONPATH", str(run_dir.parent))
    with (
        surroundings_in(tmp_path) as surroundings,
        verifier(folder, recipe(sandbox=True, timeout_s=60.0), private_dir=run_dir) as running,
    ):
        running.wait_until_serving()
        attempts = [f"run {surroundings.filled(ESCAPES[name], running.process.pid)}" for name in sorted(ESCAPES.keys() - MAY)]
        attempts.append(f"run if 'password' in open('{temporary}/file').read(): print('escaped')")
        reads = f"run {surroundings.filled(BESIDE, 0)}"
        scored = await outcomes(running, [reads, *attempts, f"kill {running.process.pid}", reads])
        assert running.process.poll() is None
        assert surroundings.untouched
    assert [(status_name(each.status), each.reward) for each in scored[1:-2]] == [("ok", 0.0)] * len(attempts)
    assert status_name(scored[-2].status) == "crashed"
    assert scored[0].reward == scored[-1].reward == 1.0


@pytest.mark.skipif(bool(confinement_missing()), reason=confinement_missing())
async def test_what_a_reward_in_a_sandbox_takes_or_leaves_is_bounded(tmp_path: Path) -> None:
    """A good item after each, and no process but the workers at the end, also where one of those above is killed alone."""
    with verifier(tmp_path / "verifier", recipe(sandbox=True)) as running:
        pid = running.wait_until_serving().process.pid
        misdeeds = [*HOGS.values(), *(program.format(parent=pid) for program in LEAVERS.values())]
        scored = await outcomes(running, [text for each in misdeeds for text in (f"run {each}", "say 1")])
        assert [(status_name(each.status), each.reward) for each in scored[1::2]] == [("ok", 1.0)] * len(misdeeds)
        assert not any(each.reward for each in scored[::2])
        assert await sample(running.address, 'sandbox{code="rewards",means="landlock"}') == 1
        hangs = LEAVERS["leaves processes and hangs"].format(parent=pid)
        for generation in range(3):
            await until(lambda: not left_by(pid))
            hanging = asyncio.create_task(outcomes(running, [f"run {hangs}"], PATIENT))
            for _ in range(2):  # after the first death it is tried again, perhaps by a worker that is killed just then
                await until(lambda hanging=hanging: hanging.done() or len(left_by(pid)) == 4)  # type: ignore[misc]
                left, killed = left_by(pid), children(pid)
                for _ in range(generation):
                    killed = [child for each in killed for child in children(each)]
                for each in killed:
                    os.kill(each, signal.SIGKILL)
                try:
                    await until(lambda left=left: not {*left} & {*left_by(pid)})  # type: ignore[misc]
                finally:
                    for each in {*left} & {*left_by(pid)}:
                        os.kill(each, signal.SIGKILL)
            assert [status_name(each.status) for each in await hanging] == ["crashed"]
        # two workers, each below two that keep it in bounds
        await until(lambda: not left_by(pid) and sum(1 for _ in descendants(pid)) == 6)


@pytest.mark.parametrize("number", [24, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
async def test_honest_programs_are_scored_among_hostile_ones(tmp_path: Path, number: int) -> None:
    """Every fourth program is right."""
    folder, drawn = tmp_path / "verifier", random.Random(0)
    folder.mkdir()
    data = recipe(scorer="code", test_timeout_s=1.0, timeout_s=START_S, sandbox=None)
    data["tasks"][1]["reward"]["test_timeout_s"] = START_S
    tests = [{"input": "", "output": "right"}]
    with surroundings_in(tmp_path) as surroundings, verifier(folder, data) as running:
        running.wait_until_serving()
        attempts = [*(surroundings.filled(each, running.process.pid) for each in ESCAPES.values()), *HOGS.values()]
        reference = json.dumps({"row": {"tests": tests}})
        asked = [VerifyItem(sequence_id=f"g.{index}", task=TASK, reference_json=reference) for index in range(number)]
        for index, item in enumerate(asked):
            item.completion_text = drawn.choice(attempts) if index % 4 else "print('right')"
            item.task = TASK if index % 4 else PATIENT
        async with VerifierClient(running.address.grpc) as client:
            for start in range(0, number, 64):
                scored = await client.verify(asked[start : start + 64])
                expected = [float(index % 4 == 0) for index in range(start, start + len(scored))]
                assert [(status_name(each.status), each.reward) for each in scored] == [("ok", value) for value in expected]
        assert surroundings.untouched
        # A process with one thread finds the means, as in the verifier.
        means = subprocess.run([sys.executable, "-m", "services.verifier.sandbox"], capture_output=True, text=True, check=True)
        assert await sample(running.address, f'sandbox{{code="programs",means="{means.stdout.strip()}"}}') == 1


# --- misdeeds


MISDEEDS = [
    ("sleep 600", "timeout", "more than 2.4 s (reward.timeout_s)"),
    ("hang_in_c", "timeout", "more than 2.4 s (reward.timeout_s)"),
    ("backtrack", "timeout", "more than 2.4 s (reward.timeout_s)"),
    ("raise", "crashed", "RuntimeError: boom"),
    ("sys_exit", "crashed", "SystemExit"),
    ("os_exit", "crashed", "exit code 3"),
    ("segfault", "crashed", "SIGSEGV"),
    ("close_pipes", "crashed", "closed its pipe"),
    ("write_in_pipes", "crashed", "it wrote a result of 4,294,967,295 bytes"),
    ("fill_memory", "out_of_memory", "reward.memory_mib"),
    ("say nan", "bad_reward", "nan"),
    ("say inf", "bad_reward", "inf"),
]


async def test_a_misdeed_costs_its_own_item(hostile: Verifier) -> None:
    """More of them at once than workers, a good item after each, and forks that come back, which are no second workers."""
    completions = [text for index, row in enumerate(MISDEEDS) for text in (row[0], f"say {index}")]
    scored = await outcomes(hostile, [*completions, "fork_and_return", "say 0.5", "fork_and_return"])
    assert [outcome.sequence_id for outcome in scored] == [f"g.{index}" for index in range(len(scored))]
    for guilty, (misdeed, status, message) in zip(scored[: 2 * len(MISDEEDS) : 2], MISDEEDS, strict=True):
        assert (status_name(guilty.status), guilty.reward) == (status, 0.0), misdeed
        assert message in guilty.message
    others = [*scored[1 : 2 * len(MISDEEDS) : 2], *scored[2 * len(MISDEEDS) :]]
    values = [float(index) for index in (*range(len(MISDEEDS)), 1.0, 0.5, 1.0)]
    assert [(status_name(one.status), one.reward) for one in others] == [("ok", value) for value in values]


async def test_processes_a_reward_started_end_with_its_item(hostile: Verifier, tmp_path: Path) -> None:
    misdeeds = ("leave_children", "leave_children_and_hang")
    scored = await outcomes(hostile, [*(f"{one} {tmp_path / one}" for one in misdeeds), "say 1"])
    assert [status_name(outcome.status) for outcome in scored] == ["ok", "timeout", "ok"]
    pids = [int(line) for one in misdeeds for line in (tmp_path / one).read_text().split()]
    assert 6 < len(pids) <= 12  # a busy machine may not start all of the second six in time
    assert [pid for pid in pids if not ends_within(pid, START_S)] == []


async def test_a_leak_replaces_the_worker_and_costs_no_item(hostile: Verifier) -> None:
    """30 times 16 MiB kept in processes of 256 MiB each."""
    before = await sample(hostile.address, 'worker_restarts_total{reason="retirement"}')
    scored = [outcome for _ in range(30) for outcome in await outcomes(hostile, ["keep_mib 16"])]
    assert {outcome.status for outcome in scored} == {VERIFY_STATUS_OK}
    assert await sample(hostile.address, 'worker_restarts_total{reason="retirement"}') > before


async def test_a_worker_shot_from_outside_costs_no_item(hostile: Verifier) -> None:
    waiting = asyncio.create_task(outcomes(hostile, ["sleep 0.5"] * 2, PATIENT))
    await asyncio.sleep(0.25)  # into the rewards
    for worker in children(hostile.process.pid):
        os.kill(worker, signal.SIGKILL)
    assert [outcome.status for outcome in await waiting] == [VERIFY_STATUS_OK] * 2


async def test_a_reward_reaches_nothing_of_the_verifiers(hostile: Verifier) -> None:
    (scored,) = await outcomes(hostile, ["inspect"])
    assert (scored.status, scored.message) == (VERIFY_STATUS_OK, "")


async def test_what_a_reward_prints_is_in_the_log_and_a_flood_is_not(hostile: Verifier) -> None:
    """Four times 16 MiB of what clears a terminal, and as much in an error's text."""
    scored = await outcomes(hostile, ["print words-of-a-reward", *["flood"] * 4, "print last-words"])
    first, *floods, last = [status_name(outcome.status) for outcome in scored]
    assert (first, last) == ("ok", "ok")
    assert {*floods} <= {"crashed", "timeout"}  # a busy machine prints so much too slowly
    for said in ("words-of-a-reward", r"\x1b[2J", "a worker prints too much"):
        await until(lambda said=said: said in hostile.log)  # type: ignore[misc]
    assert "\x1b" not in hostile.log
    assert len(hostile.log) < 4 * 2**20


async def test_another_task_is_unknown_and_mixes_with_known_ones(hostile: Verifier) -> None:
    mixed = [*items(["say 1"]), *items(["say 2"], task="arithmetic"), *items(["say 3"]), *items(["1"], task=EXACT)]
    mixed += items(["2"], task=FURTHER)
    counted = f'requests_total{{status="ok",task="{PATIENT}"}}', 'requests_total{status="unknown_task",task="(unknown)"}'
    before = [await sample(hostile.address, name) for name in counted]
    async with VerifierClient(hostile.address.grpc) as client:
        scored = await client.verify(mixed)
    assert [await sample(hostile.address, name) for name in counted] == [before[0] + 2, before[1] + 1]
    assert [status_name(outcome.status) for outcome in scored] == ["ok", "unknown_task", "ok", "ok", "ok"]
    assert [outcome.reward for outcome in scored] == [1, 0, 3, 1, 0]
    assert "'arithmetic'" in scored[1].message


# --- its start and its end


async def test_a_verifier_with_certificates_answers_those_who_show_one_and_ends_in_order(tmp_path: Path) -> None:
    authority = Authority()
    own, callers = authority.issue(tmp_path / "own", "127.0.0.1"), authority.issue(tmp_path / "callers", "actor")
    (brought := tmp_path / "brought").mkdir()
    (brought / "my_rewards.py").write_text("from hostile_rewards import score\n")  # which PYTHONPATH has
    with verifier(tmp_path / "run", recipe(scorer="my_rewards:score"), tls_dir=own, reward_modules=brought) as running:
        target = running.wait_until_serving().address.grpc
        async with VerifierClient(target, tls_dir=callers) as client:
            assert len(await client.verify(items(["say 1"]))) == 1
        async with VerifierClient(target) as stranger:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stranger.verify(items(["say 1"])), 0.5)
        workers = children(running.process.pid)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(START_S) == 0, running.log
        assert "Traceback" not in running.log
        assert len(workers) == 2
        assert all(ends_within(worker, 0.0) for worker in workers)


async def test_a_full_queue_refuses_more_items(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, recipe(timeout_s=START_S), max_queue=4) as address, VerifierClient(address.grpc) as client:
        with pytest.raises(ServiceError, match="INVALID_ARGUMENT: items = 5: max_queue is 4"):
            await client.verify(items(["say 1"] * 5))
        leaving = asyncio.create_task(client.verify(items([f"wait_for {tmp_path}/left", *[f"touch {tmp_path}/scored"] * 3])))
        while await sample(address, "queue_items") < 3:
            assert not leaving.done()
        waiting = asyncio.create_task(client.verify(items(["say 2"] * 4)))
        while await sample(address, 'calls_total{code="RESOURCE_EXHAUSTED"}') == 0:
            assert not waiting.done()
        leaving.cancel()
        while await sample(address, 'calls_total{code="CANCELLED"}') == 0:
            await asyncio.wait([leaving])
        (tmp_path / "left").touch()
        assert [outcome.reward for outcome in await waiting] == [2.0] * 4
    assert "no room for 4 more items: 3 are waiting, and max_queue = 4" in caplog.text
    assert not (tmp_path / "scored").exists()


async def test_a_reward_that_does_not_exist_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape("scoer does not exist in hostile_rewards; did you mean score?")):
        async with serving(tmp_path, recipe(scorer="hostile_rewards:scoer")):
            pass


# --- the client, against scripted servers


def client_of(port: int, **options: Any) -> VerifierClient:
    return VerifierClient(f"127.0.0.1:{port}", **options)


async def test_a_verifier_that_goes_is_waited_for_until_it_is_back_or_the_caller_gives_up() -> None:
    failed, port = list[str](), free_port()
    async with ScriptedVerifier().serving(port=port):
        client = client_of(port, on_failed_try=failed.append)
        await client.__aenter__()
        assert len(await client.verify(items(["a"]))) == 1
    try:
        waiting, leaving = (asyncio.create_task(client.verify(items(["b", "c"]))) for _ in range(2))
        await until(lambda: len(failed) >= 4)
        assert set(failed) == {"UNAVAILABLE"}
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        async with asyncio.timeout(START_S), ScriptedVerifier().serving(port=port):
            assert [outcome.sequence_id for outcome in await waiting] == ["g.0", "g.1"]
    finally:
        await client.__aexit__(None, None, None)


BUSY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)


@pytest.mark.parametrize(
    ("script", "tries", "refused"),
    [
        *(([code] * 6, 6, False) for code in BUSY),
        *(([code] * 5, 1, True) for code in REFUSALS),
        ([grpc.StatusCode.INTERNAL] * 5, 3, True),
    ],
)
async def test_a_busy_or_leaving_verifier_is_asked_until_it_answers(script: list[Any], tries: int, refused: bool) -> None:
    servicer, failed = ScriptedVerifier(*script), list[str]()
    async with servicer.serving() as port, client_of(port, on_failed_try=failed.append) as client:
        if refused:
            said = f"127.0.0.1:{port} refused a batch: {script[0].name}: as the script says"
            with pytest.raises(ServiceError, match=said):
                await client.verify(items(["a"]))
        else:
            assert len(await client.verify(items(["a"]))) == 1
    assert servicer.calls == tries + (not refused)
    assert failed == [code.name for code in script[:tries]]


async def test_a_verifier_that_is_late_gets_twice_as_long_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s and 0.2 s are too short for it, 0.4 s may be enough; on a busy machine it is a later one."""
    monkeypatch.setattr(verification, "DEADLINE_S", 0.1)
    failed = list[str]()
    async with ScriptedVerifier(*[0.35] * 9).serving() as port, client_of(port, on_failed_try=failed.append) as client:
        assert len(await client.verify(items(["a"]))) == 1
    assert set(failed) == {"DEADLINE_EXCEEDED"}
    assert len(failed) >= 2


def response(*results: tuple[str, int, float]) -> verifier_pb2.VerifyResponse:
    given = [VerifyResult(sequence_id=name, status=code, reward=value) for name, code, value in results]
    return verifier_pb2.VerifyResponse(results=given)


@pytest.mark.parametrize(
    "answer",
    [response(), response(("g.1", 1, 0.0), ("g.0", 1, 0.0)), response(("g.0", 1, 0.0), ("g.1", 0, 0.0))],
    ids=["too few", "out of order", "no status"],
)
async def test_an_answer_that_does_not_fit_is_an_error(answer: verifier_pb2.VerifyResponse) -> None:
    async with ScriptedVerifier(answer).serving() as port, client_of(port) as client:
        with pytest.raises(MessageError, match="Verify"):
            await client.verify(items(["a", "b"]))


async def test_a_reward_that_is_not_finite_never_counts() -> None:
    answer = response(("g.0", verifier_pb2.VERIFY_STATUS_OK, float("nan")))
    async with ScriptedVerifier(answer).serving() as port, client_of(port) as client:
        (outcome,) = await client.verify(items(["a"]))
    assert (status_name(outcome.status), outcome.reward) == ("bad_reward", 0.0)


class NameServer(asyncio.DatagramProtocol):
    """Answers every question with `addresses`, as a headless Service's DNS does with the ready pods."""

    addresses: tuple[str, ...] = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, question: bytes, sender: tuple[str, int]) -> None:
        end = question.index(b"\0", 12) + 5  # of the name, and of the type and class after it
        (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
        known = self.addresses if kind == 1 else ()  # A records only
        header = question[:2] + struct.pack("!HHHHH", 0x8180, 1, len(known), 0, 0)
        records = [struct.pack("!HHHIH", 0xC00C, 1, 1, 1, 4) + socket.inet_aton(address) for address in known]
        self._transport.sendto(header + question[12:end] + b"".join(records), sender)


async def calls_until_all_answer(client: VerifierClient, *verifiers: ScriptedVerifier) -> None:
    before = [one.calls for one in verifiers]
    async with asyncio.timeout(60):
        while any(one.calls == calls for one, calls in zip(verifiers, before, strict=True)):
            await client.verify([ITEM])


async def test_calls_reach_addresses_that_are_added_to_a_name_and_go_on_when_one_dies_or_all_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with `kubectl scale deployment/pipelinerl-verifier`: nothing fails, so only a connection's age makes gRPC look."""
    often = {**dict(verification.CHANNEL_OPTIONS), "grpc.dns_min_time_between_resolutions_ms": 100}
    monkeypatch.setattr(verification, "CHANNEL_OPTIONS", tuple(often.items()))
    port, loop, (first, second, third) = free_port(), asyncio.get_running_loop(), (ScriptedVerifier() for _ in range(3))
    transport, names = await loop.create_datagram_endpoint(NameServer, ("127.0.0.1", 0))
    dns_port = transport.get_extra_info("sockname")[1]
    async with VerifierClient(f"dns://127.0.0.1:{dns_port}/verifier.test:{port}") as client:
        names.addresses = ("127.0.0.2",)
        async with first.serving("127.0.0.2", port, connection_age_s=0.3):
            async with second.serving("127.0.0.3", port, connection_age_s=0.3):
                await calls_until_all_answer(client, first)
                assert second.calls == 0
                names.addresses = ("127.0.0.2", "127.0.0.3")
                await calls_until_all_answer(client, first, second)
            async with asyncio.timeout(60):
                for _ in range(20):
                    await client.verify([ITEM])
        names.addresses = ("127.0.0.4",)
        async with third.serving("127.0.0.4", port):
            await calls_until_all_answer(client, third)
    transport.close()


async def test_a_slow_item_does_not_hold_up_another_batch(tmp_path: Path) -> None:
    """One worker is busy until the other one has scored the batches."""
    async with serving(tmp_path, recipe(timeout_s=START_S), workers=2) as address, VerifierClient(address.grpc) as client:
        slow = asyncio.create_task(client.verify(items([f"wait_for {tmp_path}/scored"])))
        batches = [[f"say {100 * batch + index}" for index in range(20)] for batch in range(5)]
        scored = await asyncio.gather(*(client.verify(items(batch)) for batch in batches))
        assert not slow.done()
        (tmp_path / "scored").touch()
        assert (await slow)[0].status == VERIFY_STATUS_OK
    rewards = [[outcome.reward for outcome in batch] for batch in scored]
    assert rewards == [[100.0 * batch + index for index in range(20)] for batch in range(5)]
