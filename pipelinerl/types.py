"""The nouns that travel between services, as immutable dataclasses.

Algorithms work on these, never on protobuf messages; `pipelinerl.codec` converts. Arrays are NumPy so that a sequence
of tens of thousands of tokens costs one copy. Nothing here talks to anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
"""int32[tokens]"""
Logprobs = NDArray[np.float32]
"""float32[tokens], nats"""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, order=True)
class PolicyVersion:
    """A version is known by the incarnation of the trainer that made it and its number (optimizer steps taken)."""

    incarnation: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.number}"


@dataclass(frozen=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled by policy `version` of trainer `incarnation`."""

    version: int
    start: int
    end: int
    incarnation: int = 1


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled; μ is the distribution after all of it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PartialSequence:
    """What an actor that left had generated of one sample. `completion_token_ids`, `behaviour_logprobs`: [tokens].

    `finish_reason` None: to be continued. Otherwise it is complete and lacks only its reward and publication.
    """

    sample_index: int
    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason | None = None
    generation_s: float = 0.0


@dataclass(frozen=True, eq=False)
class PromptGroup:
    """One prompt and how many samples of it are wanted.

    `done_samples` are not asked for here: they are published already, or another message of this group asks for them.
    `partials` are samples to go on with; all others start from the prompt.
    """

    run: str
    group_id: str
    problem_index: int
    task: str
    prompt_token_ids: TokenIds
    prompt_text: str
    reference_json: str
    num_samples: int
    sampling: SamplingParams
    seed: int
    issued_version: int
    partials: tuple[PartialSequence, ...] = ()
    done_samples: tuple[int, ...] = ()

    def sequence_id(self, sample_index: int) -> str:
        return f"{self.group_id}.{sample_index}"


@dataclass(frozen=True)
class DeadLetter:
    """A message of PROMPTS that was given up. `prompt_group`: its bytes, empty when they were too large to be kept."""

    run: str
    msg_id: str
    prompt_group: bytes
    reason: str
    deliveries: int
    actor: str
    at_s: float
    """Unix seconds."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """One finished sequence. `spans` cover the completion without gap or overlap; `failure` is empty for a good one.

    prompt_token_ids int32[prompt], completion_token_ids int32[completion], behaviour_logprobs float32[completion]
    (log μ of each sampled token, nats).
    """

    run: str
    sequence_id: str
    group_id: str
    sample_index: int
    group_size: int
    task: str
    prompt_token_ids: TokenIds
    completion_token_ids: TokenIds
    behaviour_logprobs: Logprobs
    spans: tuple[VersionSpan, ...]
    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason = FinishReason.STOP
    failure: str = ""
    actor: str = ""
    completion_text: str = ""
    prompt_text: str = ""
    reference_json: str = ""
    generation_s: float = 0.0

    @property
    def num_completion_tokens(self) -> int:
        return len(self.completion_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.completion_token_ids)

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def num_versions(self) -> int:
        return len({(span.incarnation, span.version) for span in self.spans})

    def token_versions(self) -> NDArray[np.int64]:
        """int64[completion]: policy version of each completion token."""
        versions = np.empty(len(self.completion_token_ids), dtype=np.int64)
        for span in self.spans:
            versions[span.start : span.end] = span.version
        return versions
