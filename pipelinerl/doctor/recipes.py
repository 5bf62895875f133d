"""Find out before a run why it will not learn: rules over the recipe's problem sets, and over trial calls of rewards.

Mistakes and doubts that `pipelinerl validate` finds become findings. Without a local tokenizer, token counts are estimates.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from statistics import fmean, median, stdev

from pipelinerl.doctor.findings import Finding, Gravity, Rows, apply, percent, ranked
from pipelinerl.doctor.settings import SETTINGS_RULES, Settings
from pipelinerl.errors import FieldError, Lacking, UserError, counted
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.model_folder import known_parameters, token_counter
from pipelinerl.recipe.preflight import Examination, doubts, files_in
from pipelinerl.recipe.rehearsal import reads, written
from pipelinerl.rl.groups import groups_per_step
from pipelinerl.tasks.final_answer import bare_answer, final_answer
from pipelinerl.tasks.source import Problem, Split, conversation

MISTAKE, LACKING, UNPAID = "recipe-mistake", "machine-lacks", "references-unpaid"
ADOPTED: dict[str, tuple[Gravity, str, str]] = {
    MISTAKE: ("grave", "The recipe cannot run", "errors.md#before-a-run"),
    UNPAID: ("grave", "The reward gives a reference answer no more than an empty one", "recipes.md#rewards"),
    "answers-empty": ("warning", "Problems have no reference answer", "recipes.md#tasks"),
    "references-misread": ("warning", "The scorer does not read some references as answers", "recipes.md#rewards"),
    "template": ("warning", "The chat template does not fit the prompts", "recipes.md#chat-templates"),
    "prompts-repeated": ("warning", "Prompts occur several times", "recipes.md#tasks"),
    "warmup-too-long": ("warning", "The learning rate never reaches its full value", "learning.md#learning-rate"),
    "fields-unused": ("warning", "Fields are set that have no effect", "errors.md#before-a-run"),
    "max-lag-too-small": ("warning", "The lag limit is below the lag that busy actors cause", "architecture.md#staleness"),
    LACKING: ("note", "This machine lacks something that the recipe needs", "errors.md#before-a-run"),
}
"""Gravity, meaning and page of each finding of the checks of `pipelinerl validate`, by id. Causes precede effects."""
_MOST_ROWS, _PROBES = 2000, ("7", "yes", "A", "x")
_COMPARING = ("task", "exact", "math", "math_boxed")
"""Scorers whose reference is a right answer."""
_WRITTEN = {"arithmetic": "3+4+2+5=7;7+2=9;9+5=14;#14", "repeated-addition": "01x5+5731=00x5+5736"}
"""Example output of two small models of this package. Each writes in no other form, whatever the prompt asks for."""
_NAMES = re.compile(r"(?i)[0-9a-f-]{16,}|\S+\.(txt|jsonl?|md|py|png|jpe?g|wav|mp[34]|pdf)|https?://\S+")
"""Matches a prompt that only names something: a hash, a file or an address."""
_NUMBERED = r"[\W_]*[^\W\d_]{0,10}[\W_]*(\d+)[\W_]*"
"""Matches a text that is hardly more than a number, such as `question-17`."""
_CHOICE = re.compile(r"(?s)\bA\b.*\bB\b|\bA\s?(to|-|–)\s?[B-Z]\b|[Ww]hich letter")
_ANY_CASE = re.compile(r"(?i)\A\(\?[a-z]*i|\[([a-z])\1]")
"""Matches a pattern that ignores case, or accepts a letter in both cases, such as `[Aa]nswer`."""
_STEPS = re.compile(r"(?i)step[- ]by[- ]step|<think>|think (carefully|first)|reason (about|first)")
_THINKING = re.compile(r"(?i)\b(r1|qwq|thinking|qwen3)\b(?!.*(instruct|base|coder))")
_IGNORED = str.maketrans("", "", string.punctuation + string.whitespace)


def _literal(pattern: str) -> str:
    """Return the text that a regex expects before its group, such as `####` or `answer`; empty if it expects none."""
    return written(pattern, "\0").partition("\0")[0].strip()


class SetView(Settings):
    """A problem set of an examined recipe, with the facts that rules need."""

    def __init__(self, recipe: Recipe, examined: Examination, place: str, held: Sequence[Problem], trained: set[str]) -> None:
        """`held`: the set's held-out problems from files. `trained`: held-out texts (see `_plain`) that are also trained on."""
        self.place, self.share, model, count = place, recipe.sets_by_place[place], recipe.model, None
        parameters = 0
        with suppress(UserError, OSError):  # a mistake in the model's folder, which `examine` reports
            parameters, count = known_parameters(model), token_counter(model)
        task, reward, file = self.share.task, self.share.reward, dict(files_in(examined.sources)).get(place)
        source = None if task.is_episodic else examined.sources.get(place)
        self.calls = [one for one in examined.calls if one.place == place and one.status == "ok"]
        earned = max((abs(one.reward) for one in self.calls if reward.is_function), default=0.0)
        super().__init__(recipe, parameters, {place: earned} if earned else {})
        self.num_trained = len(file.problems) - len(held) if file and place in recipe.tasks_by_place else 0
        self.num_heldout, self.known = len(held), [one.question for one in held if _plain(one) in trained]

        # The first problems, if they come from files and are no episodes, and the answers that completions are compared with.
        problems = file.problems[:_MOST_ROWS] if file and source else []
        self.roles = {str(message["role"]) for one in problems for message in one.messages}
        self.texts = ["\n".join(one.texts) for one in problems]
        said = ([str(message["content"]) for message in one.messages if message["role"] != "assistant"] for one in problems)
        self.asked = ["\n".join(texts) or one.question for texts, one in zip(said, problems, strict=True)]
        given = [one.reference for one in problems]
        self.references = [str(one.get("answer") or "").strip() for one in given]
        self.columns = [str(one.get("row", {}).get(task.answer_field) or one.get("answer")) for one in given]
        right = [*filter(None, self.references)] if reward.scorer in _COMPARING else []
        self.answers = [*map(final_answer, right)] if "math" in reward.scorer else right

        # The texts that tell the policy how to answer, the words that ask for steps, and what the reward looks for.
        shown = [source.problem(Split.HELDOUT, index) for index in range(min(8, source.num_heldout))] if source else []
        asked = (one.messages or [{"role": "user", "content": one.question}] for one in shown or [Problem("")])
        prompts = [str(message["content"]) for messages in asked for message in conversation(messages, task)]
        self.told = "\n".join((task.prompt_template, model.chat_template, *prompts))
        self.steps = match[0] if (match := _STEPS.search(self.told)) else ""
        self.marker = {"math_boxed": r"\boxed", "json_schema": "JSON"}.get(reward.scorer) or _literal(reward.answer_pattern)

        # Does the model reason unasked? What does a small packaged model write? Does the template begin the reasoning?
        is_asked, named = model.chat_template_kwargs.get("enable_thinking"), _THINKING.search(model.name)
        self.thinks = is_asked is True or (is_asked is None and named is not None)
        self.written = _WRITTEN.get(model.name, "") if model.source == "package" else ""
        self.opened = any(re.search(r"<think>⟩?[\s|]*\Z", text) for _, text in examined.preview.rows)
        self._count = count

    def tokens(self, text: str) -> float:
        """Return the number of tokens of a text or, without a tokenizer, a low estimate."""
        return self._count([text]) if self._count else len(text) / 6

    @property
    def indifference(self) -> str:
        """Evidence from trial calls that the user's function rewards wrong answers: these earn about as much as right ones on
        average, or each wrong number that contains the right one earns as much as a right answer. Empty if there is none."""
        rewards, empty = ([one.reward for one in self.calls if any_ or not one.completion] for any_ in (True, False))
        right = [one.reward for one in self.calls if one.completion and not one.near_miss]
        wrong = [one.reward for one in self.calls if one.near_miss and self.share.reward.is_function]
        if not right or len(wrong) < 4 or max(rewards) in empty:
            return ""
        if fmean(right) - fmean(wrong) <= 0.1 * (max(rewards) - min(rewards)):
            return f"{len(right)} right answers earn {fmean(right):.3g}, {len(wrong)} wrong ones {fmean(wrong):.3g} on average"
        longer = [one for one in self.calls if one.near_miss[1:-1] == str(one.problem.reference.get("answer")).strip()]
        is_paid = len(longer) >= 4 and min(one.reward for one in longer) >= max(right)
        return f"numbers that contain the right one, such as {longer[0].near_miss}, earn as much as it" if is_paid else ""


