"""The verifier's gRPC client. Items and results are the protobuf classes of `verifier.proto`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from pipelinerl.errors import MessageError, ServiceError
from pipelinerl.messages.sequences import FINISH_REASON_TO_PROTO, Sequence
from pipelinerl.recipe.fields import MOST_REWARD
from pipelinerl.service.grpc import MAX_MESSAGE_BYTES, explained, open_channel
from pipelinerl.service.retry import Backoff, retry_forever
from pipelinerl.service.tls import RenewedCertificates
from pipelinerl.v1 import verifier_pb2 as pb
from pipelinerl.v1 import verifier_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S, LONGEST_DEADLINE_S = 120.0, 3600.0
"""Deadline of a batch's first attempt and longest deadline, in seconds. Each timeout doubles the deadline."""
BACKOFF = Backoff(first_s=0.1, most_s=3.0, jitter=0.5)
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,  # sent by a server that is stopping
)
_DOUBTFUL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""Statuses that may mean a broken connection or a verifier's defect. A batch fails after `MOST_DOUBTFUL_TRIES` such answers."""
MOST_DOUBTFUL_TRIES = 3
FAILURE_CODES = tuple(code.name for code in grpc.StatusCode if code is not grpc.StatusCode.OK)
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A headless Service resolves to every pod; each call goes to the next one.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.dns_min_time_between_resolutions_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 20_000),  # detects a peer that vanished without closing
    ("grpc.keepalive_timeout_ms", 10_000),
)


def item_of(sequence: Sequence, max_tokens: int, traceparent: str = "") -> pb.VerifyItem:
    """Return the item with which the verifier scores a sequence. `max_tokens`: limit of the sequence's completion."""
    return pb.VerifyItem(
        sequence_id=sequence.sequence_id,
        task=sequence.task,
        prompt_text=sequence.prompt_text,
        completion_text=sequence.completion_text,
        reference_json=sequence.reference_json,
        completion_tokens=sequence.num_completion_tokens,
        max_tokens=max_tokens,
        finish_reason=FINISH_REASON_TO_PROTO[sequence.finish_reason],
        traceparent=traceparent,
    )


def judged(sequence: Sequence, result: pb.VerifyResult) -> Sequence:
    """Return the sequence with the verifier's result, which must have the status OK."""
    return replace(
        sequence,
        reward=result.reward,
        reward_components=dict(result.components),
        metrics=dict(result.metrics),
        answer=result.answer,
        reason=result.message,
    )


def status_name(status: int) -> str:
    """Return the name of a `VerifyStatus`, in lower case and without its prefix."""
    return pb.VerifyStatus.Name(status).removeprefix("VERIFY_STATUS_").lower()


class VerifierAway(ServiceError):
    """A call to the verifier failed, but another call may succeed."""


