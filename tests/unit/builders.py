"""Hand-made sequences and groups for tests, and damaged messages."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from pipelinerl.messages.sequences import Branch, PromptGroup, SamplingParams, Sequence, Turn, VersionSpan
from pipelinerl.recipe.fields import Recipe
from pipelinerl.rl.accuracy import Accuracy, Estimate

RUN = "unit"


def make_recipe(**sections: object) -> Recipe:
    """A small valid recipe; a section given as a dict replaces the default one."""
    base: dict[str, object] = {
        "name": "unit",
        "model": {"source": "path", "name": "nowhere", "max_context": 64},
        "task": {"name": "chain_sum"},
        "sampling": {"group_size": 2, "max_tokens": 16},
        "trainer": {"steps": 4, "batch_size": 4, "tokens_per_microbatch": 64},
        "algorithm": {"max_lag": 1},
    }
    return Recipe.model_validate(base | sections)


def make_problem(
    index: int = 0, *, tokens: tuple[int, ...] = (1, 2, 3), task: str = "chain_sum", max_tokens: int = 16, **changes: object
) -> PromptGroup:
    """Of the task of `make_recipe`, as `encode` returns it, apart from `changes`."""
    blank = {"run": "", "group_id": "", "prompt_text": f"p{index}", "task": task}
    return make_group(index, prompt=tokens, sampling=SamplingParams(max_tokens=max_tokens), **blank, **changes)


def make_group(number: int = 0, *, num_samples: int = 2, prompt: tuple[int, ...] = (1, 2, 3), **changes: object) -> PromptGroup:
    values: dict[str, object] = {
        "run": RUN,
        "group_id": f"g{number:08d}",
        "problem_index": number,
        "task": "chain_sum",
        "prompt_token_ids": np.array(prompt, dtype=np.int32),
        "prompt_text": "1+2",
        "reference_json": "{}",
        "num_samples": num_samples,
        "sampling": SamplingParams(max_tokens=16),
        "seed": 0,
        "issued_version": 0,
    }
    return PromptGroup(**(values | changes))  # type: ignore[arg-type]


def make_sequence(
    group: PromptGroup,
    index: int,
    *,
    reward: float = 1.0,
    completion: tuple[int, ...] = (4, 5),
    version: int = 0,
    spans: tuple[VersionSpan, ...] | None = None,
    failure: str = "",
) -> Sequence:
    return Sequence(
        run=group.run,
        sequence_id=group.sequence_id(index),
        group_id=group.group_id,
        sample_index=index,
        group_size=group.num_samples,
        task=group.task,
        prompt_token_ids=group.prompt_token_ids,
        completion_token_ids=np.array(completion, dtype=np.int32),
        behaviour_logprobs=np.full(len(completion), -0.5, dtype=np.float32),
        spans=(VersionSpan(version, 0, len(completion)),) if spans is None else spans,
        reward=reward,
        failure=failure,
        group_token=group.token,
    )


def make_episode(group: PromptGroup, index: int, *, version: int = 0, reward: float = 1.0, **branch: object) -> Sequence:
    """Two turns of 2 and 1 tokens with an observation of 2 between them, and a branch of one token, changed by `branch`."""
    values: dict[str, object] = {
        "prompt_token_ids": np.array([1, 9], dtype=np.int32),
        "completion_token_ids": np.array([10], dtype=np.int32),
        "behaviour_logprobs": np.full(1, -0.5, dtype=np.float32),
        "spans": (VersionSpan(version, 0, 1),),
    }
    return replace(
        make_sequence(group, index, completion=(4, 5, 6, 7, 8), reward=reward),
        prompt_token_ids=np.array([1, 2, 3], dtype=np.int32),
        behaviour_logprobs=np.full(3, -0.5, dtype=np.float32),
        spans=(VersionSpan(version, 0, 2), VersionSpan(version, 4, 5)),
        turns=(Turn(0, 2), Turn(4, 5)),
        branches=(Branch(**(values | branch)),),  # type: ignore[arg-type]
    )


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[bytes]) -> bytes:
    """Random bytes, or a good message that was cut off, changed in one byte, or continued with something else."""
    message = draw(good)
    kind = draw(st.sampled_from(["random", "cut", "flipped", "longer"]))
    if kind == "random" or not message:
        return draw(st.binary(max_size=200))
    place = draw(st.integers(0, len(message) - 1))
    if kind == "cut":
        return message[:place]
    if kind == "flipped":
        return message[:place] + bytes([message[place] ^ draw(st.integers(1, 255))]) + message[place + 1 :]
    return message + draw(st.binary(min_size=1, max_size=50))


def changed(message: Any, **changes: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    for path, value in changes.items():
        member, _, name = path.rpartition("__")  # "members_1__ranks": of members[1]
        setattr(copy.members[int(member[-1])] if member else copy, name, value)
    return copy


def write_weights(path: Path, **shapes: tuple[int, ...]) -> None:
    """A file of weights of these shapes, all of one byte each and zero, which take no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [end, end + math.prod(shape)]}
        end += math.prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)


def model_folder(folder: Path) -> Path:
    """A folder, made where it is not, that looks like that of a small model, whose tokens are words."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder / "model.safetensors", w=(2, 3))
    return folder


def evaluation(version: int) -> dict[str, Any]:
    """The figures of an evaluation, as in metrics.jsonl."""
    measured = {"accuracy": 0.75, "accuracy_lower_bound": 0.6, "unanswered": 1, "sets": {}, "version": version}
    return {f"heldout_{name}": value for name, value in measured.items()}


def accuracy_at(mean: float, lower_bound: float, unanswered: int) -> Accuracy:
    return Accuracy(Estimate(mean, mean, mean), lower_bound, unanswered)


def checkpoint(run: Path, version: int, state: str = "{}") -> Path:
    """The folder of a checkpoint that a run may go on from."""
    folder = run / "checkpoints" / f"step-{version}"
    (folder / "resume").mkdir(parents=True, exist_ok=True)
    (folder / "resume" / "run.json").write_text(state)
    return folder