def _plain(problem: Problem) -> str:
    return "".join(problem.texts).lower().translate(_IGNORED)


def _views(recipe: Recipe, examined: Examination) -> Iterator[SetView]:
    files = dict(files_in(examined.sources))
    held = {place: [one.problem(Split.HELDOUT, index) for index in range(one.num_heldout)] for place, one in files.items()}
    plain, trained = {_plain(one) for problems in held.values() for one in problems}, set[str]()
    for place in recipe.tasks_by_place.keys() & files.keys():
        kept = set(map(id, held[place]))
        trained |= {text for one in files[place].problems if id(one) not in kept and (text := _plain(one)) in plain}
    for place in recipe.sets_by_place:
        yield SetView(recipe, examined, place, held.get(place, []), trained)


def findings_of(recipe: Recipe, examined: Examination, problems: Iterable[FieldError] = ()) -> list[Finding]:
    """Return all findings about a recipe, ranked. `problems`: further mistakes, such as too little memory."""
    found = [(LACKING if isinstance(one, Lacking) else MISTAKE, one) for one in (*examined.problems, *problems)]
    kinds = {(id_, one.field): (id_, one) for id_, one in reversed([*doubts(recipe, examined)])}  # the first of each kind
    found = sorted([*found, *reversed(kinds.values())], key=lambda one: [*ADOPTED].index(one[0]))
    return ranked([*(adopted(id_, problem, recipe) for id_, problem in found), *quick_findings(recipe, examined)])