class VerifierClient:
    """Client of the verifier at `target` (`host:port`), an async context manager. If the host has several addresses, they are
    used in turn. Any number of calls may run at once."""

    def __init__(
        self, target: str, *, tls_dir: Path | None = None, on_failed_try: Callable[[str], None] = lambda code: None
    ) -> None:
        """`tls_dir`: folder of the certificates, which may be renewed; None = plain text. `on_failed_try`: called with the gRPC
        status of each failed attempt, one of `FAILURE_CODES`."""
        self.target, self._tls_dir, self._on_failed_try = target, tls_dir, on_failed_try

    async def __aenter__(self) -> VerifierClient:
        """Open the channel. Raises `FieldError` on `tls_dir` if its files cannot be used."""
        self._files = RenewedCertificates(self._tls_dir, "client") if self._tls_dir is not None else None
        self._channel = self._opened()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    async def verify(self, items: list[pb.VerifyItem]) -> list[pb.VerifyResult]:
        """Return one result per item, in order; a reward is within ±`MOST_REWARD`, and 0 unless the status is OK. Wait without
        limit while the verifier is unreachable, full or late. Raises `ServiceError` if the items are too large, or if the
        verifier refuses the call or keeps failing, and `MessageError` if the answer does not match the items."""
        if not items:
            return []
        request = pb.VerifyRequest(items=items)
        if request.ByteSize() > MAX_MESSAGE_BYTES:
            raise ServiceError(f"a call of {request.ByteSize()} bytes exceeds {MAX_MESSAGE_BYTES}; send fewer or shorter items")
        return _results(items, await self._call_until_answered(request))

    async def run_episode(self, request: pb.EpisodeRequest, timeout_s: float) -> pb.VerifyResult:
        """Run an episode in one call, and return its result. Raises `VerifierAway` if another call may succeed, `ServiceError`
        if the verifier refuses the call, and `MessageError` if the answer is for another item."""
        try:
            with self._tries() as stub:
                result: pb.VerifyResult = await stub.RunEpisode(request, timeout=timeout_s, wait_for_ready=True)
        except aio.AioRpcError as error:
            kind = VerifierAway if error.code() in (*_AWAY, *_DOUBTFUL) else ServiceError
            raise kind(f"verifier {self.target} did not run {request.sequence_id}: {self._text(error)}") from error
        return _results([request], pb.VerifyResponse(results=[result]))[0]

    async def _call_until_answered(self, request: pb.VerifyRequest) -> pb.VerifyResponse:
        doubtful, deadline_s = 0, DEADLINE_S

        async def call() -> pb.VerifyResponse:
            nonlocal doubtful, deadline_s
            try:
                with self._tries() as stub:
                    answer: pb.VerifyResponse = await stub.Verify(request, timeout=deadline_s)
                return answer
            except aio.AioRpcError as error:
                doubtful += error.code() in _DOUBTFUL
                if doubtful >= MOST_DOUBTFUL_TRIES or error.code() not in (*_AWAY, *_DOUBTFUL):
                    raise ServiceError(f"verifier {self.target} refused a batch: {self._text(error)}") from error
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    deadline_s = min(2 * deadline_s, LONGEST_DEADLINE_S)
                raise

        return await retry_forever(
            call,
            f"have completions scored by the verifier at {self.target}",
            retried=lambda error: isinstance(error, aio.AioRpcError),
            backoff=BACKOFF,
            explain=self._text,
        )

    def _opened(self) -> aio.Channel:
        certificates = self._files.certificates if self._files is not None else None
        return open_channel(self.target, certificates, options=CHANNEL_OPTIONS)

    @contextmanager
    def _tries(self) -> Iterator[verifier_pb2_grpc.VerifierServiceStub]:
        """Yield the stub for one call, and call `on_failed_try` if the call fails. If the server was unreachable and the
        certificates have been renewed, later calls use a new channel."""
        channel = self._channel
        try:
            yield verifier_pb2_grpc.VerifierServiceStub(channel)
        except aio.AioRpcError as error:
            self._on_failed_try(error.code().name)
            away = error.code() is grpc.StatusCode.UNAVAILABLE and channel is self._channel
            if away and self._files is not None and self._files.renew():
                self._channel = self._opened()  # Closing the old channel would cancel its other calls.
            raise

    def _text(self, error: Exception) -> str:
        return explained(error, self._tls_dir)


def _results(items: Iterable[pb.VerifyItem | pb.EpisodeRequest], response: pb.VerifyResponse) -> list[pb.VerifyResult]:
    asked = [item.sequence_id for item in items]
    answered = [result.sequence_id for result in response.results]
    if asked != answered:
        raise MessageError("VerifyResponse", "results", f"asked about {asked[:3]}..., answered {answered[:3]}...")
    for result in response.results:
        if result.status not in pb.VerifyStatus.values() or result.status == pb.VERIFY_STATUS_UNSPECIFIED:
            raise MessageError("VerifyResult", "status", f"{result.sequence_id} has the unknown status {result.status}")
        is_usable = all(abs(value) <= MOST_REWARD for value in (result.reward, *result.components.values()))  # NaN is not
        if result.status == pb.VERIFY_STATUS_OK and not is_usable:
            result.status = pb.VERIFY_STATUS_BAD_REWARD
            result.message = f"the verifier returned a reward of {result.reward}, with terms {dict(result.components)}"[:500]
        if result.status != pb.VERIFY_STATUS_OK:
            result.reward = 0.0
    return list(response.results)
