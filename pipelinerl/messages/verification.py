"""The verifier's client: items in, outcomes out, over gRPC.

It waits for a verifier that is away, restarting or full: `verify` returns when every item has an outcome, or when its
task is cancelled. The caller keeps its sequences until then, so that none is lost. It scores nothing itself, and an
outcome that is not `ok` is the caller's to judge.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc import aio

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import FinishReason, finish_reason_to_proto
from pipelinerl.messages.validation import building
from pipelinerl.service.grpc import MAX_MESSAGE_BYTES, explained, open_channel
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.tls import RenewedCertificates
from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc

log = logging.getLogger(__name__)

LONGEST_DEADLINE_S = 3600.0
BACKOFF = Backoff(first_s=0.1, most_s=3.0, jitter=0.5)
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # by a server that is stopping
)
_DOUBTFUL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""A connection that broke half-way, or a defect of the verifier: worth another try, not an endless one."""
MOST_DOUBTFUL_TRIES = 3
FAILURE_CODES = tuple(code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A headless Service resolves to every pod; each call goes to the next one.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 20_000),  # notices a peer that vanished without closing
    ("grpc.keepalive_timeout_ms", 10_000),
)


class VerifyStatus(StrEnum):
    """Why there is no reward, or `ok`."""

    OK = "ok"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    BAD_REWARD = "bad_reward"
    UNKNOWN_TASK = "unknown_task"
    BAD_REFERENCE = "bad_reference"


@dataclass(frozen=True)
class VerifyItem:
    """One completion and what its reward needs. `reference_json`: `{"answer": ..., "dataset": ..., "entry": {...}}`."""

    sequence_id: str
    task: str
    prompt_text: str
    completion_text: str
    reference_json: str
    completion_tokens: int = 0
    max_tokens: int = 0
    finish_reason: FinishReason = FinishReason.STOP
    traceparent: str = ""
    """Of the span that the verifier's spans follow; empty: of none."""


@dataclass(frozen=True)
class VerifyOutcome:
    """When `ok`, `reward` is finite and the sum of `components`; otherwise it is 0 and `message` says why."""

    sequence_id: str
    status: VerifyStatus
    reward: float
    components: dict[str, float] = field(default_factory=dict)
    message: str = ""
    seconds: float = 0.0
    """Time spent in the reward."""

    @property
    def ok(self) -> bool:
        return self.status is VerifyStatus.OK


