"""Compose the reward of a recipe from weighted terms, which are also reported separately.

reward = correct * score + format_weight (if the format matches) + overlong penalty

With `truncated: zero`, a completion cut at its length limit gets only the overlong penalty, and a term `truncated` of 0.

A scorer may be a user's own function, `my_pkg.rewards:score`. It takes a `RewardInput` and returns a number, or named numbers
that are added up. Functions written for verl or TRL are recognised by their parameters and called accordingly.

`score_item` turns errors of a reward into the status of its item's result.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, SupportsFloat, TypeVar

from pipelinerl.episodes import imported
from pipelinerl.errors import FieldError, as_unicode, located
from pipelinerl.recipe.fields import JudgeConfig, RewardConfig, TaskConfig
from pipelinerl.tasks.final_answer import outside, thoughts
from pipelinerl.tasks.rows import ABSENT, value_in
from pipelinerl.tasks.source import conversation, prompt_of
from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier.rewards.code import code_scorer
from services.verifier.rewards.item import NO_ANSWER, BadReference, BadReward, RewardInput, Score, Scorer, reference_answer
from services.verifier.rewards.mathematics import math_scorer
from services.verifier.rewards.reasoning_gym import reasoning_gym_scorer

MOST_TERMS, TERM_CHARACTERS = 128, 100
"""Maximum number of terms, or of metrics, that users' code may return, and maximum length of their names."""
MESSAGE_CHARACTERS = 500
"""Maximum length of a result's message, and of the answer that `find_answer` found."""
_FINISH_REASONS = {sequence_pb2.FINISH_REASON_STOP: "stop", sequence_pb2.FINISH_REASON_LENGTH: "length"}
_Result = TypeVar("_Result")
_ALMOST = 1e-9
"""Largest rounding error with which a score still counts as 1."""


class ComposedReward:
    """A task's reward. `graded`: `reward.binary` does not apply, because a user's function or a judge gives the score."""

    def __init__(self, config: RewardConfig, scorer: Scorer, *, graded: bool = False) -> None:
        self._config, self._scorer = config, scorer
        self._binary = config.binary and not graded
        pattern = config.answer_pattern
        self._answers = [re.compile(pattern), re.compile(pattern, re.DOTALL)] if pattern else []
        self._format = re.compile(config.format_pattern, re.DOTALL) if config.format_pattern else None

    def find_answer(self, completion: str, prompt: str = "") -> str | None:
        """Return group 1 of the last match of `answer_pattern`, stripped, or None. Without a pattern, return the
        completion, stripped. An answer inside a thought does not count.

        The first search is without re.DOTALL, so that `Answer: (.*)` takes one line. A second one, after the last match, is
        with re.DOTALL, so that `<answer>(.*)</answer>` takes several."""
        if not self._answers:
            return completion.strip()
        hidden = thoughts(completion, prompt)
        for text, excluded in ((outside(hidden, completion), []), (completion, hidden)):
            answer, end = None, 0
            for pattern in self._answers:
                for match in pattern.finditer(text, end):
                    is_thought = any(start <= match.start(1) < stop for start, stop in excluded)
                    answer, end = None if is_thought else match.group(1), match.end()
            if answer is not None:
                return answer.strip()
        return None

    def __call__(self, item: RewardInput) -> Score:
        """Return the reward and its terms. Raises `BadReference`, `BadReward`, and all errors of the scorer."""
        cut = self._config.truncated == "zero" and item.finish_reason == "length"
        score = Score(0.0, "cut at its length limit (reward.truncated)") if cut else self._scorer(item)
        reasons = [score.reason] if score.reason else []
        if score.parts and not self._binary:
            terms = {f"answer.{name}": self._config.correct * part for name, part in score.parts.items()}
        elif math.isnan(score.value):
            raise BadReward("the scorer returned nan; it must return a number")
        else:
            value = float(score.value >= 1.0 - _ALMOST) if self._binary else score.value
            terms = {"answer": self._config.correct * value}
        if cut:
            terms["truncated"] = 0.0
        if self._format is not None and not cut:
            matches = self._format.fullmatch(item.completion.strip()) is not None
            terms["format"] = self._config.format_weight * matches
            reasons += [] if matches else ["the completion does not match reward.format_pattern"]
        if (overlong := self._config.overlong).buffer_tokens:
            if item.max_tokens < 1:
                problem = "0, but reward.overlong needs the limit under which the completion was sampled"
                raise BadReference("max_tokens", problem)
            sizes = item.completion_tokens, item.max_tokens, overlong.buffer_tokens
            terms["overlong"] = overlong_penalty(*sizes, overlong.penalty)
        total = sum(terms.values())
        if wrong := wrong_number((total, *terms.values()), self._config.max_abs):
            raise BadReward(f"{wrong}: {', '.join(f'{name} = {term}' for name, term in terms.items())}"[:200])
        return Score(total, "; ".join(reasons), terms, score.metrics)


