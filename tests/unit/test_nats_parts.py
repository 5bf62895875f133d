"""Parts of the bus without a server: addresses without logins."""

import pytest

from pipelinerl.bus.link import redacted


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
        ("user:sec@ret://x@host", "***@host"),
    ],
)
def test_no_part_of_a_login_is_shown(urls: str, shown: str) -> None:
    assert redacted(urls) == shown
