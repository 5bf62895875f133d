"""Addresses as text, IPv6 included, and servers that are reached under them."""

from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI

from pipelinerl.errors import ServiceError
from pipelinerl.local.processes import http_status
from pipelinerl.service.address import host_port, split_host_port
from pipelinerl.service.http import serve_http


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("10.0.0.7", 80, "10.0.0.7:80"), ("trainer-0.trainer", 1, "trainer-0.trainer:1"), ("fd00::7", 8, "[fd00::7]:8")],
)
def test_there_and_back(host: str, port: int, text: str) -> None:
    assert host_port(host, port) == text
    assert split_host_port(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "[fd00::7]"])
def test_what_has_no_port(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        split_host_port(text)


async def test_a_server_with_an_ipv6_address_is_reached_under_its_text() -> None:
    try:
        async with serve_http(FastAPI(), "::1", 0) as port:
            assert await asyncio.to_thread(http_status, host_port("::1", port), "/", 5.0) == 404
    except ServiceError as error:
        pytest.skip(f"no IPv6 here: {error}")
