"""Probes as the kubelet makes them: from outside, to the pod's address, with the rendered periods and thresholds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from tests.cluster.container import NotRunning, Process
from tests.cluster.objects import ClusterError, Object, container_port


class Prober:
    """Makes the probes of one container."""

    def __init__(self, pod: Object, ip: str, process: Process) -> None:
        self._pod, self._ip, self._process = pod, ip, process

    async def verdicts(self, probe: Mapping[str, Any]) -> AsyncIterator[bool]:
        """True or False each time that a threshold is reached, again and again."""
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        passed = failed = 0
        while True:
            if await self.passes(probe):
                passed, failed = passed + 1, 0
                if passed >= probe.get("successThreshold", 1):
                    yield True
            else:
                passed, failed = 0, failed + 1
                if failed >= probe.get("failureThreshold", 3):
                    yield False
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def passes(self, action: Mapping[str, Any]) -> bool:
        """One try of a probe, or of a lifecycle handler's action."""
        timeout_s = action.get("timeoutSeconds", 1)
        with suppress(OSError, TimeoutError, NotRunning, aiohttp.ClientError):
            async with asyncio.timeout(timeout_s):
                if "httpGet" in action:
                    return await self._http(action["httpGet"])
                if "tcpSocket" in action:
                    return await self._tcp(action["tcpSocket"])
                if "exec" in action:
                    return (await self._process.execute(action["exec"]["command"], timeout_s))[0] == 0
                raise ClusterError(f"a probe of {sorted(action)} is not modelled")
        return False

    async def _http(self, get: Mapping[str, Any]) -> bool:
        scheme = get.get("scheme", "HTTP").lower()
        url = f"{scheme}://{get.get('host', self._ip)}:{container_port(self._pod, get['port'])}{get.get('path', '/')}"
        headers = {header["name"]: header["value"] for header in get.get("httpHeaders") or []}
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers, ssl=False) as response:
            return 200 <= response.status < 400

    async def _tcp(self, socket: Mapping[str, Any]) -> bool:
        port = container_port(self._pod, socket["port"])
        _, writer = await asyncio.open_connection(socket.get("host", self._ip), port)
        writer.close()
        return True


async def run_hook(hook: Mapping[str, Any], prober: Prober, timeout_s: float) -> bool:
    """A preStop or postStart handler, to its end or for `timeout_s`. False: it failed, which the kubelet only reports."""
    if "sleep" in hook:
        await asyncio.sleep(min(timeout_s, hook["sleep"]["seconds"]))
        return True
    return await prober.passes({**hook, "timeoutSeconds": timeout_s})
