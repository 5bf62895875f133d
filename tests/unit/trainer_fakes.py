"""Stand-ins for what the trainer talks to (actors over gRPC, verifier, compute side, weight updater), and a run of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from pipelinerl.audit.journal import JOURNAL, Journal
from pipelinerl.bus.protocol import StreamInfo, StreamLimits
from pipelinerl.messages import sequences as messages
from pipelinerl.messages.sequences import FinishReason, PolicyVersion, PromptGroup, decode_group, encode_sequence
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.groups import IssueRoom
from pipelinerl.rl.ledger import Outcome, SequenceTracker
from pipelinerl.run_summary import RunFiles
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import TrainerSettings
from pipelinerl.transfer.manifest import build_manifest
from pipelinerl.v1 import actor_pb2, actor_pb2_grpc
from services.trainer.checkpoint.run_state import RunState, Start
from services.trainer.data.intake import HeldSequences
from services.trainer.learn.batch import TrainingGroup
from services.trainer.reporting.metrics import RunView, TrainerMetrics
from services.trainer.reporting.page import PageBoard
from services.trainer.reporting.recorder import Recorder
from services.trainer.reporting.trackers import RunTrackers
from services.trainer.run import TrainingRun
from services.trainer.weight_sync.membership import LogReaders
from services.trainer.weight_sync.updater import WeightUpdater
from services.trainer.world import HEARTBEAT
from tests.support.memory_bus import MemoryBus, MemoryServer
from tests.unit.builders import RUN, make_group, make_recipe, make_sequence


@dataclass
class FakeActor(actor_pb2_grpc.ActorServiceServicer):
    """Answers each group with a token of `version`. A group's name is its id up to the dash. An answer earns 1, or what `terms`
    say; a name in `failures` fails, and one that is `silent` is never answered. One that is `frozen` does not say how it is."""

    version: int = 0
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    silent: frozenset[str] = frozenset()
    logprobs: Sequence[float] = (-1.0, -2.0)
    loader: str = ""
    frozen: bool = False
    requests: list[list[PromptGroup]] = field(default_factory=list)

    async def GetState(self, request: Any, context: Any) -> actor_pb2.ActorState:
        if self.frozen:
            await asyncio.sleep(600)
        return actor_pb2.ActorState(sequences_in_progress=3)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[actor_pb2.GenerateResult]:
        self.requests.append(groups := [decode_group(data, expected_run=RUN) for data in request.groups])
        names = {group.group_id.partition("-")[0]: group for group in groups}
        for name, group in names.items():
            if name not in self.silent:
                terms, failure = self.terms.get(name, {"answer": 1.0}), self.failures.get(name, "")
                answer = make_sequence(group, 0, completion=(1,), version=self.version, failure=failure)
                earned = {} if failure else {"reward": sum(terms.values()), "reward_components": dict(terms)}
                answer = replace(answer, finish_reason=FinishReason.LENGTH, **earned)
                yield actor_pb2.GenerateResult(sequence=encode_sequence(answer))
        if self.silent & names.keys():
            await asyncio.sleep(600)

    async def Score(self, request: Any, context: Any) -> actor_pb2.ScoreResponse:
        logprobs = np.array(self.logprobs, dtype=np.float32).tobytes()
        return actor_pb2.ScoreResponse(logprobs=logprobs, policy_version=self.version, incarnation=1, loader=self.loader)


@asynccontextmanager
async def serving(**actors: FakeActor) -> AsyncIterator[dict[str, str]]:
    async with AsyncExitStack() as stack:
        addresses = {}
        for name, actor in actors.items():
            server = grpc.aio.server()
            actor_pb2_grpc.add_ActorServiceServicer_to_server(actor, server)
            addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield addresses


def step_figures(skipped: str = "") -> dict[str, Any]:
    tokens = 0 if skipped else 8
    return {
        "clipped": not skipped,
        "skipped": skipped,
        "ess": 0.9,
        "mismatch_kl": 0.01,
        "sequences_trained": 0 if skipped else 4,
        "tokens_trained": tokens,
        "tokens_computed": 10,
        "tokens_per_s": {"trained": tokens / 0.1, "computed": 100.0},
        "mfu": 0.4,
        "memory_peak_gib": 1.5,
        "imbalance": 0.05,
        "compute_s": {"forward_backward": 0.07, "optimizer": 0.03},
        "lag_histogram": {} if skipped else {0: tokens},
        "largest_lag": 1,
        "held_by_max_lag": True,
    }


def tensors_of(version: int) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(f'{{"version": {version}}}')


class FakeTokenizer:
    """Every prompt is the same three tokens; token 4 is `e`."""

    chat_template = None
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1, 2, 3]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


class FakeSnapshot(str):
    def sha256(self) -> bytes:
        return f"digest of {self}".encode()


class FakePolicy:
    """The compute side. `calls` says what ran, on which thread; a step waits for `may_step`."""

    def __init__(self, run_dir: Path = Path("nowhere")) -> None:
        self.run_dir, self.skipped = run_dir, ""
        self.calls: list[str] = []
        self.planned: list[int] = []
        self.prepared_ahead = threading.Event()
        self.threads: set[str] = set()
        self.stepping, self.may_step = threading.Event(), threading.Event()
        self.may_step.set()
        self.version = 0
        self.learner = self
        self.vocab_size = 20
        self.sender = FakeSender()
        self.checkpoint_saw_summary: list[bool] = []

    tokenizer = FakeTokenizer()
    num_ranks = 1

    def prepare(self, groups: object, version: int) -> int:
        self.planned.append(version)
        if version > self.version:
            self.prepared_ahead.set()
        return version

    def step(self, prepared: int) -> dict[str, Any]:
        version = prepared
        self._call(f"step {version}")
        self.stepping.set()
        self.may_step.wait(60)
        self.version = version + 1
        return step_figures(self.skipped)

    def snapshot(self, version: PolicyVersion) -> object:
        self._call(f"snapshot {version.number}")
        return FakeSnapshot(f"snapshot {version.number}")

    def leave_gpu(self) -> None:
        self._call("leave the GPU")

    def score(self, token_ids: object, *, adapters: bool = True) -> np.ndarray:
        self._call("score")
        return np.array([-1.0, -2.0], dtype=np.float32)

    def begin_checkpoint(self, version: int) -> Callable[[Path], object]:
        assert version == self.version, "tensors of another version than the rest of the checkpoint"
        self._call(f"checkpoint {version}")
        self.checkpoint_saw_summary.append((self.run_dir / "summary.json").exists())
        return tensors_of(version)

    def order(self, kind: str) -> None:
        self._call({HEARTBEAT: "heartbeat"}[kind])

    def end(self) -> None:
        self._call("end")

    def _call(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name.partition("_")[0])


class FakeSender:
    """A `WeightSender` that no actor ever needs."""

    manifest = build_manifest([("w", (4,), "float32")])


def run_view(version: int = 3, tracker: SequenceTracker | None = None, **streams: StreamInfo) -> RunView:
    """A run of four actors in epoch 2, before the first version is served."""
    parts = {
        "updater": {"served_version": -1, "epoch": 2, "evictions": 0, "bad_messages": 1, "members": (), "serving": ()},
        "feeder": {"room": IssueRoom(0, 5, False, 7, 12), "refused": {}},
        "intake": {"tokens_arrived_here": 12, "position": 7, "bad_messages": 0, "failures": {}, "ready": [()] * 3},
        "uploads": {"waiting_s": None, "last": {}},
        "checkpoints": {"positions": {2: 5, 4: 7}, "saved_at_s": 9100.0},
    }
    view: Any = {name: SimpleNamespace(**attributes) for name, attributes in parts.items()}
    view["updater"].log, view["updater"].regroups, view["updater"].updates = None, 3, {"served": 6, "aborted": 2}
    view["updater"].states = {f"actor-{number}": "serving" for number in range(4)}
    view["updater"].versions = {}
    view["feeder"].tracker, view["feeder"].bounds = tracker or SequenceTracker(), SimpleNamespace(holds_actors_back=True)
    view["intake"].quarantine = SimpleNamespace(actors={"actor-9"})
    return RunView(version=version, waiting_for="", streams=streams, **view)


class FakeUpdater:
    """Everything offered is served by `members`, at once or when no measurement holds it any more."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.members: dict[str, Any] = {}
        self.served_version = -1
        self.num_present = 1
        self.bad_messages = self.evictions = self.epoch = self.regroups = 0
        self.updates: dict[str, int] = {}
        self.states: dict[str, str] = {}
        self.versions: dict[str, int] = {}
        self.readers = LogReaders()
        self.offered: list[int] = []
        self._free = asyncio.Event()
        self._free.set()

    @property
    def commit_held(self) -> bool:
        return self.offered[-1] > self.served_version

    @property
    def serving(self) -> dict[str, Any]:
        return self.members

    def serve(self, addresses: Mapping[str, str]) -> None:
        self.members = {name: SimpleNamespace(grpc_address=address) for name, address in addresses.items()}

    async def offer(self, version: int, snapshot: object) -> None:
        await self.all_served()
        self.offered.append(version)
        if self._free.is_set():
            self.served_version = version

    async def all_served(self) -> None:
        if self.offered and self.commit_held:
            await self._free.wait()

    @asynccontextmanager
    async def hold_when_served(self, version: int) -> AsyncIterator[None]:
        self._free.clear()
        try:
            yield
        finally:
            self.served_version = self.offered[-1]
            self._free.set()