class VerifierClient:
    """Calls the verifier at `target` (`host:port`; a name with several addresses is used in turn).

    Used as an async context manager; any number of calls may be under way at once.
    """

    def __init__(
        self,
        target: str,
        *,
        deadline_s: float = 120.0,
        backoff: Backoff = BACKOFF,
        tls_dir: Path | None = None,
        on_failed_try: Callable[[str], None] = lambda code: None,
    ) -> None:
        """`deadline_s`: of one try; after a try that exceeded it the next one of that batch gets twice as long.
        `tls_dir`: certificates (`pipelinerl.service.tls`); those that are renewed there are used. None = plain text.
        `on_failed_try`: takes the gRPC status (`FAILURE_CODES`) of each try that failed, the last one of a refusal included."""
        self.target, self._tls_dir, self._on_failed_try = target, tls_dir, on_failed_try
        self._deadline_s = deadline_s
        self._backoff = backoff

    async def __aenter__(self) -> VerifierClient:
        """Raises `FieldError` on `tls_dir` when its files cannot be used."""
        self._files = RenewedCertificates(self._tls_dir, "client") if self._tls_dir is not None else None
        self._channel = self._opened()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def verify(self, items: Sequence[VerifyItem]) -> list[VerifyOutcome]:
        """One outcome for each item, in their order.

        Waits and tries again, without end, while the verifier is unreachable, full or late; cancel the task to stop it.
        Raises `ServiceError` when the verifier refuses the call, `MessageError` when an item cannot be put in a message
        or the answer does not fit the items.
        """
        if not items:
            return []
        with building("VerifyItem"):
            request = verifier_pb2.VerifyRequest(items=map(_item_to_proto, items))
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise ServiceError(f"a batch of {request.ByteSize()} bytes exceeds {MAX_MESSAGE_BYTES}; send fewer items")
        return _outcomes(items, await self._call_until_answered(request))

    async def _call_until_answered(self, request: verifier_pb2.VerifyRequest) -> verifier_pb2.VerifyResponse:
        doubtful, deadline_s = 0, self._deadline_s

        async def call() -> verifier_pb2.VerifyResponse:
            nonlocal doubtful, deadline_s
            channel = self._channel
            try:
                return await verifier_pb2_grpc.VerifierServiceStub(channel).Verify(request, timeout=deadline_s)
            except aio.AioRpcError as error:
                self._on_failed_try(error.code().name)
                doubtful += error.code() in _DOUBTFUL
                if doubtful >= MOST_DOUBTFUL_TRIES or error.code() not in (*_AWAY, *_DOUBTFUL):
                    raise ServiceError(f"verifier {self.target} refused a batch: {self._text(error)}") from error
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    deadline_s = min(2 * deadline_s, LONGEST_DEADLINE_S)
                if error.code() is grpc.StatusCode.UNAVAILABLE and channel is self._channel:
                    await self._renew()
                raise

        return await retry_forever(
            call,
            f"have completions scored by the verifier at {self.target}",
            retried=lambda error: isinstance(error, aio.AioRpcError),
            backoff=self._backoff,
            explain=self._text,
        )

    def _opened(self) -> aio.Channel:
        certificates = self._files.certificates if self._files is not None else None
        return open_channel(self.target, certificates, options=CHANNEL_OPTIONS)

    async def _renew(self) -> None:
        """Opens another channel where the certificates were renewed: a channel keeps those that it was opened with, and its new
        connections are refused once they have expired. Other calls under way on it are cancelled, and tried again."""
        if self._files is not None and self._files.renew():
            replaced, self._channel = self._channel, self._opened()
            await replaced.close()

    def _text(self, error: Exception) -> str:
        return explained(error, self._tls_dir) if isinstance(error, aio.AioRpcError) else str(error)


def _item_to_proto(item: VerifyItem) -> verifier_pb2.VerifyItem:
    same = {name: value for name, value in vars(item).items() if name != "finish_reason"}
    return verifier_pb2.VerifyItem(**same, finish_reason=finish_reason_to_proto(item.finish_reason))


def _outcomes(items: Sequence[VerifyItem], response: verifier_pb2.VerifyResponse) -> list[VerifyOutcome]:
    asked = [item.sequence_id for item in items]
    answered = [result.sequence_id for result in response.results]
    if asked != answered:
        raise MessageError("VerifyResponse", "results", f"asked about {asked[:3]}..., answered {answered[:3]}...")
    return [_outcome(result) for result in response.results]


def _outcome(result: verifier_pb2.VerifyResult) -> VerifyOutcome:
    status, message = _status(result), result.message
    if status is VerifyStatus.OK and not math.isfinite(result.reward):
        status, message = VerifyStatus.BAD_REWARD, f"the verifier answered a reward of {result.reward}"
    return VerifyOutcome(
        sequence_id=result.sequence_id,
        status=status,
        reward=result.reward if status is VerifyStatus.OK else 0.0,
        components=dict(result.components),
        message=message,
        seconds=result.seconds,
    )


def _status(result: verifier_pb2.VerifyResult) -> VerifyStatus:
    try:
        return VerifyStatus(verifier_pb2.VerifyStatus.Name(result.status).removeprefix("VERIFY_STATUS_").lower())
    except ValueError as error:
        raise MessageError("VerifyResult", "status", f"{result.status} for {result.sequence_id}") from error
