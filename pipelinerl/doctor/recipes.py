"""Name why a recipe will not learn before it runs: rules over its fields, its problems and trial calls of its rewards.

Mistakes and doubts that `pipelinerl validate` finds are taken over. Tokens are counted if the tokenizer is on this machine.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from pipelinerl.doctor.findings import Finding, Found, Gravity, Rule, Verdict, add_to, apply, percent, ranked, worse
from pipelinerl.doctor.settings import SETTINGS_RULES, Settings
from pipelinerl.errors import FieldError, Lacking, UserError, counted
from pipelinerl.recipe.fields import ProblemSet, Recipe, RewardConfig
from pipelinerl.recipe.model_folder import known_parameters, token_counter
from pipelinerl.recipe.preflight import Examination, named_doubts
from pipelinerl.recipe.rehearsal import Call, answer_forms
from pipelinerl.rl.groups import groups_per_step
from pipelinerl.tasks.final_answer import final_answer
from pipelinerl.tasks.source import FileSource, Problem, Source, Split

MISTAKE, LACKING, UNPAID = "recipe-mistake", "machine-lacks", "references-unpaid"
ADOPTED = {
    MISTAKE: ("The recipe cannot run", "errors.md#before-a-run"),
    UNPAID: ("The reward gives reference answers no more than an empty text", "recipes.md#rewards"),
    "answers-empty": ("Problems have no reference answer", "recipes.md#tasks"),
    "references-misread": ("The scorer does not read some references as answers", "recipes.md#rewards"),
    "template": ("The chat template and the prompts do not fit", "recipes.md#chat-templates"),
    "prompts-repeated": ("Prompts occur several times", "recipes.md#tasks"),
    "warmup-too-long": ("The learning rate never reaches its value", "learning.md#learning-rate"),
    "max-lag-too-small": ("The lag limit is below the lag that full actors cause", "architecture.md#staleness"),
    LACKING: ("This machine lacks something that the recipe needs", "errors.md#before-a-run"),
}
"""Meanings and pages of the findings that other checks of a recipe make, by id."""
RECIPE_RULES: list[Rule] = []
rule = add_to(RECIPE_RULES)
_MOST_ROWS = 2000
_COMPARING = ("task", "exact", "math", "math_boxed")
"""Scorers whose reference is a right answer."""
_WRITTEN = {"arithmetic": "3+4+2+5=7;7+2=9;9+5=14;#14", "repeated-addition": "01x5+5731=00x5+5736"}
"""Example of the only form in which each small model of this package writes. No prompt can ask for another one."""


@dataclass(frozen=True)
class RecipeView(Settings):
    """A recipe with the usable sources of its problems by place, and trial calls of its rewards. `count` returns the tokens of
    the longest of some texts."""

    sources: Mapping[str, Source] = field(default_factory=dict)
    calls: Sequence[Call] = ()
    count: Callable[[Iterable[str]], int] | None = None

    @property
    def written(self) -> str:
        """A completion of a small model of this package; empty for other models."""
        return _WRITTEN.get(self.recipe.model.name, "") if self.recipe.model.source == "package" else ""

    def files(self) -> Iterator[tuple[str, ProblemSet, list[Problem]]]:
        """Yield place, set and first problems of each set of single questions that is read from files."""
        for place, source in self.sources.items():
            share = self.recipe.sets_by_place[place]
            if isinstance(source, FileSource) and not share.task.is_episodic:
                yield place, share, list(source.problems[:_MOST_ROWS])

    def tokens(self, text: str) -> float:
        """Return the number of tokens of a text or, without a tokenizer, a lower estimate."""
        return self.count([text]) if self.count is not None else len(text) / 6

    def told(self, place: str) -> str:
        """Return what tells the policy in which form to answer: the set's fields, the template, and its first problems."""
        task, source = self.recipe.sets_by_place[place].task, self.sources.get(place)
        is_known = source is not None and not task.is_episodic
        shown = [source.problem(Split.TRAIN, index) for index in range(8)] if source is not None and is_known else []
        fields = (task.instruction, task.system_prompt, task.prompt_template, self.recipe.model.chat_template)
        return "\n".join([*fields, *(text for problem in shown for text in problem.texts)])


