"""Parts of the bus without a server: positions in reply subjects, addresses without logins."""

import pytest

from pipelinerl.bus.link import AckSubject, redacted
from pipelinerl.errors import BusError

# --- the reply subject that carries positions


def test_both_forms_of_the_reply_subject_are_read() -> None:
    old = AckSubject.parse("$JS.ACK.STREAM.CONSUMER.2.30.4.1700000000000000000.7")
    new = AckSubject.parse("$JS.ACK._.hash.STREAM.CONSUMER.2.30.4.1700000000000000000.7.random")
    assert old == new == AckSubject(2, 30, 4)


@pytest.mark.parametrize("reply", ["", "_INBOX.abc", "$JS.ACK.too.short"])
def test_other_subjects_are_no_delivery(reply: str) -> None:
    with pytest.raises(BusError):
        AckSubject.parse(reply)


# --- addresses in messages and logs


@pytest.mark.parametrize(
    ("urls", "shown"),
    [
        ("nats://host:4222", "nats://host:4222"),
        ("host:4222", "host:4222"),
        ("nats://user:secret@host:4222", "nats://***@host:4222"),
        ("nats://token@host", "nats://***@host"),
        ("user:secret@host", "***@host"),
        ("nats://user:sec@ret@host", "nats://***@host"),
        ("nats://user:sec/ret@host:4222", "nats://***@host:4222"),
        ("nats://user:sec://ret@host", "nats://***@host"),
        ("nats://user:sec,ret@host", "nats://***@host"),
        ("nats://a,nats://user:secret@b,tls://user:sec@ret@c", "nats://a,nats://***@b,tls://***@c"),
        ("nats://user:secret@a,NATS://user:sec/ret@b", "nats://***@a,NATS://***@b"),
        ("nats://user:secret@a,user:secret@b", "nats://***@b"),
    ],
)
def test_no_part_of_a_login_is_shown(urls: str, shown: str) -> None:
    assert redacted(urls) == shown
