"""The scorers of mathematics on a table of marked answers, and what no table holds: hostile answers, references that fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.tasks.final_answer import bare_answer, final_answer, near_misses, occurs
from services.verifier.rewards.item import BadReference, RewardInput
from services.verifier.rewards.mathematics import math_scorer

TABLE = [json.loads(line) for line in Path(__file__, "../data/mathematics.jsonl").resolve().read_text().splitlines()]
SCORERS = {"math": math_scorer(8.0), "math_boxed": math_scorer(8.0, boxed=True)}


def paid(scorer: str, reference: str, answer: str) -> float:
    return SCORERS[scorer](RewardInput("", answer, answer.strip(), {"answer": reference})).value


@pytest.mark.parametrize("scorer", SCORERS)
def test_no_wrong_answer_is_paid_and_at_most_one_right_one_in_fifty_is_not(scorer: str) -> None:
    rows: list[dict[str, Any]] = [row for row in TABLE if scorer in row["scorers"]]
    right, wrong = ([row for row in rows if row["mark"] == mark] for mark in ("right", "wrong"))
    assert len(rows) >= 400
    assert len(wrong) >= len(rows) / 3
    assert [row for row in wrong if paid(scorer, row["reference"], row["answer"])] == []
    unpaid = [row for row in right if not paid(scorer, row["reference"], row["answer"])]
    assert [row for row in unpaid if "why" not in row] == []
    assert len(unpaid) <= len(right) / 50


@pytest.mark.parametrize("scorer", SCORERS)
def test_each_reference_of_the_table_is_right_in_a_box_and_its_near_misses_are_wrong(scorer: str) -> None:
    references = {row["reference"] for row in TABLE}
    assert [one for one in references if not paid(scorer, one, rf"\boxed{{{final_answer(one)}}}")] == []
    missed = [(one, miss) for one in references for miss in near_misses(final_answer(one))]
    assert len(missed) > 100
    assert [pair for pair in missed if paid(scorer, pair[0], rf"\boxed{{{pair[1]}}}")] == []


@pytest.mark.parametrize("reference", ["1200", "1,200.00", "$1200", "1200 apples", "so.\n#### 1,200 %", r"it is \boxed{1200}."])
def test_the_bare_answer_has_no_currency_separator_unit_or_zeros(reference: str) -> None:
    assert bare_answer(reference) == "1200"
    assert [bare_answer(one) for one in ("Yes.", "-0.50", "1,2", "x = 3")] == ["yes", "-0.5", "1,2", "x = 3"]
    texts = ("It is 42.", "2-42", "42.5", "142", "x42", "is -42")
    assert [text for text in texts if occurs("#### 42", text)] == ["It is 42.", "2-42"]


@pytest.mark.parametrize(
    ("answer", "misses"),
    [
        (r"2\sqrt{3}", ["2", r"-2\sqrt{3}"]),
        ("(3, 4)", ["3", "(4, 3)"]),
        ("-5", ["5"]),
        (r"\frac{3}{4}", ["3", r"-\frac{3}{4}", r"\frac{4}{3}"]),
        ("12:30", ["12", "30:12"]),
        (r"\text{June 20}", ["20"]),
        *((answer, []) for answer in (r"\{3\}", "B", r"\text{Evelyn}", "0", "x = 5", "")),
        (r"\$1,250", ["-1250"]),
    ],
)
def test_near_misses_are_other_answers(answer: str, misses: list[str]) -> None:
    assert near_misses(answer) == misses


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        *((empty, "not a mathematical expression") for empty in ("$$", r"\boxed{}", "2 + 3 = 5\n####", ".", "<think>42")),
        (r"\frac{1}{", "its braces do not match"),
        (r"\frac{1}{0}", "has no value: a division by zero"),
        ("First we add the numbers, then " * 20, "a text of 619 characters; give the answer alone, after #### or in a box"),
    ],
)
def test_a_reference_that_marks_nothing_fails_by_name(reference: str, problem: str) -> None:
    for scorer in SCORERS:
        with pytest.raises(BadReference, match=f"answer: .*{problem}"):
            paid(scorer, reference, r"\boxed{42}")


def test_a_thought_that_the_prompt_begins_earns_nothing_until_it_ends() -> None:
    for scorer in SCORERS:
        for completion, value in ((r"so \boxed{42}", 0.0), (r"so \boxed{7}</think> \boxed{42}", 1.0)):
            for prompt, earned in (("6 * 7<think>\n", value), ("6 * 7", 1.0)):
                assert SCORERS[scorer](RewardInput(prompt, completion, completion, {"answer": "42"})).value == earned


HOSTILE = (
    r"\9", "0_[]",
    "9^{9^{9^9}}", "(10^9)!", "((10^4)!)!", "^".join(["9"] * 900), "1e9999", "2^{-10^{12}}", "9999999999^{6500}" * 30,
    r"\log_1 2", "*".join(["65000!"] * 100), "(" * 900 + "1" + ")" * 900, r"\frac{" * 200 + "1" + "}{2}" * 200,
    "-" * 1500 + "42", r"\ln 0", "f(" * 300 + "x" + ")" * 300, "+".join(["5000!/7"] * 240), "+".join(["sin(x)"] * 280),
    "1," * 900, "x=" * 900, "|" * 1900, "0^{-1}", "1" * 200_000, "$" * 200_000, "the answer is " * 70_000, "a" * 200_000,
    "1 or " * 200_000, "<think>" * 100_000, "answer" + " " * 200_000 + "is", r"\boxed{" * 100_000, "<answer>" * 100_000,
    "\\" * 200_000, "{" * 100_000, r"\text{" * 1000, "\\[" * 100_000,
)  # fmt: skip


def test_hostile_answers_cost_little_and_earn_nothing() -> None:
    scorers = math_scorer(0.4), math_scorer(0.4, boxed=True)
    for hostile in HOSTILE:
        for answer in (hostile, rf"\boxed{{{hostile}}}"):
            started_s = time.process_time()
            item = RewardInput("", answer, answer, {"answer": "x^2 + 1"})
            assert not any(score(item).value for score in scorers), hostile[:60]
            assert time.process_time() - started_s < 20, hostile[:60]
    item = RewardInput("", answer := "+".join(["5000!/7"] * 240), answer, {"answer": "x^2 + 5000!"})
    assert math_scorer(0.04)(item).reason == "the answer is too large to compare"