def score_item(reward: ComposedReward, item: verifier_pb2.VerifyItem) -> verifier_pb2.VerifyResult:
    """Score one item. Never raises; an exception of the reward becomes the result's status."""
    answer = None

    def score() -> verifier_pb2.VerifyResult:
        nonlocal answer
        answer = reward.find_answer(item.completion_text, item.prompt_text)
        scored = reward(
            RewardInput(
                prompt=item.prompt_text,
                completion=item.completion_text,
                answer=answer,
                reference=_reference(item.reference_json),
                completion_tokens=item.completion_tokens,
                max_tokens=item.max_tokens,
                finish_reason=_FINISH_REASONS.get(item.finish_reason, ""),
                judgement=item.judgement,
                task=item.task,
                sequence_id=item.sequence_id,
            )
        )
        return verifier_pb2.VerifyResult(
            status=verifier_pb2.VERIFY_STATUS_OK,
            reward=scored.value,
            components=scored.parts,
            metrics=scored.metrics,
            message=as_unicode(scored.reason)[:MESSAGE_CHARACTERS],
            answer=(answer or "")[:MESSAGE_CHARACTERS],
        )

    return outcome(item.sequence_id, score, "reward", lambda error: _hint(error, item, answer))


def outcome(
    sequence_id: str, attempt: Callable[[], _Result], what: str, hint: Callable[[BaseException], str]
) -> _Result | verifier_pb2.VerifyResult:
    """Return what `attempt` returns, or a failed result if it raises. `what`: "reward" or "episode", for messages."""
    started_s = time.perf_counter()
    result: _Result | verifier_pb2.VerifyResult
    try:
        result = attempt()
    except BadReference as error:
        result = failed(verifier_pb2.VERIFY_STATUS_BAD_REFERENCE, str(error))
    except BadReward as error:
        result = failed(verifier_pb2.VERIFY_STATUS_BAD_REWARD, str(error))
    except MemoryError:  # the traceback holds the memory and is freed at the end of this block
        result = failed(verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY, f"the {what} exceeded reward.memory_mib")
    except BaseException as error:  # noqa: BLE001 - the process boundary; users' code may also raise SystemExit
        traceback.print_exc()
        result = failed(verifier_pb2.VERIFY_STATUS_CRASHED, f"the {what} raised {located(error)}{hint(error)}")
    if isinstance(result, verifier_pb2.VerifyResult):
        result.sequence_id, result.seconds = sequence_id, time.perf_counter() - started_s
    return result


def failed(
    status: verifier_pb2.VerifyStatus, message: str, sequence_id: str = "", seconds: float = 0.0
) -> verifier_pb2.VerifyResult:
    """Return a failed result. Its message is `message` with invalid Unicode replaced, cut at `MESSAGE_CHARACTERS`."""
    message = as_unicode(message)[:MESSAGE_CHARACTERS]
    return verifier_pb2.VerifyResult(sequence_id=sequence_id, status=status, message=message, seconds=seconds)


def _hint(error: BaseException, item: verifier_pb2.VerifyItem, answer: str | None) -> str:
    if f"'{RewardInput.__name__}'" in str(error):
        return f"; the argument is an item, with the attributes {', '.join(RewardInput.__dataclass_fields__)}"
    if isinstance(error, KeyError):
        reference = _reference(item.reference_json)
        row = reference.get("row")
        fields = f", and its row {', '.join(row)}" if isinstance(row, dict) else ""
        return f"; item.reference has {', '.join(reference) or 'nothing'}{fields}"
    if answer is None and isinstance(error, AttributeError | TypeError):
        return "; item.answer is None, since reward.answer_pattern found nothing"
    return ""


