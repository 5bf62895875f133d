"""The status code of one HTTP GET on a loopback address, for readiness. Not an HTTP client."""

from __future__ import annotations

import asyncio

from pipelinerl.service.address import split_host_port


async def http_status(address: str, path: str, timeout_s: float) -> int | None:
    """Status code of `GET http://<address><path>`; None when nobody answers in time with HTTP."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(address, path)
    except (OSError, TimeoutError, ValueError, IndexError):
        return None


async def _get(address: str, path: str) -> int:
    reader, writer = await asyncio.open_connection(*split_host_port(address))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