def make_run_state(version: int, tracker: SequenceTracker, **fields: Any) -> RunState:
    defaults: dict[str, Any] = {
        "run": RUN,
        "policy_version": version,
        "recipe": make_recipe().model_dump(mode="json"),
        "journal_bytes": 0,
        "tracker": tracker.to_state(),
        "next_group": 0,
        "position": 0,
        "held": HeldSequences(),
    }
    return RunState(**{**defaults, **fields})


# --- a whole run without actors -----------------------------------------------------------------------------------------

TASK = {"name": "chain_sum", "prompt_style": "compact", "heldout_problems": 2}


class Tracked:
    """A tracker that takes its calls at once."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[str, int, list[Any]]] = []
        self.finished: bool | None = None

    def send(self, call: Callable[[Tracked], None]) -> None:
        call(self)

    def log(self, axis: str, position: int, time_s: float, figures: dict[str, float]) -> None:
        self.points.append((position, figures))

    def log_samples(self, axis: str, position: int, rows: list[Any]) -> None:
        self.tables.append((axis, position, rows))

    def end(self, call_or_step: Any, figures: Any = None, *, finished: bool | None = None) -> None:
        if finished is None:
            call_or_step(self)
        else:
            self.points.append((call_or_step, figures))
            self.finished = finished


def make_run(
    stack: ExitStack | AsyncExitStack,
    run_dir: Path,
    bus: MemoryBus,
    recipe: Recipe,
    start: Start | None = None,
    *,
    board: PageBoard | None = None,
    updater: type = FakeUpdater,
    policy: FakePolicy | None = None,
    **settings: Any,
) -> TrainingRun:
    """A run that has not begun. Its files are open as long as `stack`; `start`: that of a new run when None."""
    start, policy = start or Start(), policy or FakePolicy(run_dir)
    given = TrainerSettings(run=RUN, recipe=run_dir / "recipe.yaml", instance="trainer", run_dir=run_dir, **settings)
    files, journal = stack.enter_context(RunFiles(run_dir)), stack.enter_context(Journal(run_dir / JOURNAL))
    policy.version = start.version
    recorder = Recorder(
        recipe,
        files,
        TrainerMetrics(CollectorRegistry()),
        board=board,
        trackers=RunTrackers([Tracked()]),  # type: ignore[list-item]
        context=LogContext(RUN, "trainer", "trainer"),
        start=start,
        tokenizer=policy.tokenizer,  # type: ignore[arg-type]
    )
    with patch("services.trainer.run.WeightUpdater", updater):
        return TrainingRun(given, recipe, cast("Any", policy), bus, journal, start, recorder)


@asynccontextmanager
async def training_run(
    run_dir: Path,
    *,
    start: Start | None = None,
    board: PageBoard | None = None,
    updater: type = WeightUpdater,
    settings: Mapping[str, Any] = MappingProxyType({}),
    **sections: object,
) -> AsyncIterator[tuple[TrainingRun, FakePolicy]]:
    """A run of no actors that has not begun; `sections` of its recipe."""
    async with MemoryBus(RUN) as bus, AsyncExitStack() as stack:
        recipe = make_recipe(**{"task": TASK, **sections})
        policy = FakePolicy(run_dir)
        run = make_run(stack, run_dir, bus, recipe, start, board=board, updater=updater, policy=policy, **settings)
        try:
            yield run, policy
        finally:
            policy.may_step.set()
            run.loop.close()


async def stop_during_step(run: TrainingRun, policy: FakePolicy) -> asyncio.Task[None]:
    """The run, stopped in its second step, while that step is on the compute thread."""
    run.loop.version = policy.version = 1
    policy.may_step.clear()
    stop = asyncio.Event()

    async def batch(version: int) -> list[TrainingGroup]:
        return [ready_group(run, 900 + version)]  # not one that the feeder issues

    async def no_wait() -> None:
        return

    run.intake.take_batch = batch  # type: ignore[method-assign]
    run.loop.run = run.loop._step  # type: ignore[method-assign]
    run._wait_for_actors = no_wait  # type: ignore[method-assign]
    running = asyncio.create_task(run.run(stop))
    await asyncio.to_thread(policy.stepping.wait, 60)
    stop.set()
    return running


def ready_group(run: TrainingRun, number: int) -> TrainingGroup:
    """Both samples of a group that is issued here, ready to be trained on."""
    group = make_group(number)
    run.tracker.issue(group)
    return TrainingGroup((make_sequence(group, 0), make_sequence(group, 1)), np.array([0.5, -0.5]))


# --- its feeder and its intake at work ------------------------------------------------------------------------------------


class Desk:
    """Feeder, intake and tracker of a run, whose actors are played by the test."""

    def __init__(self, run: TrainingRun, bus: MemoryBus) -> None:
        self.run, self.bus = run, bus
        self.tracker, self.feeder, self.intake = run.tracker, run.feeder, run.intake
        self.updater: Any = run.updater
        self.updater.served_version = 0

    def serve(self, version: int, *, num_actors: int = 1) -> None:
        self.updater.served_version, self.updater.num_present = version, num_actors
        self.feeder.look_again()

    async def take_issued(self) -> list[PromptGroup]:
        groups = []
        while self.feeder.room.allowance > 0 or (await self.bus.prompts_info()).messages:
            delivery = await self.bus.next_prompt(timeout_s=1.0)
            if delivery is not None:
                groups.append(decode_group(delivery.payload, expected_run=RUN))
                await delivery.ack()
        return groups

    async def answer(self, group: PromptGroup, rewards: tuple[float, ...] = (1.0, 0.0), version: int = 0) -> None:
        for index, reward in enumerate(rewards):
            await self.publish(make_sequence(group, index, reward=reward, version=version))

    async def publish(self, sequence: messages.Sequence, message_id: str | None = None) -> None:
        await self.bus.publish_sequence(encode_sequence(sequence), message_id or sequence.sequence_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0)

    async def until_lost(self) -> None:
        await self.until(lambda: self.tracker.lost_groups > 0)

    def failed(self) -> dict[str, int]:
        return self.tracker.ledger.reasons(Outcome.FAILED)


@asynccontextmanager
async def desk(
    *parts: str,
    server: MemoryServer | None = None,
    limits: StreamLimits | None = None,
    problems: Callable[[int], PromptGroup] | None = None,
    **sections: object,
) -> AsyncIterator[Desk]:
    """`parts` of a run at work, feeder and intake when none are named; `problems`: in place of the task's."""
    with TemporaryDirectory() as folder, ExitStack() as stack:
        async with MemoryBus(RUN, server=server, limits=limits) as bus, asyncio.timeout(60):
            await bus.create_streams()
            one = Desk(make_run(stack, Path(folder), bus, make_recipe(**sections)), bus)
            if problems is not None:
                one.feeder._problems = problems
            works = {"feeder": one.feeder.run, "intake": one.intake.run, "upkeep": one.run.upkeep.run}
            tasks = [asyncio.create_task(works[part]()) for part in parts or ("feeder", "intake")]
            try:
                yield one
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                one.run.loop.close()
