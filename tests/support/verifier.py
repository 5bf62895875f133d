"""A verifier's gRPC side without its workers, which does what a test says."""

import asyncio

import grpc
from grpc import aio

from pipelinerl.v1 import verifier_pb2, verifier_pb2_grpc
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyRequest, VerifyResponse, VerifyResult
from tests.support.certificates import serial_of

ITEM = verifier_pb2.VerifyItem(sequence_id="s1", task="t", reference_json="{}")


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Answers each call with what comes next of the script (a status, an answer, or well if the call's deadline is at least so
    many seconds away, else never), then well: a reward of 1 for each item, for one that is called `late` once that is set.

    `calls` counts; `callers` are the serial numbers of the certificates that were shown.
    """

    def __init__(self, *script: grpc.StatusCode | VerifyResponse | float) -> None:
        self._script = list(script)
        self.calls = 0
        self.callers: list[int] = []
        self.late = asyncio.Event()

    def register(self, server: aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)

    async def Verify(self, request: VerifyRequest, context: aio.ServicerContext) -> VerifyResponse:
        self.calls += 1
        shown = context.auth_context().get("x509_pem_cert", [])
        self.callers += [serial_of(certificate.decode()) for certificate in shown]
        match self._script.pop(0) if self._script else None:
            case grpc.StatusCode() as code:
                await context.abort(code, "as the script says")
            case VerifyResponse() as response:
                return response
            case float(seconds):
                if context.time_remaining() < seconds:
                    await asyncio.Event().wait()  # until the deadline ends the call
        if request.items[0].sequence_id == "late":
            await self.late.wait()
        ids = [item.sequence_id for item in request.items]
        return VerifyResponse(
            results=[VerifyResult(sequence_id=one, status=VERIFY_STATUS_OK, reward=1.0) for one in ids]
        )