def findings_of(recipe: Recipe, examined: Examination, problems: Iterable[FieldError] = ()) -> list[Finding]:
    """Return all findings about a recipe, the cause first. `problems`: further mistakes, such as too little memory."""
    found = [(LACKING if isinstance(one, Lacking) else MISTAKE, one) for one in (*examined.problems, *problems)]
    found = sorted([*found, *named_doubts(recipe, examined)], key=lambda one: [*ADOPTED].index(one[0]))
    return ranked([*(adopted(id_, problem, recipe) for id_, problem in found), *quick_findings(recipe, examined)])


def quick_findings(recipe: Recipe, examined: Examination) -> list[Finding]:
    """Return the findings of the rules alone. This takes a fraction of a second after the examination."""
    try:
        parameters, count = known_parameters(recipe.model), token_counter(recipe.model)
    except (UserError, OSError):  # a mistake in the model's folder, which `examine` reports
        parameters, count = 0, None
    return apply((*RECIPE_RULES, *SETTINGS_RULES), RecipeView(recipe, parameters, examined.sources, examined.calls, count))


def adopted(id_: str, problem: FieldError, recipe: Recipe | None = None) -> Finding:
    """Return a finding for a problem that another check has found."""
    gravity: Gravity = "grave" if id_ in (MISTAKE, UNPAID) else "note" if id_ == LACKING else "warning"
    if id_ == UNPAID and recipe and recipe.sets_by_place[problem.field.removesuffix("reward.scorer")].reward.is_function:
        gravity = "warning"  # the function may want more than the bare answer
    meaning, docs = ADOPTED[id_]
    told = f"{problem.field} = {problem.value!r:.120}"
    return Finding(gravity, told, problem.field, problem.fix, id=id_, meaning=meaning, docs=f"docs/{docs}")


def _answers(problems: Iterable[Problem]) -> list[str]:
    return [answer for one in problems if (answer := str(one.reference.get("answer") or "").strip())]


def _right_answers(share: ProblemSet, problems: Iterable[Problem]) -> list[str]:
    """Return what a right completion has in the place of the answer, if the scorer compares it with the reference."""
    scorer = share.reward.scorer
    return [final_answer(one) if "math" in scorer else one for one in _answers(problems)] if scorer in _COMPARING else []


_OPERATORS = re.compile(r"\(\?[a-z]*:?|\\[sSdDwWbBnrtAZ][*+?]*\??|\[[^]]*\][*+?]*|\{\d*,?\d*\}|[*+?^$|.()]")


def _literal(pattern: str) -> str:
    """Return the text that a pattern expects before its group, such as `####` or `answer`; empty if it expects none."""
    before = re.sub(r"\((?!\?).*", "", re.sub(r"^\(\?[a-z]+\)", "", pattern), flags=re.DOTALL)
    return re.sub(r"\\(\W)", r"\1", _OPERATORS.sub(" ", before)).strip()


def _marker(reward: RewardConfig) -> str:
    """Return the text that the reward expects before the answer."""
    return "boxed" if reward.scorer == "math_boxed" else _literal(reward.answer_pattern)


def _thinks(recipe: Recipe) -> bool:
    """Return whether the model writes its reasoning before an answer, without being asked."""
    named = re.search(r"(?i)\b(r1|qwq|thinking|qwen3)\b", recipe.model.name)
    asked = recipe.model.chat_template_kwargs.get("enable_thinking")
    return asked is True or (asked is None and named is not None)


def _asks_for_steps(told: str) -> re.Match[str] | None:
    return re.search(r"(?i)step[- ]by[- ]step|<think>|think (carefully|first)|reason (about|first)", told)


# --- problems ---------------------------------------------------------------------------------------------------------------