def _reference(text: str) -> dict[str, Any]:
    try:
        reference = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReference("reference_json", f"cannot be read as JSON: {error}") from error
    if not isinstance(reference, dict):
        raise BadReference("reference_json", f"a JSON object is needed, not {type(reference).__name__}")
    return reference


def wrong_number(values: Iterable[float], max_abs: float) -> str:
    """Return why a reward with these terms cannot be trained on; empty if it can. `max_abs`: as in `RewardConfig`."""
    largest = max((abs(value) if math.isfinite(value) else math.inf) for value in values)
    if largest == math.inf:
        return "the reward or one of its terms is not a finite number"
    excess = "the absolute value of the reward or of one of its terms exceeds reward.max_abs"
    return f"{excess} ({max_abs:g})" if largest > max_abs else ""


def overlong_penalty(completion_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """Return the soft overlong penalty: `penalty` times equation 13 of DAPO (arXiv 2503.14476). It is 0 up to
    `max_tokens - buffer_tokens`, `-penalty` at `max_tokens`, and linear in between."""
    zone = min(buffer_tokens, max_tokens)
    over = completion_tokens - (max_tokens - zone)
    return 0.0 - penalty * min(max(over / zone, 0.0), 1.0)


def make_reward(config: RewardConfig, task: TaskConfig) -> ComposedReward:
    """Make the reward of a task. Raises `FieldError`, for example for an unknown reasoning-gym family or function."""
    match config.scorer:
        case "task" if task.source == "reasoning_gym":
            scorer = reasoning_gym_scorer(task.name)
        case "task" | "exact":
            scorer = exact
        case "regex":
            scorer = regex
        case "math" | "math_boxed":
            scorer = math_scorer(config.timeout_s, boxed=config.scorer == "math_boxed")
        case "json_schema":
            scorer = json_schema_scorer(config.json_schema)
        case "code":
            scorer = code_scorer(config)
        case "judge":
            assert config.judge is not None, "a rule of the recipe"
            return ComposedReward(config, judge_scorer(config.judge), graded=True)
        case path:
            return ComposedReward(config, user_scorer(path, task, config.answer_pattern), graded=True)
    return ComposedReward(config, scorer)


_FORMS = (
    "must take one argument, the item, or the parameters of verl, (data_source, solution_str, ground_truth, extra_info), "
    "or those of TRL, (completions, **columns)"
)


def user_scorer(path: str, task: TaskConfig | None = None, answer_pattern: str = "") -> Scorer:
    """Return a scorer that calls a user's function, possibly async. Raises `FieldError` if it cannot be called. A function with
    the parameters of verl or TRL gets the whole completion, so its recipe must not have an `answer_pattern`."""
    task, function = task or TaskConfig(), imported("reward.scorer", path)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise FieldError("reward.scorer", path, f"{_FORMS}; its parameters cannot be read ({error})") from error
    named = {
        name: one for name, one in signature.parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    is_verl, is_trl = "solution_str" in named, "completions" in named
    for body in (function, getattr(function, "__call__", None)):  # noqa: B004 - the method of a callable object
        if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
            raise FieldError("reward.scorer", path, "is a generator function (it yields); return the reward instead")
    if not (is_verl or is_trl):
        try:
            signature.bind(None)
        except TypeError as error:
            raise FieldError("reward.scorer", path, f"{_FORMS} ({error})") from error
        return lambda item: _own_score(_called(function, item))
    if answer_pattern:
        fix = f"{path} has {'verl' if is_verl else 'TRL'}'s parameters and gets the whole completion; leave the pattern out"
        raise FieldError("reward.answer_pattern", answer_pattern, fix)
    needed = {name for name, one in named.items() if one.default is one.empty}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

    def score(item: RewardInput) -> Score:
        given = _verl_arguments(item, task) if is_verl else _trl_arguments(item, task)
        if lacking := needed - given.keys():
            raise BadReference("row", f"has no {', '.join(sorted(lacking))}, which {path} takes; it has {', '.join(given)}")
        returned = _called(function, **{name: value for name, value in given.items() if takes_all or name in named})
        return _verl_score(returned) if is_verl else _trl_score(returned)

    return score


def _called(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    returned = function(*arguments, **keywords)
    return asyncio.run(returned) if inspect.iscoroutine(returned) else returned


def _row(item: RewardInput, task: TaskConfig) -> Mapping[str, Any]:
    """Return the columns of the problem's row or, for a problem without a row, the fields of its reference."""
    row = item.reference.get("row")
    if isinstance(row, Mapping) and row:
        return row
    named = {task.answer_field: item.reference["answer"]} if task.answer_field and "answer" in item.reference else {}
    return {**item.reference, **named}


def _verl_arguments(item: RewardInput, task: TaskConfig) -> dict[str, Any]:
    row = _row(item, task)
    answer, given = item.reference.get("answer"), value_in(row, task.answer_field)
    truth = answer if given is ABSENT or task.answer_pattern else given
    about = {"data_source": row.get("data_source", item.task or task.name), "extra_info": row.get("extra_info") or {}}
    return {"solution_str": item.completion, "ground_truth": truth, **about}


def _trl_arguments(item: RewardInput, task: TaskConfig) -> dict[str, Any]:
    """Return the arguments that TRL gives to a reward for a batch of one completion."""
    row, prompt, completion = _row(item, task), item.prompt, item.completion
    columns = {str(name): [value] for name, value in row.items() if name not in ("prompt", "completion")}
    if task.prompt_style != "chat" and not task.is_episodic:
        return {**columns, "prompts": [prompt], "completions": [completion]}
    is_of_file = bool(task.path) and isinstance(item.reference.get("row"), Mapping)
    question, asked = prompt_of(row, task) if is_of_file else (str(row.get("entry", {}).get("question", prompt)), [])
    messages = conversation(asked or [{"role": "user", "content": question}], task)
    return {**columns, "prompts": [messages], "completions": [[{"role": "assistant", "content": completion}]]}


def _own_score(returned: Any) -> Score:
    if isinstance(returned, Mapping):
        parts = terms_of(returned, "the reward", "part")
        return Score(sum(parts.values()), parts=parts)
    return Score(number_of(returned, "the reward"))


def _verl_score(returned: Any) -> Score:
    """Read verl's result: a number, or a mapping in which `score` is the reward and other finite numbers are metrics."""
    if not isinstance(returned, Mapping):
        return Score(number_of(returned, "the reward"))
    if "score" not in returned:
        raise BadReward(f"the reward function's result has no 'score', only {', '.join(map(str, returned)) or 'nothing'}"[:200])
    others = {name: value for name, value in returned.items() if name != "score" and not isinstance(value, str | bytes)}
    numbers = {name: value for name, value in others.items() if isinstance(value, SupportsFloat)}
    finite = {name: value for name, value in terms_of(numbers, "the reward", "metric").items() if math.isfinite(value)}
    return Score(number_of(returned["score"], "'score'"), metrics=finite)


def _trl_score(returned: Any) -> Score:
    values = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, str | bytes | Mapping) else []
    if len(values) != 1:
        raise BadReward(f"the reward function's result is {returned!r:.100}, not a list of one number (it gets one completion)")
    return Score(number_of(values[0], "the reward"))


def terms_of(returned: Mapping[Any, Any], what: str, one: str) -> dict[str, float]:
    """Convert the names and numbers that users' code returned to strings and floats. Messages call the mapping `what`, and one
    of its numbers `one`. Raises `BadReward` for too many numbers, a name that is too long, or a value that is not a number."""
    if len(returned) > MOST_TERMS:
        raise BadReward(f"{what} has {len(returned):,} entries; return at most {MOST_TERMS}")
    terms = {as_unicode(str(name)): number_of(value, f"{one} {name!r}") for name, value in returned.items()}
    if (longest := max(terms, key=len, default="")) and len(longest) > TERM_CHARACTERS:
        problem = f"the name of an entry has {len(longest):,} characters; use at most {TERM_CHARACTERS}"
        raise BadReward(f"{problem}: {longest:.40}...")
    return terms


def number_of(value: Any, what: str) -> float:
    """Convert a number from users' code to a float. Raises `BadReward` for anything else, including strings."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("a text")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        shown = "a number too large" if isinstance(error, OverflowError) else f"{value!r:.100}, not a number"
        raise BadReward(f"{what} is {shown}") from error


def exact(item: RewardInput) -> Score:
    """Score 1 if answer and reference are the same string, apart from surrounding white space."""
    wanted = reference_answer(item)
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if item.answer == wanted else Score(0.0, "differs from the reference answer")


def regex(item: RewardInput) -> Score:
    """Score 1 if the reference answer, read as a regular expression, matches the whole answer. `.` also matches line ends."""
    pattern = _compiled(reference_answer(item))
    if item.answer is None:
        return NO_ANSWER
    return Score(1.0) if pattern.fullmatch(item.answer) else Score(0.0, "does not match the reference pattern")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise BadReference("answer", f"{pattern[:80]!r} is not a regular expression: {error}") from error


def json_schema_scorer(schema: Mapping[str, Any]) -> Scorer:
    """Return a scorer that gives 1 for JSON that fits `schema`. If `schema` is empty, the reference answer is the schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    def validator(wanted: Mapping[str, Any]) -> Any:
        kind = validator_for(wanted, default=Draft202012Validator)
        kind.check_schema(wanted)
        return kind(wanted, registry=Registry())

    @lru_cache(maxsize=1024)
    def of_reference(text: str) -> Any:
        try:
            parsed = json.loads(text)
            if not isinstance(parsed, dict):
                raise BadReference("answer", "not a JSON Schema: an object is needed")
            return validator(parsed)
        except (SchemaError, ValueError) as error:
            problem = error.message if isinstance(error, SchemaError) else error
            raise BadReference("answer", f"not a JSON Schema: {problem}") from error

    try:
        of_recipe = validator(schema) if schema else None
    except SchemaError as error:
        raise FieldError("reward.json_schema", schema, f"not a JSON Schema: {error.message}") from error

    def score(item: RewardInput) -> Score:
        checks = of_recipe or of_reference(reference_answer(item))
        if item.answer is None:
            return NO_ANSWER
        try:
            given = json.loads(item.answer)
        except ValueError as error:
            return Score(0.0, f"not JSON: {error}")
        except RecursionError:
            return Score(0.0, _TOO_DEEP)
        try:
            problem = best_match(checks.iter_errors(given))
        except RecursionError as error:
            if _is_deep(given):
                return Score(0.0, _TOO_DEEP)
            raise BadReference("schema", "refers to itself without end, or is nested too deeply") from error
        except Unresolvable as error:
            raise BadReference("schema", f"refers to {error.ref}, which is not part of it") from error
        return Score(0.0, f"{problem.json_path}: {problem.message}"[:200]) if problem else Score(1.0)

    return score


_TOO_DEEP, _DEEP_LEVELS = "the answer is nested too deeply to be checked", 32


def _is_deep(given: Any) -> bool:
    """Return whether JSON is nested deeper than `_DEEP_LEVELS` levels."""
    level = [given]
    for _ in range(_DEEP_LEVELS):
        containers = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [inner for container in containers for inner in container]
    return bool(level)


def judge_scorer(config: JudgeConfig) -> Scorer:
    """Return a scorer that divides the judge's number by the full marks. Without a valid number, the item fails."""
    pattern = re.compile(config.pattern)

    def score(item: RewardInput) -> Score:
        found = [*pattern.finditer(item.judgement)]
        try:
            value = float(found[-1][1]) / config.full_marks
        except (IndexError, TypeError, ValueError):
            value = math.nan
        if not 0 <= value <= 1:
            fault = f"the last match of reward.judge.pattern is not a number from 0 to {config.full_marks:g}"
            raise BadReward(f"{fault} in the judge's answer: {item.judgement[-200:]!r}")
        if cut := re.match(r"(?!\.0+(?!\d))[.,]?\d+", item.judgement[found[-1].end(1) :]):
            fault = f"reward.judge.pattern takes only {found[-1][1]!r} of {found[-1][1] + cut[0]!r}"
            fix = r"let its group match the whole number, such as (\d+(?:\.\d+)?), and ask for a number without commas"
            raise BadReward(f"{fault}; {fix}")
        return Score(value, f"the judge says: {item.judgement[-400:].strip()}")

    return score
