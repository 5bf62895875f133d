"""Name why a recipe will not learn before it runs: rules over its fields, its problems and trial calls of its rewards.

Mistakes and doubts that `pipelinerl validate` finds are taken over. Tokens are counted if the tokenizer is on this machine.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pipelinerl.doctor.findings import Finding, Found, Gravity, Rule, Verdict, add_to, apply, ranked, worse
from pipelinerl.errors import FieldError, Lacking, UserError, counted
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.recipe.model_folder import known_parameters, token_counter
from pipelinerl.recipe.preflight import Examination, named_doubts
from pipelinerl.recipe.rehearsal import Call
from pipelinerl.rl.groups import CUTTING
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
_TOY = 2e7
"""Parameters below which a model learns at a hundred times the rate of a language model."""


@dataclass(frozen=True)
class RecipeView:
    """A recipe, the usable sources of its problems by place, and trial calls of its rewards. `parameters`: of the model, 0 if
    unknown. `count`: returns the tokens of the longest of some texts."""

    recipe: Recipe
    sources: Mapping[str, Source]
    calls: Sequence[Call] = ()
    parameters: int = 0
    count: Callable[[Iterable[str]], int] | None = None

    @property
    def is_toy(self) -> bool:
        return self.recipe.model.source == "package" or 0 < self.parameters < _TOY

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
    return apply(RECIPE_RULES, RecipeView(recipe, examined.sources, examined.calls, parameters, count))


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


# --- problems, prompts and rewards ------------------------------------------------------------------------------------------


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
def one_answer(view: RecipeView) -> Verdict:
    """Problems have the same answer, so the policy need not read them: 95 % of 20 references; grave if all."""
    for place, share, problems in view.files():
        answers = _answers(problems)
        (top, count), *_ = Counter(answers).most_common(1) or [("", 0)]
        if len(answers) >= 20 and count >= 0.95 * len(answers) and share.reward.scorer in _COMPARING:
            told = f"{count} of {len(answers)} are {top!r:.60}"
            return Found(worse(count, len(answers)), told, f"{place}task.answer_field", "name the column of the answer")
    return None


@rule("recipes.md#rewards")
def references_long(view: RecipeView) -> Verdict:
    """References are whole texts, which no completion repeats exactly: a median of 200 characters, compared exactly."""
    for place, share, problems in view.files():
        length = median(map(len, answers)) if (answers := _answers(problems)) else 0
        if share.reward.scorer in ("task", "exact") and length >= 200:
            fix = r"extract the final answer, as by '####\s*(.+)', or use reward.scorer: math"
            return Found("warning", f"{length:,.0f} characters", f"{place}task.answer_pattern", fix)
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


_OPERATORS = re.compile(r"\(\?[a-z]*:?|\\[sSdDwWbBnrtAZ][*+?]*\??|\[[^]]*\][*+?]*|\{\d*,?\d*\}|[*+?^$|.]")


def _marker(share: ProblemSet) -> str:
    """Return the text that the reward expects before the answer, such as `####` or `answer`; empty if it expects none."""
    before = re.sub(r"\((?!\?).*", "", re.sub(r"^\(\?[a-z]+\)", "", share.reward.answer_pattern), flags=re.DOTALL)
    return "boxed" if share.reward.scorer == "math_boxed" else re.sub(r"\\(\W)", r"\1", _OPERATORS.sub(" ", before)).strip()


@rule("recipes.md#rewards")
def form_unsaid(view: RecipeView) -> Verdict:
    r"""Nothing says in which form to answer: neither \boxed nor the beginning of reward.answer_pattern is in the prompts; grave
    if a small model of this package never writes it."""
    for place, share in view.recipe.tasks_by_place.items():
        marker, text = _marker(share), view.told(place).lower()
        if view.written and not re.search(share.reward.answer_pattern, view.written):
            told = f"the model writes {view.written!r}"
            return Found("grave", told, f"{place}reward.answer_pattern", "use the shipped recipe's")
        words = re.findall(r"[a-z]{2,}", marker.lower()) or [marker.lower()]
        if len(marker) >= 2 and not share.task.is_episodic and not view.is_toy and not all(word in text for word in words):
            field = "system_prompt" if share.task.prompt_style == "chat" else "instruction"
            return Found("warning", f"the reward looks for {marker!r}", f"{place}task.{field}", "say it there, with an example")
    return None


@rule("learning.md#truncated-completions")
def answers_too_long(view: RecipeView) -> Verdict:
    """Right answers do not fit into max_tokens: half of the references in their form, or what a small packaged model writes."""
    if view.tokens(view.written) > view.recipe.max_tokens:
        fix = f"is {view.recipe.max_tokens}; use 64"
        return Found("grave", f"the model writes {view.written!r}", "sampling.max_tokens", fix)
    for place, share, problems in view.files():
        lengths = [view.tokens(f"{_marker(share)} {one}") for one in _right_answers(share, problems)[:64]]
        if lengths and median(lengths) > share.max_tokens:
            fix = f"is {share.max_tokens}; use {2 * math.ceil(max(lengths))} or more"
            return Found("grave", f"median {median(lengths):.0f} tokens", f"{place or 'sampling.'}max_tokens", fix)
    return None


@rule("learning.md#truncated-completions")
def reasoning_cut(view: RecipeView) -> Verdict:
    """The prompt asks for reasoning that does not fit: under 128 tokens; under 1,024 for a model that thinks first."""
    model = view.recipe.model
    thinks = model.chat_template_kwargs.get("enable_thinking") is True or re.search(r"(?i)\b(r1|qwq|thinking)\b", model.name)
    for place, share in view.recipe.tasks_by_place.items():
        asks = re.search(r"(?i)step[- ]by[- ]step|<think>|think (carefully|first)|reason (about|first)", view.told(place))
        needed = 1024 if thinks else 128 if asks else 0
        if share.max_tokens < needed and not share.task.is_episodic:
            told = "the model thinks first" if thinks else f"the prompt says {asks[0]!r}" if asks else ""
            return Found("warning", told, f"{place or 'sampling.'}max_tokens", f"is {share.max_tokens}; use {4 * needed}")
    return None


@rule("recipes.md#tasks")
def stop_cuts_answers(view: RecipeView) -> Verdict:
    """A stop text ends completions before the answer: it is in half of the references or in the text before the answer
    (grave), or blank and prompts ask for steps."""
    answers = [answer for _, share, problems in view.files() for answer in _right_answers(share, problems)]
    told = "\n".join(map(view.told, view.recipe.tasks_by_place))
    markers = [_marker(share) for share in view.recipe.tasks_by_place.values()]
    for stop in view.recipe.sampling.stop:
        is_in_form = bool(stop.strip()) and any(stop.strip() in one for one in markers)
        if is_in_form or (answers and sum(stop in answer for answer in answers) >= 0.5 * len(answers)):
            return Found("grave", f"{stop!r} occurs in right answers", "sampling.stop", "leave it out")
        if not stop.strip() and re.search(r"(?i)step|reason|think|explain|boxed", told):
            return Found("warning", f"{stop!r}, but the prompt asks for steps", "sampling.stop", "leave it out")
    return None


@rule("recipes.md#rewards")
def format_outweighs(view: RecipeView) -> Verdict:
    """The format outweighs the answer: a weight below 0, or of reward.correct or more."""
    for place, share in view.recipe.tasks_by_place.items():
        reward = share.reward
        if not 0 <= reward.format_weight < reward.correct:
            return Found("warning", f"{reward.format_weight:g}", f"{place}reward.format_weight", f"use {reward.correct / 10:g}")
    return None


# --- sampling and learning ------------------------------------------------------------------------------------------------


@rule("learning.md#from-rewards-to-advantages")
def temperature(view: RecipeView) -> Verdict:
    """Completions of a group are too much alike, or too wild: a temperature below 0.5 (grave below 0.1) or above 1.5."""
    value = view.recipe.sampling.temperature
    return not 0.5 <= value <= 1.5 and Found(worse(-value, -0.1), f"{value:g}", "sampling.temperature", "use 1")


@rule("learning.md#learning-rate")
def learning_rate_high(view: RecipeView) -> Verdict:
    """The learning rate destroys the model: 5e-5, for adapters 2e-3, for a toy 0.01; grave from 20 times that."""
    lora, rate = view.recipe.trainer.lora is not None, view.recipe.trainer.learning_rate
    most, usual = (2e-3, 1e-5) if lora else (1e-2, 1e-4) if view.is_toy else (5e-5, 1e-6)
    return rate > most and Found(worse(rate, 20 * most), f"{rate:g}", "trainer.learning_rate", f"use about {usual:g}")


@rule("learning.md#learning-rate")
def learning_rate_low(view: RecipeView) -> Verdict:
    """The learning rate cannot change the policy: rate × steps, of 50 steps or more, under 3e-5 in 16 bits (half the spacing of
    bfloat16 at 0.02), 1e-6 in float32; grave from a tenth of that."""
    trainer, dtypes = view.recipe.trainer, (view.recipe.model.dtype, view.recipe.weights.wire_dtype)
    moved = trainer.learning_rate * max(1, trainer.steps - min(trainer.warmup_steps, trainer.steps) / 2)
    least = 3e-5 if "bfloat16" in dtypes and trainer.lora is None else 1e-6
    told, fix = f"a weight moves by at most {moved:.2g}", f"is {trainer.learning_rate:g}; use 1e-6 or more, a toy 1e-4"
    return moved < least and trainer.steps >= 50 and Found(worse(-moved, -least / 10), told, "trainer.learning_rate", fix)


@rule("learning.md#losses")
def penalty_dominates(view: RecipeView) -> Verdict:
    """A penalty outweighs the reward: algorithm.kl_coefficient from 1, entropy_coefficient from 0.1."""
    kl, entropy = view.recipe.algorithm.kl_coefficient, view.recipe.algorithm.entropy_coefficient
    if kl >= 1:
        return Found("warning", f"{kl:g}", "algorithm.kl_coefficient", "use 0 to 0.05")
    return entropy >= 0.1 and Found("warning", f"{entropy:g}", "algorithm.entropy_coefficient", "use 0 to 0.01")


@rule("learning.md#losses")
def bounds_narrow(view: RecipeView) -> Verdict:
    """The loss's bounds keep few tokens, or all: clip ranges under 0.01 (above 0.05 for gspo), masks within 10 % of 1."""
    algorithm = view.recipe.algorithm
    low, high, clip = algorithm.mask_low, algorithm.mask_high, max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.mask in ("icepop", "sequence") and (low > 0.9 or high < 1.1):
        return Found(worse(low - high, -0.02), f"π / μ from {low:g} to {high:g}", "algorithm.mask_low", "use 0.5, mask_high 5")
    if algorithm.loss == "gspo":
        told = f"{clip:g} for whole sequences"
        return clip > 0.05 and Found("warning", told, "algorithm.clip_high", "use 4e-4, clip_low 3e-4")
    return algorithm.loss in CUTTING and clip < 0.01 and Found("warning", f"{clip:g}", "algorithm.clip_high", "use 0.2")