@rule("recipes.md#tasks")
def prompts_fill_context(view: RecipeView) -> Verdict:
    """Prompts leave no room for an answer: the longest one reaches model.max_context; grave if the median one does."""
    limit = view.recipe.model.max_context
    for place, _, problems in view.files():
        texts = sorted(("\n".join(one.texts) for one in problems), key=len)
        if (longest := view.tokens(texts[-1])) >= limit:
            middle = view.tokens(texts[len(texts) // 2])
            fix = f"is {limit:,}; raise it, or leave long problems out of {place}task.path"
            return Found(worse(middle, limit), f"median {middle:,.0f}, longest {longest:,.0f} tokens", "model.max_context", fix)
    return None


@rule("recipes.md#tasks")
def columns_mixed(view: RecipeView) -> Verdict:
    """A wrong column is read: 90 % of 8 prompts are, or end with, their answer, or have it after the text that the reward looks
    for; or 90 % of 20 answers count the rows."""
    for place, share, problems in view.files():
        rows = [("\n".join(one.texts), answer) for one in problems for answer in _answers([one])]
        before = rf"|{re.escape(marker)}\W*" if (marker := _marker(share.reward)) else ""
        shown = [text for text, answer in rows if re.search(rf"(\A{before})\W*{re.escape(answer)}(?!\w)|"
                                                            rf"(?<!\w){re.escape(answer)}\W*\Z", text)]  # fmt: skip
        if len(shown) >= max(8, 0.9 * len(rows)):
            return Found("grave", f"prompts such as {shown[0]!r:.200}", f"{place}task.prompt_field", "leave the answer out")
        numbers = [int(answer) for _, answer in rows if answer.isdecimal()]
        if sum(after == one + 1 for one, after in pairwise(numbers)) >= max(20, 0.9 * len(rows)):
            told = f"answers {', '.join(map(str, numbers[:4]))}, ..."
            return Found("grave", told, f"{place}task.answer_field", "name the column of the answer")
    return None


@rule("recipes.md#tasks")
def one_answer(view: RecipeView) -> Verdict:
    """Problems have the same answer, so the policy need not read them: 95 % of 20 references; grave if all."""
    for place, share, problems in view.files():
        answers = _answers(problems)
        (top, count), *_ = Counter(answers).most_common(1) or [("", 0)]
        if len(answers) >= 20 and count >= 0.95 * len(answers) and share.reward.scorer in _COMPARING:
            told = f"{count} of {len(answers)} are {top!r:.60}"
            return Found(worse(count, len(answers)), told, f"{place}task.answer_field", "name the column of the answer")
    return None


_DRESSED = re.compile(r"[$€£]\s*-?\d[\d.,]*|-?\d{1,3}(,\d{3})+(\.\d+)?|-?\d[\d.,]*\s*(%|[A-Za-z]{2,12})")


def _lost_references(view: RecipeView, place: str, share: ProblemSet, answers: list[str]) -> tuple[list[str], int]:
    """Return the references that no completion earns anything with, and the number of those examined. Patterns are tried on
    completions in their form; if that form is not known, the trial calls count."""
    pattern = share.reward.answer_pattern

    def is_lost(answer: str) -> bool:
        found = ([*re.finditer(pattern, text)][-1:] for text, _ in answer_forms(share, answer))
        return not any(one and (one[0][1] or "").strip() == answer for one in found)

    is_known = pattern and share.reward.scorer in ("task", "exact") and not all(map(is_lost, ("7", "yes", "A", "x")))
    if is_known and (lost := [*filter(is_lost, answers)]):
        return lost, len(answers)
    tried = [one for one in view.calls if one.place == place and one.completion and not one.near_miss and one.status == "ok"]
    lost = [one.completion for one in tried if one.reward <= 0]
    return (lost, len(tried)) if len(lost) < len(tried) else ([], 0)  # `references-unpaid` reports that all earn nothing


@rule("recipes.md#rewards")
def references_unmatched(view: RecipeView) -> Verdict:
    """References are not what completions have as answers: a median of 8 words, or 5 % of the numbers with a unit or separators
    if texts are compared; or 5 % of 200 earn nothing in the form of reward.answer_pattern, or when tried (grave: half)."""
    for place, share, problems in view.files():
        answers = _right_answers(share, problems)[:200]
        lost, num = _lost_references(view, place, share, answers)
        dressed = [one for one in answers if _DRESSED.fullmatch(one)] if "math" not in share.reward.scorer else []
        if answers and median(len(answer.split()) for answer in answers) >= 8:
            fix = r"extract the final answer, as by '####\s*(.+)'"
            return Found("warning", f"such as {answers[0]!r:.200}", f"{place}task.answer_pattern", fix)
        if len(lost) > 0.05 * num:
            told, fix = (
                f"{percent(len(lost) / num)} of {num}, such as {lost[0]!r:.80}",
                "must find it; or correct the references",
            )
            return Found(worse(len(lost), num / 2), told, f"{place}reward.answer_pattern", fix)
        if len(dressed) > 0.05 * len(answers):
            told = f"{percent(len(dressed) / len(answers))}, such as {dressed[0]!r:.80}"
            return Found("warning", told, f"{place}reward.scorer", "use math, which compares values, or bare numbers")
    return None


_IGNORED = str.maketrans("", "", string.punctuation + string.whitespace)


def _plain(problem: Problem) -> str:
    return "".join(problem.texts).lower().translate(_IGNORED)


@rule("recipes.md#evaluation")
def heldout_trained_on(view: RecipeView) -> Verdict:
    """Held-out problems are also trained on: 5 % of a set's, compared without case, punctuation and spaces."""
    files = {place: source for place, source in view.sources.items() if isinstance(source, FileSource)}
    held = {place: [one.problem(Split.HELDOUT, index) for index in range(one.num_heldout)] for place, one in files.items()}
    asked, trained = {_plain(one) for problems in held.values() for one in problems}, set[str]()
    for place in view.recipe.tasks_by_place.keys() & files.keys():
        kept = set(map(id, held[place]))
        trained |= {text for one in files[place].problems if id(one) not in kept and (text := _plain(one)) in asked}
    for place, problems in held.items():
        if (known := sum(_plain(one) in trained for one in problems)) > 0.05 * len(problems):
            told = f"{known} of {counted(len(problems), 'problem')}"
            fix = "take them out of the training data, which the accuracy now repeats"
            return Found("warning", told, f"{place}task.path", fix)
    return None


@rule("recipes.md#chat-templates")
def template_unused(view: RecipeView) -> Verdict:
    """An instruction-tuned model gets prompts without its chat template: a model named Instruct, Chat or it, and plain."""
    model = view.recipe.model
    tuned = re.search(r"(?i)(?<![a-z])(instruct|chat|it|thinking)(?![a-z])", model.name.rpartition("/")[2])
    tasks = {place: one.task for place, one in view.recipe.tasks_by_place.items()}
    plain = [place for place, task in tasks.items() if task.prompt_style == "plain" and not task.is_episodic]
    if not plain or model.source == "package" or not (tuned or model.source == "smollm2"):
        return None
    return Found("warning", model.name or model.source, f"{plain[0]}task.prompt_style", "is plain; use chat, or a base model")


_CONTROL = re.compile(
    r"""(?i)<\|\w+\|>|\[/?INST\]|<(start|end)_of_turn>|</?s>|<<SYS>>|\A\s*\[\{"role":|\n(assistant|ai):\s*\Z"""
)


@rule("recipes.md#chat-templates")
def template_twice(view: RecipeView) -> Verdict:
    """Prompts spell parts of a chat template, which the model reads as plain text: half of the prompts, or a field."""
    for place, share in view.recipe.tasks_by_place.items():
        task, problems = share.task, [one for at, _, problems in view.files() if at == place for one in problems]
        spelled = [found[0] for one in problems if (found := _CONTROL.search("\n".join(one.texts)))]
        for name in ("system_prompt", "instruction", "prompt_template"):
            if found := _CONTROL.search(getattr(task, name)):
                return Found("warning", repr(found[0]), f"{place}task.{name}", "leave it out; prompt_style: chat writes it")
        if task.prompt_style != "compact" and spelled and len(spelled) >= 0.5 * len(problems):
            told, fix = f"{spelled[0]!r} in {counted(len(spelled), 'prompt')}", "give bare questions, and prompt_style: chat"
            return Found("warning", told, f"{place}task.path", fix)
    return None


@rule("recipes.md#tasks")
def problems_few(view: RecipeView) -> Verdict:
    """Few problems are trained on very often, so that the policy may learn them by heart: each 100 times, a note."""
    for place in view.recipe.tasks_by_place:
        if isinstance(source := view.sources.get(place), FileSource):
            num, groups = len(source.problems) - source.num_heldout, view.recipe.trainer.steps * groups_per_step(view.recipe)
            if (times := groups / num / len(view.recipe.tasks_by_place)) >= 100:
                told = f"{counted(num, 'problem')}, each {times:.0f} times"
                return Found("note", told, f"{place}task.path", "add problems, or watch the held-out accuracy")
    return None


@rule("recipes.md#evaluation")
def evaluation_blind(view: RecipeView) -> Verdict:
    """Evaluations say nothing: they are further apart than the run is long, or have one problem; a note."""
    steps, every = view.recipe.trainer.steps, view.recipe.evaluation.every_steps
    for place, share in view.recipe.tasks_by_place.items():
        if share.task.heldout_problems == 1:
            return Found("note", "an accuracy of 0 or 1", f"{place}task.heldout_problems", "hold out 32 or more")
    fix = f"use {max(1, steps // 10)}, or 0 for the first and last only"
    return every > max(steps, 100) and Found("note", f"{every} of {steps} steps", "evaluation.every_steps", fix)


# --- rewards and answers ----------------------------------------------------------------------------------------------------


@rule("recipes.md#rewards")
def terms_outweigh(view: RecipeView) -> Verdict:
    """Another term outweighs the answer: format_weight below 0, or of reward.correct or more; an overlong penalty of twice it,
    or for half of max_tokens. Or any text earns the format term."""
    for place, share in view.recipe.tasks_by_place.items():
        reward, overlong = share.reward, share.reward.overlong
        if not 0 <= reward.format_weight < reward.correct:
            return Found("warning", f"{reward.format_weight:g}", f"{place}reward.format_weight", f"use {reward.correct / 10:g}")
        if reward.format_pattern and re.fullmatch(reward.format_pattern, "", re.DOTALL):
            return Found("warning", "it matches an empty text", f"{place}reward.format_pattern", "name what must be there")
        if overlong.buffer_tokens and overlong.penalty > 2 * reward.correct:
            return Found("warning", f"{overlong.penalty:g}", f"{place}reward.overlong.penalty", f"use {reward.correct:g}")
        if overlong.buffer_tokens > share.max_tokens / 2:
            told, fix = f"{overlong.buffer_tokens} of {share.max_tokens} tokens", f"use {share.max_tokens // 4}"
            return Found("warning", told, f"{place}reward.overlong.buffer_tokens", fix)
    return None


def _is_said(words: list[str], text: str) -> bool:
    """Return whether the text has all words, other than in a prohibition such as `do not use \\boxed`."""
    forbidden = rf"(?i)\b(?:not|never|no|without|avoid|omit)\s+(?:\w+\s+){{0,2}}\W?{re.escape(words[0])}"
    return all(word in re.sub(forbidden, "", text) for word in words)


@rule("recipes.md#rewards")
def form_unsaid(view: RecipeView) -> Verdict:
    r"""Nothing says in which form to answer: \boxed, the beginning of reward.answer_pattern or the text of format_pattern is
    not in the prompts, or forbidden there (grave if a small model of this package never writes it); or the pattern begins with
    ^, and prompts ask for steps."""
    for place, share in view.recipe.tasks_by_place.items():
        pattern, told = share.reward.answer_pattern, view.told(place)
        if view.written and not re.search(pattern, view.written):
            evidence = f"the model writes {view.written!r}"
            return Found("grave", evidence, f"{place}reward.answer_pattern", "use the shipped recipe's")
        if share.task.is_episodic or view.is_toy:
            continue
        if re.match(r"\^|\\A", pattern) and _asks_for_steps(told):
            return Found("warning", pattern, f"{place}reward.answer_pattern", "leave out its ^, as steps come first")
        told = told.lower() if pattern.startswith("(?i)") else told
        place += f"task.{'system_prompt' if share.task.prompt_style == 'chat' else 'instruction'}"
        for marker in (_marker(share.reward), _literal(share.reward.format_pattern)):
            words = re.findall(r"[A-Za-z]{2,}", marker.lower() if told.islower() else marker) or [marker]
            if len(marker) >= 2 and not (_thinks(view.recipe) and "think" in words) and not _is_said(words, told):
                return Found("warning", f"the reward looks for {marker!r}", place, "say it there, with an example")
    return None


@rule("learning.md#truncated-completions")
def max_tokens_small(view: RecipeView) -> Verdict:
    """Answers do not fit into max_tokens: half of the references in their form, or what a small packaged model writes (grave);
    or prompts ask for reasoning, and it is under 128 tokens; under 1,024 for a model that thinks first."""
    answers = {at: _right_answers(share, problems)[:64] for at, share, problems in view.files()}
    for place, share in view.recipe.tasks_by_place.items():
        limit, where = share.max_tokens, f"{place or 'sampling.'}max_tokens"
        written = [view.written] if view.written else [f"{_marker(share.reward)} {one}" for one in answers.get(place, ())]
        longest, middle = max(map(view.tokens, written), default=0), median([*map(view.tokens, written)] or [0])
        if middle > limit:
            told, fix = f"{middle:.0f} tokens, such as {written[0]!r:.80}", f"is {limit}; use {2 * math.ceil(longest)} or more"
            return Found("grave", told, where, fix)
        asks = None if share.task.is_episodic else _asks_for_steps(view.told(place))
        needed = 0 if share.task.is_episodic else 1024 if _thinks(view.recipe) else 128 if asks else 0
        if limit < needed:
            told = f"the prompt says {asks[0]!r}" if asks else "the model thinks first"
            return Found("warning", told, where, f"is {limit}; use {4 * needed}")
    return None


@rule("recipes.md#tasks")
def stop_cuts_answers(view: RecipeView) -> Verdict:
    """A stop text ends completions before the answer: it is in 5 % of the references (grave: half), in the text before answers
    (grave), in the instructions, or it is blank or one character, and prompts ask for steps."""
    answers = [answer for _, share, problems in view.files() for answer in _right_answers(share, problems)]
    shares = view.recipe.tasks_by_place.values()
    told = "\n".join(map(view.told, view.recipe.tasks_by_place))
    fields = "\n".join(f"{share.task.system_prompt}\n{share.task.instruction}" for share in shares)
    for stop in view.recipe.sampling.stop:
        bare = stop.strip()
        is_in_form = bool(bare) and any(bare in _marker(share.reward) for share in shares)
        if is_in_form or (answers and sum(stop in answer for answer in answers) > 0.05 * len(answers)):
            common = sum(stop in answer for answer in answers) / max(1, len(answers))
            gravity = "grave" if is_in_form else worse(common, 0.5)
            return Found(gravity, f"{stop!r} occurs in right answers", "sampling.stop", "leave it out")
        is_short = len(bare) <= 1 and re.search(r"(?i)step|reason|think|explain|boxed", told)
        if is_short or (bare and bare in fields):
            why = "the prompt asks for steps" if is_short else "the prompt tells the policy to write it"
            return Found("warning", f"{stop!r}, but {why}", "sampling.stop", "leave it out")
    return None


@rule("recipes.md#another-model-as-judge")
def judge_misled(view: RecipeView) -> Verdict:
    """The judge cannot mark well: its template has neither {prompt} nor {reference}, does not ask for the form of the pattern,
    or gives another highest mark than full_marks."""
    for place, share in view.recipe.tasks_by_place.items():
        if (judge := share.reward.judge) is None:
            continue
        words = re.findall(r"[a-z]{2,}", _literal(judge.pattern).lower())
        marks = [float(one) for one in re.findall(r"(?i)(?:\d\s*(?:to|-|–)|out of)\s*(\d+)", judge.template)]
        if not re.search(r"\{(prompt|reference)\}", judge.template):
            return Found(
                "warning", "it has neither", f"{place}reward.judge.template", "add the problem, {prompt}, or {reference}"
            )
        if words and not _is_said(words, judge.template.lower()):
            fix = "ask for this form, with an example"
            return Found("warning", f"the pattern is {judge.pattern!r}", f"{place}reward.judge.template", fix)
        if marks and judge.full_marks not in marks:
            fix = f"is {judge.full_marks:g}; use {max(marks):g}"
            return Found("warning", f"the template says {max(marks):g}", f"{place}reward.judge.full_marks", fix)
    return None