def quick_findings(recipe: Recipe, examined: Examination) -> list[Finding]:
    """Return the findings of the doctor's rules, without those of `pipelinerl validate` (`ADOPTED`), in under a second."""
    return apply((*RECIPE_RULES, *SETTINGS_RULES), *_views(recipe, examined))


def adopted(id_: str, problem: FieldError, recipe: Recipe | None = None) -> Finding:
    """Return a finding of the kind `id_` for a problem that a check of `pipelinerl validate` has found."""
    gravity, meaning, page = ADOPTED[id_]
    if id_ == UNPAID and recipe:
        share = recipe.sets_by_place[problem.field.removesuffix("reward.scorer")]
        if share.reward.is_function or (share.reward.answer_pattern and not reads(share, *_PROBES)):
            gravity = "warning"  # it may expect answers in a form that was not tried
    told = f"{problem.field} = {problem.value!r:.120}"
    return Finding(id_, gravity, told, problem.field, problem.fix, meaning=meaning, docs=f"docs/{page}")


_MISSING = re.compile(r"(?i)nan|none|null|n/a|undefined")
_CONTROL = re.compile(r"""(?i)<\|\w+\|>|\[/?INST\]|<(start|end)_of_turn>|</?s>|<<SYS>>|\A\s*\[\{['"]role['"]:""")
_UNFILLED = r"\{\{?\s*(question|problem|prompt|query|instruction|input)\s*\}\}?|%\((question|problem|prompt|query)\)s\b"
_SPEAKER = re.compile(r"(?i)\n(assistant|ai):\s*\Z")
_DAMAGED = re.compile(rf"Ã[\x80-¿]|â€|\ufffd|&(amp|lt|gt|quot|nbsp|#\d+);|{_UNFILLED}")


