"""Keeps a run's nats-server running: one that ends is started again on its port, with its streams, a bounded number of times.

While it is away the services wait and reconnect; what they hold they keep. Says where the server is, in a file, for as long
as it runs. Does not know what the streams hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from pipelinerl.errors import ServiceError
from pipelinerl.local.nats_server import NatsServer
from pipelinerl.local.process import ServiceDied, log_tail
from pipelinerl.local.run_dir import write_json
from pipelinerl.local.supervisor import RestartsInARow
from pipelinerl.local.watch import pid_ended
from pipelinerl.service.lifecycle import EXIT_FAILURE

NAME = "nats"


class SupervisedNats:
    """`start`, then `keep`, then `stop`. `address_file`: holds `{"url": ...}`. `on_start` hears of every process's pid,
    `on_end` what is to be told of one that ended, and the seconds until the next."""

    def __init__(
        self,
        server: NatsServer,
        log: Path,
        address_file: Path,
        row: RestartsInARow,
        on_start: Callable[[int], None],
        on_end: Callable[[str, float], None],
    ) -> None:
        self._server, self._log, self._address_file, self._row = server, log, address_file, row
        self._on_start, self._on_end = on_start, on_end

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Raises `ServiceError`."""
        await self._server.__aenter__()
        self._announce()

    async def keep(self) -> None:
        """Waits for the server to end and starts it again. Raises `ServiceError` when it ended too often."""
        clock_s = asyncio.get_running_loop().time
        while True:
            started_s = clock_s()
            await pid_ended(self._server.pid)
            self._address_file.unlink(missing_ok=True)
            await self._start_again(str(self._died()), clock_s() - started_s)

    async def stop(self, grace_s: float) -> None:
        self._server.stop_timeout_s = grace_s
        await asyncio.to_thread(self._server.stop)
        self._address_file.unlink(missing_ok=True)

    async def _start_again(self, problem: str, lived_s: float) -> None:
        while True:
            delay_s = self._row.next_delay_s(lived_s, EXIT_FAILURE, served=True)
            if delay_s is None:
                tries = f"after {self._row.count - 1} restarts in a row it is given up"
                raise ServiceError(f"nats-server ended while the run went on; {tries}: {problem}")
            self._on_end(problem, delay_s)
            await asyncio.sleep(delay_s)
            try:
                await self._server.start_again()
            except ServiceError as error:
                problem, lived_s = f"{NAME} cannot be started again: {error}", 0.0
            else:
                self._announce()
                return

    def _announce(self) -> None:
        write_json(self._address_file, {"url": self._server.url})
        self._on_start(self._server.pid)

    def _died(self) -> ServiceDied:
        code, log = self._server.returncode, self._log
        return ServiceDied(NAME, EXIT_FAILURE if code is None else code, log, log_tail(log))
