"""What the users of a run may not do, and how they learn of it: against a real nats-server with the lists of `permissions`."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, StreamConfig

from benchmarks.nats_server import NatsServer, delete_streams
from pipelinerl.bus import jetstream
from pipelinerl.bus.jetstream import Bus
from pipelinerl.bus.permissions import ACTOR, ADMIN, TRAINER, authorization, permissions
from pipelinerl.bus.protocol import FROM_TRAINER, Subjects
from pipelinerl.errors import BusError, FieldError, NotPermitted
from pipelinerl.messages.sequences import decode_group, encode_group
from pipelinerl.v1.control_pb2 import Registration
from services.actor.app import Heartbeat
from services.actor.hand_over import HeldGroups
from services.actor.weight_sync.updates import ServingGate
from tests.support.guarded_nats import PASSWORDS, guarded, reload
from tests.support.machine import until_logged
from tests.unit.builders import make_group

RUN = "demo"
SUBJECTS = Subjects(RUN)
REQUEST_TIMEOUT_S = 600.0
"""Longer than a test may take: a refusal that became a time-out would fail it."""
SOON_S = 120.0
PULL = "$JS.API.CONSUMER.MSG.NEXT.SEQUENCES_demo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[NatsServer]:
    with guarded(folder, RUN) as server:
        asyncio.run(_create_streams(server, folder))
        yield server


async def _create_streams(server: NatsServer, folder: Path) -> None:
    async with user_of(server, folder, TRAINER) as bus:
        await bus.create_streams()


@asynccontextmanager
async def user_of(server: NatsServer, folder: Path, user: str) -> AsyncIterator[Bus]:
    async with jetstream.connect(server.url, RUN, credentials=folder / user, request_timeout_s=REQUEST_TIMEOUT_S) as bus:
        yield bus


@asynccontextmanager
async def client_of(server: NatsServer, user: str, password: str = "") -> AsyncIterator[tuple[Client, list[str]]]:
    """nats-py as it is, for what the bus never does, and its errors."""
    errors: list[str] = []

    async def keep(error: Exception) -> None:
        errors.append(str(error))

    login = {"user": user, "password": password or PASSWORDS[user], "inbox_prefix": f"_INBOX_{user}"}
    async with await nats.connect(server.url, error_cb=keep, **login) as client:
        yield client, errors


async def settled(client: Client) -> None:
    """Returns when the server has dealt with all that was sent; a ping of nats-py may overtake what was sent before it."""
    for _ in range(2):
        await client.flush()


async def refused(call: Awaitable[object]) -> NotPermitted:
    with pytest.raises(NotPermitted) as caught:
        async with asyncio.timeout(SOON_S):
            await call
    return caught.value


@pytest.mark.parametrize("kind", FROM_TRAINER)
async def test_an_actor_gives_no_orders(server: NatsServer, folder: Path, kind: str) -> None:
    async with user_of(server, folder, ACTOR) as bus:
        error = await refused(bus.publish_control(kind, b"forged"))
        assert (error.user, error.subject) == ("actor", f"demo.control.{kind}")
        assert "NATS user 'actor' may not publish to demo.control." in str(error)
        if kind == "commit":
            await refused(bus.publish_control(kind, b"forged", "actor-1"))
        await bus.publish_control("serving", b"an answer", "actor-1")  # the connection goes on


FORBIDDEN: dict[str, Callable[[Bus], Awaitable[object]]] = {
    "$JS.API.STREAM.DELETE.PROMPTS_demo": delete_streams,
    "$JS.API.CONSUMER.CREATE.KV_members-demo": lambda bus: _first(bus.watch_members()),
    "$JS.API.CONSUMER.CREATE.SEQUENCES_demo": lambda bus: _first(bus.read_sequences(1)),
    "$JS.API.STREAM.PURGE.SEQUENCES_demo": lambda bus: bus.purge_sequences(2),
    "$JS.API.STREAM.UPDATE.CONTROL_demo": lambda bus: bus.connection.js.update_stream(StreamConfig(name="CONTROL_demo")),
    "$JS.API.STREAM.MSG.DELETE.SEQUENCES_demo": lambda bus: bus.connection.js.delete_msg("SEQUENCES_demo", 1),
    "$JS.API.STREAM.MSG.GET.PROMPTS_demo": lambda bus: bus.connection.js.get_msg("PROMPTS_demo", 1),
    "$JS.API.DIRECT.GET.PROMPTS_demo": lambda bus: bus.connection.js.get_msg("PROMPTS_demo", 1, direct=True),
    "$JS.API.CONSUMER.CREATE.PROMPTS_demo": lambda bus: bus.connection.js.add_consumer("PROMPTS_demo", ConsumerConfig()),
    "$O.weights-demo.C.x": lambda bus: bus.connection.js.publish("$O.weights-demo.C.x", b"forged weights"),
    "$JS.API.STREAM.PURGE.OBJ_weights-demo": lambda bus: bus.connection.js.purge_stream("OBJ_weights-demo"),
    "$JS.API.STREAM.CREATE.OTHER": lambda bus: bus.connection.js.add_stream(StreamConfig(name="OTHER", subjects=["x"])),
}


async def _first(entering: object) -> None:
    async with entering as items:  # type: ignore[attr-defined]
        await anext(items)


@pytest.mark.parametrize("subject", FORBIDDEN)
async def test_an_actor_changes_no_stream_and_reads_only_what_is_for_it(server: NatsServer, folder: Path, subject: str) -> None:
    async with user_of(server, folder, ACTOR) as bus:
        assert (await refused(FORBIDDEN[subject](bus))).subject == subject


@pytest.mark.parametrize(
    "subject",
    [
        *("demo.prompts", "demo.>", "demo.sequences", ">", "$JS.ACK.PROMPTS_demo.actors.>"),
        *("_INBOX_trainer.>", "_INBOX.>", "$JS.EVENT.>"),  # what others are answered
    ],
)
async def test_an_actor_overhears_nothing(server: NatsServer, subject: str) -> None:
    async with client_of(server, ACTOR) as (client, errors):
        await client.subscribe(subject)
        await settled(client)
    assert any(f'permissions violation for subscription to "{subject.lower()}"' in error.lower() for error in errors), errors


async def test_the_trainer_publishes_in_no_actors_name_and_deletes_no_orders(server: NatsServer, folder: Path) -> None:
    async with user_of(server, folder, TRAINER) as bus:
        for call, subject in (
            (bus.publish_sequence(b"forged", "s1"), "demo.sequences"),
            (bus.publish_control("serving", b"forged", "actor-1"), "demo.control.serving.actor-1"),
            (bus.put_member("actor-1", b"forged"), "$KV.members-demo.actor-1"),
            (bus.next_prompt(REQUEST_TIMEOUT_S), "$JS.API.CONSUMER.MSG.NEXT.PROMPTS_demo.actors"),
            (bus.connection.js.delete_stream("CONTROL_demo"), "$JS.API.STREAM.DELETE.CONTROL_demo"),
        ):
            error = await refused(call)
            assert (error.user, error.subject) == ("trainer", subject)


async def _beats(bus: Bus) -> None:
    await Heartbeat(bus, ServingGate(None), lambda: "", Registration(actor="actor-1", process="p1")).run()


async def _acknowledges(bus: Bus) -> None:
    held, delivery = HeldGroups(), await bus.next_prompt(SOON_S)
    group = decode_group(delivery.payload, expected_run=RUN)
    held.take(group, delivery)
    await held.acknowledge(group.group_id)


@pytest.mark.parametrize(
    ("user", "missing", "subject", "does"),
    [
        (ACTOR, "$KV.members-demo.*", "$KV.members-demo.actor-1", _beats),
        (ACTOR, "$JS.ACK.PROMPTS_demo.actors.>", "$JS.ACK.PROMPTS_demo.actors.1.", _acknowledges),
        (TRAINER, f"{PULL}.*", PULL, lambda bus: _first(bus.read_sequences(1))),  # it may make its consumer
    ],
)
async def test_what_a_user_does_again_and_again_ends_it_where_it_is_not_permitted(
    tmp_path: Path, user: str, missing: str, subject: str, does: Callable[[Bus], Awaitable[None]]
) -> None:
    short = authorization(RUN, PASSWORDS)
    short["users"][user == ACTOR]["permissions"]["publish"].remove(missing)
    with guarded(tmp_path, RUN, authorization=short) as server:
        async with user_of(server, tmp_path, TRAINER) as bus:
            await bus.create_streams()
            done = make_group(run=RUN, done_samples=(0, 1))
            await bus.publish_prompt(encode_group(done), done.group_id)
        async with user_of(server, tmp_path, user) as bus:
            error = await refused(does(bus))
    assert (error.user, error.subject[: len(subject)]) == (user, subject)
    assert "python -m pipelinerl.bus.permissions RUN" in str(error)


async def test_a_user_without_its_inbox_is_told_when_it_connects(tmp_path: Path) -> None:
    """People who bring their own NATS may have given `_INBOX.>`."""
    theirs = authorization(RUN, PASSWORDS)
    theirs["users"][1]["permissions"]["subscribe"] = ["_INBOX.>"]
    told = pytest.raises(NotPermitted, match=r"user 'actor' may not subscribe to _INBOX_actor\.\w+\.\*")
    with guarded(tmp_path, RUN, authorization=theirs) as server, told:
        async with user_of(server, tmp_path, ACTOR):
            pass


async def test_answers_sent_elsewhere_neither_delete_nor_acknowledge(server: NatsServer) -> None:
    """NATS does not check where a client asks the answer to: what an actor that was taken over can do with that.

    The server's answers and deliveries do not act on the API, and no content of its choice gets onto an order's subject.
    """
    async with client_of(server, ACTOR) as (actor, errors), client_of(server, ADMIN) as (person, _):
        stored, js = actor.jetstream(), person.jetstream()
        await stored.publish(SUBJECTS.sequences, b"a sequence")
        kept = (await js.stream_info("SEQUENCES_demo")).state.messages
        serving = SUBJECTS.control("serving", "a")
        for subject in ("$JS.API.STREAM.PURGE.SEQUENCES_demo", "$JS.API.STREAM.DELETE.SEQUENCES_demo"):
            await stored.publish(SUBJECTS.prompts, b"")
            await actor.publish("$JS.API.CONSUMER.MSG.NEXT.PROMPTS_demo.actors", b"1", reply=subject)
            await stored.publish(serving, b"{}")
            config = {"deliver_subject": subject, "deliver_policy": "all", "filter_subject": serving}
            question = {"stream_name": "CONTROL_demo", "config": {"ack_policy": "none", **config}}
            await actor.request("$JS.API.CONSUMER.CREATE.CONTROL_demo", json.dumps(question).encode(), timeout=60)
        commit = SUBJECTS.control("commit")
        await stored.publish(SUBJECTS.prompts, b"forged")
        await actor.publish("$JS.API.CONSUMER.MSG.NEXT.PROMPTS_demo.actors", b"1", reply=commit)
        await actor.publish(SUBJECTS.dead, b"", reply="$JS.ACK.PROMPTS_demo.actors.1.1.1.1.0")
        await settled(actor)
        await stored.publish(SUBJECTS.sequences, b"the last")  # in order after all of that
        assert (await js.stream_info("SEQUENCES_demo")).state.messages == kept + 1
        info = await js.stream_info("CONTROL_demo", subjects_filter=">")
        assert commit not in (info.state.subjects or {})
    assert any("with reply of" in error for error in errors)


async def test_runs_that_share_a_server_cannot_touch_each_other(tmp_path: Path) -> None:
    """Each run works with its own users; those of another run can neither speak, read nor change anything in it."""
    passwords = {user: f"{user}-secret" for user in permissions("one", "two")}
    for user, password in passwords.items():
        (tmp_path / user).write_text(f"{user}:{password}\n")

    def bus_of(user: str, run: str) -> AbstractAsyncContextManager[Bus]:
        return jetstream.connect(server.url, run, credentials=tmp_path / user, request_timeout_s=REQUEST_TIMEOUT_S)

    with guarded(tmp_path, RUN, authorization=authorization(("one", "two"), passwords)) as server:
        for run in ("one", "two"):
            async with bus_of(f"{run}-trainer", run) as trainer, bus_of(f"{run}-actor", run) as actor:
                await trainer.create_streams()
                assert await trainer.publish_prompt(b"a prompt", "g1") == 1
                delivery = await actor.next_prompt(SOON_S)
                assert delivery.payload == b"a prompt"
                await actor.publish_sequence(b"a sequence", "s1")
        async with bus_of("one-trainer", "two") as intruder:
            calls = (intruder.publish_prompt(b"x", "g2"), intruder.publish_control("commit", b"x"), intruder.create_streams())
            for call in (*calls, intruder.purge_sequences(2), _first(intruder.read_sequences(1)), intruder.prompts_info()):
                assert (await refused(call)).user == "one-trainer"
        async with bus_of("one-actor", "two") as intruder:
            calls = (intruder.publish_sequence(b"x", "s2"), intruder.publish_control("serving", b"x", "actor-1"))
            for call in (*calls, intruder.next_prompt(REQUEST_TIMEOUT_S), intruder.put_member("actor-1", b"x")):
                assert (await refused(call)).user == "one-actor"
        async with client_of(server, "one-trainer", passwords["one-trainer"]) as (client, errors):
            overheard = ("_INBOX_two-trainer.>", "two.>", "_INBOX_one-trainer-actor.>")
            for subject in overheard:
                await client.subscribe(subject)
            await settled(client)
        assert [any(subject.lower() in error.lower() for error in errors) for subject in overheard] == [True] * 3


async def test_a_wrong_password_is_refused_unshown(server: NatsServer, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = folder / "wrong"
    wrong.write_text("actor:guessed-secret")
    with pytest.raises(BusError, match=r"refuses the login of user 'actor': .*check nats_credentials"):
        async with (
            asyncio.timeout(SOON_S),
            jetstream.connect(server.url, RUN, credentials=wrong, connect_timeout_s=REQUEST_TIMEOUT_S),
        ):
            pass
    wrong.write_text("just words")
    for unusable in (wrong, folder / "absent"):
        with pytest.raises(FieldError, match="nats_credentials"):
            async with jetstream.connect(server.url, RUN, credentials=unusable):
                pass
    async with user_of(server, folder, ACTOR) as bus:
        await refused(bus.publish_control("commit", b"x"))
        assert "secret" not in repr(bus.connection)
    assert "secret" not in caplog.text


async def test_a_changed_password_is_used_for_the_next_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server ends connections whose password no longer holds. nats-py alone would never connect again."""
    caplog.set_level(logging.INFO)

    with guarded(tmp_path, RUN) as server:
        async with user_of(server, tmp_path, TRAINER) as bus:
            await bus.create_streams()
            assert await bus.publish_prompt(b"1", "g1") == 1
            (tmp_path / TRAINER).write_text("trainer:rotated-secret")
            server.extra = {"authorization": authorization(RUN, {**PASSWORDS, TRAINER: "rotated-secret"})}
            reload(server)
            await until_logged(caplog, "reconnected")
            assert await bus.publish_prompt(b"2", "g2") == 2
            caplog.clear()
            server.extra = {"authorization": authorization(RUN, PASSWORDS)}
            reload(server)  # before the file: as it is while a Secret takes its minute to reach the pod
            await until_logged(caplog, "Authorization Violation")
            (tmp_path / TRAINER).write_text("half written")
            await until_logged(caplog, "cannot read the NATS credentials; logging in with the previous ones")
            assert not bus.connection.is_connected
            (tmp_path / TRAINER).write_text(f"trainer:{PASSWORDS[TRAINER]}")
            await until_logged(caplog, "reconnected")
            assert await bus.publish_prompt(b"3", "g3") == 3
    assert "secret" not in caplog.text


async def test_a_user_whose_inbox_is_taken_away_later_is_told_at_its_next_call(tmp_path: Path) -> None:
    with guarded(tmp_path, RUN) as server:
        async with user_of(server, tmp_path, TRAINER) as bus:
            await bus.create_streams()
            theirs = authorization(RUN, PASSWORDS)
            theirs["users"][0]["permissions"]["subscribe"] = ["_INBOX.>"]
            server.extra = {"authorization": theirs}
            reload(server)

            async def publish_on() -> None:
                for number in range(1_000_000):
                    await bus.publish_prompt(b"1", f"g{number}")

            error = await refused(publish_on())
            assert (error.user, error.action, error.subject[:15]) == ("trainer", "subscribe", "_INBOX_trainer.")
            await refused(bus.prompts_info())