def problems(view: SetView) -> Rows:
    """Examine prompts and references.

    prompts-fill-context (recipes.md#tasks): Prompts leave too little room for an answer: The longest prompt reaches
        model.max_context, or the median prompt leaves less than half of max_tokens for the answer. The finding is grave if the
        median prompt reaches model.max_context.
    columns-mixed (recipes.md#tasks): Prompts and answers seem to be read from wrong columns: One of these cases applies to at
        least 90 % of the rows, and to at least 8 rows.
        The prompt is the answer, or contains it after the text that the reward looks for. This is grave.
        The prompt is a file name, an address or a hash; or the prompts of at least 20 rows are consecutive numbers. This is
        grave, but a warning if the recipe has a system prompt or an instruction.
        The prompt begins or ends with the answer. This is a warning.
        The answers of at least 20 rows are consecutive numbers, but the prompts are not. This is a warning.
        The answers of at least 20 rows are single letters, but the prompts offer no choices. This is a warning.
        The answer is a number that occurs in the prompt. This is a note.
    references-shifted (recipes.md#tasks): Each answer belongs to the question in the row before or after it: Prompts of 50
        or more rows contain a larger share of the words of the previous row's answer (or of the next row's) than of their own
        answer's words. The mean difference of the shares exceeds 0.1 and 5 standard errors. Messages of the assistant in a
        prompt do not count. Prompts with consecutive numbers are not examined. There is no finding if the answer two rows away
        gives more than half of this difference, as in windows of a time series.
    one-answer (recipes.md#tasks): Most problems have the same answer: At least 80 % of the references, and at least 20, are
        equal. The finding is grave if all are equal, a warning from 95 %, and otherwise a note.
    references-unmatched (recipes.md#rewards): Some references are unlikely to match any answer: One of these cases applies to
        the first 200 references. At least half have 8 or more words. Or 5 % are missing values, such as nan or null. Or 5 % are
        LaTeX, or numbers with a unit, separators or markup, although the scorer compares texts. Or the reward rejects 5 % even
        if they are written as reward.answer_pattern expects; this case is grave from 50 %.
    heldout-trained-on (recipes.md#evaluation): Held-out problems are also trained on: At least 5 % of a set's held-out problems
        also occur in training data, if case, punctuation and spaces are ignored.
    """
    at, limit, texts = view.place, view.recipe.model.max_context, sorted(view.texts, key=len) or [""]
    middle, longest = view.tokens(texts[len(texts) // 2]), view.tokens(texts[-1])
    is_full = longest >= limit or middle > limit - view.share.max_tokens / 2
    (top, count), *_ = Counter(view.answers).most_common(1) or [("", 0)]
    answers, is_text, num = view.answers[:200], view.share.reward.scorer in ("task", "exact"), len(view.answers)
    task = view.share.task
    shown = re.sub(r"\d+", "0", f"{task.system_prompt}\n{task.instruction}\n{task.prompt_template}")
    dressed = [one for one in answers if is_text and _is_dressed(one) and re.sub(r"\d+", "0", one) not in shown]
    lost, tried = _lost_references(view, answers)
    missing = [one for one in answers if _MISSING.fullmatch(one)] if len({*answers}) >= 10 else []  # else it may be a label
    missing = [one for one in missing if not re.search(rf"\b{one}\b", view.told)]
    prose, unmatched = [one for one in answers if len(one.split()) >= 8], "references-unmatched"
    yield from _columns(view)
    yield from _shifted(view)
    yield from (
        ("prompts-fill-context", middle >= limit, is_full and f"median {middle:,.0f}, longest {longest:,.0f} tokens",
         "model.max_context", f"raise it, or leave long problems out of {at}task.path"),
        ("one-answer", count == num if count >= 0.95 * num else "note", _odd([top] * count, num, 0.8, 20),
         f"{at}task.answer_field", "name the column of the answer, or balance the rows"),
        (unmatched, False, _odd(missing, len(answers), 0.05), f"{at}task.answer_field",
         "leave out these rows, which have no answer"),
        (unmatched, False, _odd(prose, len(answers), 0.5), f"{at}task.answer_pattern",
         r"extract the final answer, as '####\s*(.+)' does"),
        (unmatched, len(lost) >= tried / 2, _odd(lost, tried, 0.05),
         f"{at}reward.{'answer_pattern' if view.share.reward.answer_pattern else 'scorer'}",
         "let it accept such answers, or correct the references"),
        (unmatched, False, _odd(dressed, len(answers), 0.05), f"{at}reward.scorer",
         "use math, which compares values, or make the references bare numbers"),
        ("heldout-trained-on", False, _odd(view.known, view.num_heldout, 0.05), f"{at}task.path",
         "take them out of the training data, so that the accuracy does not measure memory"),
    )  # fmt: skip


def _odd(texts: Sequence[str], num: int, share: float, least: int = 1) -> str:
    """Return `3 of 40, such as 'x'` for 3 `texts` and `num` 40, or "" for fewer than `least` or `share` · `num` texts."""
    return f"{len(texts)} of {num}, such as {texts[0]!r:.160}" if len(texts) >= max(least, share * num) else ""


def _columns(view: SetView) -> Rows:
    rows = [(text.strip(), answer) for text, answer in zip(view.texts, view.references, strict=True) if answer]
    marker, num, task = r"\s*".join(map(re.escape, view.marker.split())), len(view.texts), view.share.task
    heads = {word for _, answer in rows for word in _head(answer)}  # `Answer: yes or Answer: no` shows none
    told = [(text, own) for text, answer in rows if marker and (own := _head(answer))
            and own == {word for part in re.split(marker, text)[1:] for word in _head(part)} & heads]  # fmt: skip
    same = [text for text, answer in rows if text == answer]
    after = [] if all(own == told[0][1] for _, own in told) else [text for text, _ in told]  # equal ones are an example
    bound = [text for text, answer in rows if re.search(rf"\A{(one := re.escape(answer))}\b|(?<!\w){one}\W*\Z", text)]
    is_choice = re.search(r"\n\W?[A-D1-4][).:]", view.told)
    inside = [text for text, answer in rows if re.fullmatch(r"\d+", answer) and re.search(rf"\b{answer}\b", text)]
    named = [text for text in view.texts if _NAMES.fullmatch(text.strip())]
    letters = [answer for _, answer in rows if re.fullmatch("[A-J]", answer) and not _CHOICE.search(view.told)]
    numbers = _counting(view.references, _NUMBERED)
    if len(_counting(view.texts)) >= max(8, 0.9 * num):  # if prompts are consecutive numbers, too, a program made the rows
        numbers = []
    is_grave = not (task.system_prompt or task.instruction)  # else prompts may ask about a name
    away, names = "leave the answer out", "holds only names or numbers; use the column with the text"
    for field, odd, least, gravity, fix in (
        ("prompt_field", same, 8, True, away),
        ("prompt_field", after, 8, True, away),
        ("prompt_field", bound, 8, False, away),  # the task may be to repeat the last word
        ("prompt_field", [] if is_choice else inside, 8, "note", away),  # or to choose a number
        ("prompt_field", named, 8, is_grave, names),
        ("prompt_field", _counting(view.texts, _NUMBERED), 20, is_grave, names),
        ("prompt_template", letters, 20, False, "add the choices to the prompts"),
        ("answer_field", numbers, 20, False, "numbers the rows; name another column"),
    ):
        yield "columns-mixed", gravity, _odd(odd, num, 0.9, least), f"{view.place}task.{field}", fix


def _head(text: str) -> set[str]:
    return {*re.findall(r"\w+", text)[:1]}


def _counting(texts: Sequence[str], form: str = r"\D*(\d+)\D*") -> list[str]:
    """Return each text with a number n that is followed by a text with n + 1, among those that `form` matches."""
    numbers = {int(found[1]): text for text in texts if (found := re.fullmatch(form, text))}
    return [text for (one, text), (after, _) in pairwise(numbers.items()) if after == one + 1]


def _shifted(view: SetView) -> Rows:
    """Yield `references-shifted` if prompts share more words with a neighbouring row's answer than with their own, unless they
    are numbered, or also share many words with the answer two rows away."""
    asked, said = ([set(re.findall(r"\w+", one.lower())) for one in column] for column in (view.asked, view.columns))
    shares = {by: [len(asked[at] & one) / max(1, len(one)) for at in range(2, len(asked) - 2) for one in [said[at + by]]]
              for by in range(-2, 3)}  # fmt: skip
    for by, whose in ((-1, "previous"), (1, "next")):
        gains, further = ([other - own for other, own in zip(shares[far], shares[0], strict=True)] for far in (by, 2 * by))
        if len(gains) < 50 or len(_counting(view.texts)) >= 0.9 * len(gains) or fmean(further) > fmean(gains) / 2:
            continue
        is_shifted = fmean(gains) > max(0.1, 5 * stdev(gains) / math.sqrt(len(gains)))
        told = f"prompts contain {percent(fmean(gains))} more of the {whose} row's answer than of their own"
        fix = "give each question its own answer again"
        yield "references-shifted", True, is_shifted and told, f"{view.place}task.path", fix


def _is_dressed(answer: str) -> bool:
    """Return whether an answer is LaTeX, or a number with currency, unit, separators, markup or a full stop."""
    if re.search(r"\\(d?frac|sqrt|pi|cdot|text|left|begin)(?![a-z])", answer):
        return True
    bare, lower = bare_answer(answer), answer.lower()
    is_term = re.fullmatch(r"-?\d+([a-z]|[a-z]{4,})", lower)  # such as 7x
    return bare != lower and not is_term and bool(re.fullmatch(r"-?\d+(\.\d+)?", bare))


def _lost_references(view: SetView, answers: Sequence[str]) -> tuple[list[str], int]:
    """Return the references that the reward rejects, and the number of references examined. Rejected are those that
    `answer_pattern` cannot read or, if there are none, those that earn nothing in trial calls. Return none if all earn
    nothing, or wrong answers earn as much, since other rules report that."""
    is_read = view.share.reward.answer_pattern and view.share.reward.scorer in ("task", "exact") and reads(view.share, *_PROBES)
    if is_read and (lost := [one for one in answers if not reads(view.share, one)]):
        return lost, len(answers)
    tried = [one for one in view.calls if one.completion and not one.near_miss]
    lost = [one.completion for one in tried if one.reward <= 0]
    return (lost, len(tried)) if len(lost) < len(tried) and not view.indifference else ([], 0)


def _hits(texts: Iterable[str], *patterns: re.Pattern[str]) -> list[str]:
    """Return, for each text that any pattern matches, the match of the first pattern that matches it."""
    return [hit[0] for text in texts if (hit := next(filter(None, (one.search(text) for one in patterns)), None))]


def texts(view: SetView) -> Rows:
    """Examine templates, damaged texts and the numbers of problems.

    template-unused (recipes.md#chat-templates): Prompts do not have the chat format that the model was trained on: Prompts are
        plain, although the model is instruction-tuned: it is smollm2, or its name has the word instruct, chat, it or thinking.
        Or model.chat_template contains neither add_generation_prompt nor assistant. Or messages have roles other than system,
        developer, user, assistant and tool.
    template-twice (recipes.md#chat-templates): Prompts contain parts of a chat template as plain text: At least half of the
        prompts, or a text in the recipe, contain a marker such as [INST].
    texts-damaged (recipes.md#tasks): Prompts are damaged: At least 5 % of the prompts, or a text in the recipe, contain an
        unfilled placeholder such as {question}, characters of a wrong encoding, or HTML codes. Or 10 to 90 % of the prompts are
        cut at the same length.
    problems-few (recipes.md#tasks): Few problems are trained on so often that the policy may learn them by heart: The run
        trains on each problem at least 100 times. The finding is a note.
    evaluation-blind (recipes.md#evaluation): Evaluations are too rare or too small to show progress: evaluation.every_steps
        exceeds both trainer.steps and 100, or a set has only one held-out problem. The finding is a note.
    """
    at, model, task, texts = view.place, view.recipe.model, view.share.task, view.texts
    tuned = re.search(r"(?i)(?<![a-z])(instruct|chat|it|thinking)(?![a-z])(?!.*base)", model.name.rpartition("/")[2])
    is_tuned = model.source == "smollm2" or (model.source != "package" and tuned)
    begins = not model.chat_template or re.search("add_generation_prompt|assistant", model.chat_template)
    steps, every = view.recipe.trainer.steps, view.recipe.evaluation.every_steps
    times = steps * groups_per_step(view.recipe) / len(view.recipe.mixture) / max(1, view.num_trained)
    roles, num = [*set(view.roles) - {"system", "developer", "user", "assistant", "tool"}], len(texts)
    twice, patterns = "leave it out; prompt_style: chat adds it", (_CONTROL, _SPEAKER)[: 1 + (task.prompt_style == "chat")]
    longest = max(map(len, texts), default=0)
    cut = [text[-60:] for text in texts if len(text) == longest >= 100 and text[-1] not in ".?!:)"]
    is_cut = len(cut) <= 0.9 * num and len({*map(len, texts)}) > 4  # with few lengths, equal ones are usual
    damaged = [] if re.search(r"(?i)html|jinja|\bentit", view.told) else _hits(texts, _DAMAGED)
    for name in ("system_prompt", "instruction", "prompt_template"):
        control, odd = (_hits([getattr(task, name)], pattern) for pattern in (_CONTROL, _DAMAGED))
        yield "template-twice", False, _odd(control, 1, 1), f"{at}task.{name}", twice
        is_odd = odd and name != "prompt_template"
        yield "texts-damaged", False, is_odd and _odd(odd, 1, 1), f"{at}task.{name}", "replace it with the text that it means"
    yield from (
        ("template-unused", False, not begins and f"{model.chat_template!r:.80}", "model.chat_template",
         "let it begin the assistant's turn if add_generation_prompt is true"),
        ("template-unused", False, is_tuned and task.prompt_style == "plain" and not task.is_episodic
         and (model.name or model.source), f"{at}task.prompt_style", "is plain; use chat, or a base model"),
        ("template-unused", False, _odd(roles, len(view.roles), 0), f"{at}task.path",
         "name the roles of messages as the chat template does"),
        ("template-twice", False, _odd(_hits(texts, *patterns), num, 0.5), f"{at}task.path", twice),
        ("texts-damaged", False, _odd(damaged, num, 0.05), f"{at}task.path",
         "write the file again, as UTF-8 without HTML entities"),
        ("texts-damaged", False, is_cut and _odd(cut, num, 0.1, 5), f"{at}task.path", "give whole prompts"),
        ("problems-few", "note", view.num_trained > 0 and times >= 100
         and f"{counted(view.num_trained, 'problem')}, each {times:.0f} times", f"{at}task.path",
         "add problems, or watch the held-out accuracy"),
        ("evaluation-blind", "note", task.heldout_problems == 1 and "an accuracy of 0 or 1", f"{at}task.heldout_problems",
         "hold out 32 or more"),
        ("evaluation-blind", "note", every > max(steps, 100) and f"every {every} of {steps} steps", "evaluation.every_steps",
         f"use {max(1, steps // 10)}, or 0 for one at the start and one at the end"),
    )  # fmt: skip


def rewards(view: SetView) -> Rows:
    """Examine what rewards pay, and how long they take.

    terms-outweigh (recipes.md#rewards): A format or length term of the reward misleads the policy: reward.format_weight is
        below 0 or reaches reward.correct. Or reward.format_pattern matches an empty text. Or overlong.penalty exceeds 2 ·
        reward.correct. Or overlong.buffer_tokens exceeds max_tokens / 2.
    wrong-paid (recipes.md#rewards): An empty or wrong completion earns a reward: In trial calls, an empty completion earns at
        least half of reward.correct; this is grave unless your own function scores. Or your own function gives at least 4 wrong
        answers about as much as right ones on average. Or it gives each of at least 4 wrong numbers that contain the right
        number, such as 1420 for 42, as much as the right number.
    reward-slow (recipes.md#rewards): Rewards take long: The median trial call takes over reward.timeout_s / 4. This is a note.
    groups-small (learning.md#from-rewards-to-advantages): Rewards seldom differ within a group: sampling.group_size is 2, and
        an answer earns either nothing or full marks. The finding is a note. If answers are right with probability p, the two
        rewards differ in 2 p (1 - p) of the groups.
    """
    at, reward, right, limit = view.place, view.share.reward, view.share.reward.correct, view.share.max_tokens
    tokens, penalty = reward.overlong.buffer_tokens, reward.overlong.penalty
    paid, seconds = [one.reward for one in view.calls if not one.completion], median([one.seconds for one in view.calls] or [0])
    is_paid, is_open = min(paid, default=-1) >= 0.5 * right, re.fullmatch(reward.format_pattern or ".", "", re.DOTALL)
    is_graded = reward.is_function or reward.judge or not reward.binary or view.recipe.algorithm.advantage == "value"
    yield from (
        ("terms-outweigh", False, not 0 <= reward.format_weight < right and f"{reward.format_weight:g}",
         f"{at}reward.format_weight", f"use {right / 10:g}"),
        ("terms-outweigh", False, is_open and "it matches an empty text", f"{at}reward.format_pattern",
         "write a pattern that an empty text does not match"),
        ("terms-outweigh", False, tokens and penalty > 2 * right and f"{penalty:g}", f"{at}reward.overlong.penalty",
         f"use {right:g}"),
        ("terms-outweigh", False, tokens > limit / 2 and f"{tokens} of {limit} tokens", f"{at}reward.overlong.buffer_tokens",
         f"use {limit // 4}"),
        ("wrong-paid", not reward.is_function, f"an empty text earns {min(paid):g}" if is_paid else view.indifference,
         f"{at}reward.scorer", "check what it returns by default and what it compares, or the problem's tests"),
        ("reward-slow", "note", seconds > reward.timeout_s / 4 and f"{seconds:.2g} s", f"{at}reward.timeout_s",
         "raise it, or make the reward faster"),
        ("groups-small", "note", view.recipe.sampling.group_size == 2 and not is_graded and
         "if 10 % of answers are right, 18 % of groups of 2 and 57 % of groups of 8 differ", "sampling.group_size", "use 8"),
    )  # fmt: skip


def completions(view: SetView) -> Rows:
    r"""Examine the form and length of completions, and the judge.

    form-unsaid (recipes.md#rewards): Completions are unlikely to have the form that the reward reads: One of these cases holds.
        Prompts forbid, or do not mention, what the reward looks for: \boxed, JSON, or the text with which reward.answer_pattern
        or reward.format_pattern begins.
        Prompts ask for steps, but answer_pattern begins with ^.
        The scorer compares texts, and prompts ask for a box that answer_pattern does not read.
        The scorer compares texts without an answer_pattern, and prompts ask for a box or for steps.
        The chat template writes the <think> that format_pattern expects in the completion.
        The model is a small one of this package, and never writes what answer_pattern reads. This is grave.
    max-tokens-small (learning.md#truncated-completions): Completions do not fit into max_tokens: Half of the references,
        written in the form that the reward reads, or a packaged model's usual output are longer; this is grave unless your own
        function scores. Or max_tokens is under 128 although prompts ask for reasoning, or under 1,024 although the model
        reasons before it answers.
    stop-cuts-answers (recipes.md#tasks): A stop text ends completions before the answer: The stop text occurs in over 5 % of
        the references (grave from half), in reward.answer_pattern (grave), or in what the prompt tells the policy to write
        before the answer. Or it is blank or a single character, and prompts ask for steps.
    judge-misled (recipes.md#another-model-as-judge): The judge's marks are arbitrary or misread: judge.template has neither
        {prompt} nor {reference}, does not ask for the form that judge.pattern reads, or names a highest mark other than
        judge.full_marks. Or judge.pattern reads only some digits of full_marks.
    """
    at, reward, limit = view.place, view.share.reward, view.share.max_tokens
    answers = view.answers or (filter(None, view.references) if reward.is_function else ())
    written = [view.written] if view.written else [f"{view.marker} {one}" for one in islice(answers, 64)]
    lengths, field = [*map(view.tokens, written)] or [0], f"{at}max_tokens" if at else "sampling.max_tokens"
    fix = ", or extract shorter answers by task.answer_pattern" if reward.is_function else ""
    needed = 0 if view.share.task.is_episodic else 1024 if view.thinks else 128 if view.steps else 0
    context = ", and twice that for model.max_context" if 4 * needed >= view.recipe.model.max_context else ""
    yield from _forms(view)
    yield from (
        ("max-tokens-small", not reward.is_function, (middle := median(lengths)) > limit
         and f"{middle:.0f} tokens, such as {written[0]!r:.80}", field, f"use {2 * math.ceil(max(lengths))} or more{fix}"),
        ("max-tokens-small", False, limit < needed and
         (f"the prompt says {view.steps!r}" if view.steps else "the model thinks first"), field, f"use {4 * needed}{context}"),
    )  # fmt: skip
    yield from _stops(view)
    yield from _judge(view)


def _is_said(words: list[str], text: str) -> bool:
    """Return whether the text has all `words`, outside a prohibition such as `do not use \\boxed`."""
    forbidden = rf"(?i)\b(?:not|never|no|without|avoid|omit)\s+(?:\w+\s+){{0,2}}\W?{re.escape(words[0])}"
    return all(word in re.sub(forbidden, "", text) for word in words)


def _forms(view: SetView) -> Rows:
    pattern, task, field = view.share.reward.answer_pattern, view.share.task, f"{view.place}reward.answer_pattern"
    if view.written and not re.search(pattern, view.written):
        yield "form-unsaid", True, f"the model writes {view.written!r}", field, "use the pattern of the model's own recipe"
    if task.is_episodic or view.is_toy:
        return
    is_anchored = re.match(r"\^|\\A", pattern) and view.steps
    yield "form-unsaid", False, is_anchored and pattern, field, "leave out its ^, as steps come first"
    text = view.told.lower() if (ignores_case := _ANY_CASE.search(pattern)) else view.told
    field = f"{view.place}task.{'system_prompt' if task.prompt_style == 'chat' else 'instruction'}"
    form = _literal(view.share.reward.format_pattern)
    fix = "leave out its <think>, which the chat template writes, so that completions begin after it"
    yield "form-unsaid", False, view.opened and "<think>" in form and form, f"{view.place}reward.format_pattern", fix
    for marker in (view.marker, form):
        words = re.findall(r"[^\W\d_]{2,}", marker.lower() if ignores_case else marker) or [marker]
        is_unsaid = len(marker) >= 2 and not (view.thinks and "think" in words) and not _is_said(words, text)
        yield "form-unsaid", False, is_unsaid and f"the reward looks for {marker!r}", field, "ask for it, with an example"
    asked, scorer = r"\boxed" if _is_said([r"\boxed"], text) else view.steps, view.share.reward.scorer
    is_unread = asked == r"\boxed" and "boxed" not in pattern if pattern else bool(asked and view.answers)
    compared = f"the text after {view.marker!r}" if view.marker else "the whole text"
    told = is_unread and scorer in ("task", "exact") and f"prompts say {asked!r}, but the reward compares {compared}"
    yield "form-unsaid", False, told, f"{view.place}reward.scorer", "ask for the form that it reads, or use math"


def _stops(view: SetView) -> Rows:
    marker, pattern = view.marker, re.sub(r"\\(\W)", r"\1", view.share.reward.answer_pattern)
    before = f"{view.share.task.instruction}\n{view.share.task.system_prompt}"
    before = before.partition(marker)[0] if marker else before
    for stop in view.recipe.sampling.stop:
        bare, cut = stop.strip(), sum(stop in answer for answer in view.answers) / max(1, len(view.answers))
        is_needed = bool(bare) and (bare in marker or (len(bare) > 1 and bare in pattern))
        is_short = len(bare) <= 1 and re.search(r"(?i)step|reason|think|explain|boxed", view.told)
        why = ("reward.answer_pattern needs it" if is_needed else "it occurs in right answers" if cut > 0.05
               else "the prompt asks for steps" if is_short
               else "the prompt tells the policy to write it before the answer" if bare and bare in before else "")  # fmt: skip
        yield "stop-cuts-answers", max(is_needed, cut) >= 0.5, why and f"{stop!r}: {why}", "sampling.stop", "leave it out"


def _judge(view: SetView) -> Rows:
    if (judge := view.share.reward.judge) is None:
        return
    at, words = f"{view.place}reward.judge", re.findall(r"[a-z]{2,}", _literal(judge.pattern).lower())
    marks = [float(one) for one in re.findall(r"(?i)(?:\d\s*(?:to|-|–)|out of)\s*(\d+)", judge.template)]
    best = f"{judge.full_marks:g}"
    read = re.findall(judge.pattern, written(judge.pattern, best))
    is_asked = not words or _is_said(words, judge.template.lower())
    yield from (
        ("judge-misled", False, not re.search(r"\{(prompt|reference)\}", judge.template) and "it has neither", f"{at}.template",
         "add {prompt} or {reference}, without which the judge does not know the problem"),
        ("judge-misled", False, not is_asked and f"the pattern is {judge.pattern!r}", f"{at}.template",
         "ask for this form, with an example"),
        ("judge-misled", False, read and best not in read and f"it reads {read[-1:]} in {best}", f"{at}.pattern",
         "let it match all digits of a number"),
        ("judge-misled", False, marks and judge.full_marks not in marks and best, f"{at}.full_marks",
         f"the template says {max(marks, default=0):g}; use this number"),
    )  # fmt: skip


RECIPE_RULES = (problems, texts, rewards, completions)
