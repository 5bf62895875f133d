"""Names of attributes of trace spans: those of OpenTelemetry's conventions, and others, which begin with `pipelinerl.`."""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from pipelinerl.messages.sequences import Sequence

Attributes = dict[str, AttributeValue]

SEQUENCE_ID = "pipelinerl.sequence.id"
GROUP_ID = "pipelinerl.group.id"
VERSION = "pipelinerl.policy.version"
FIRST_VERSION, LAST_VERSION = "pipelinerl.policy.version.first", "pipelinerl.policy.version.last"
OUTCOME, REASON = "pipelinerl.outcome", "pipelinerl.outcome.reason"
REWARD = "pipelinerl.reward"
PROMPTS = "pipelinerl.prompts"
"""Number of prompts in one call of `ActorService/Generate`."""
EPOCH = "pipelinerl.epoch"
ACTOR = "pipelinerl.actor"
STALL_S = "pipelinerl.stall_seconds"
BYTES = "pipelinerl.bytes"
RECEIVE_S = "pipelinerl.receive_seconds"
CARRIED_TOKENS = "pipelinerl.tokens.carried"
"""Number of completion tokens that another actor had generated before this actor took over the sequence."""
STATUS = "pipelinerl.verify.status"
TASK = "pipelinerl.task"

INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
FINISH_REASONS = "gen_ai.response.finish_reasons"
CHOICES = "gen_ai.request.choice.count"
RPC_STATUS = "rpc.response.status_code"
ERROR = "error.type"


def messaging(operation: str, destination: str, message_id: str = "", body_bytes: int | None = None) -> Attributes:
    """Return attributes of a message. `operation`: send, receive or process. `destination`: subject of the message."""
    about = {
        "messaging.system": "nats",
        "messaging.operation.type": operation,
        "messaging.destination.name": destination,
        "messaging.message.id": message_id or None,
        "messaging.message.body.size": body_bytes,
    }
    return {name: value for name, value in about.items() if value is not None}


def rpc(method: str) -> Attributes:
    """Return attributes of a call. `method` is a full name such as `pipelinerl.v1.VerifierService/Verify`."""
    return {"rpc.system.name": "grpc", "rpc.method": method}


def generated(sequence: Sequence) -> Attributes:
    """Return attributes of a completion: token counts, versions, finish reason and failure."""
    attributes: Attributes = {
        INPUT_TOKENS: len(sequence.prompt_token_ids),
        OUTPUT_TOKENS: sequence.num_completion_tokens,
        FINISH_REASONS: (sequence.finish_reason.value,),
    }
    if sequence.spans:
        attributes |= {FIRST_VERSION: sequence.spans[0].version, LAST_VERSION: sequence.spans[-1].version}
    if sequence.failure:
        attributes[ERROR] = sequence.failure.partition(":")[0]
    return attributes
