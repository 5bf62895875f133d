"""Each reward on hand-made completions, with numbers worked out by hand."""

from __future__ import annotations

import base64
import inspect
import json
import math
import os
import pickle
import random
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.small_models.demonstrations import demonstrate_function
from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import OverlongConfig, RewardConfig, TaskConfig
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.tasks.source import Split, make_source
from pipelinerl.v1 import sequence_pb2, verifier_pb2
from services.verifier.rewards.code import code_scorer
from services.verifier.rewards.compose import (
    ComposedReward,
    exact,
    json_schema_scorer,
    make_reward,
    overlong_penalty,
    regex,
    score_item,
    user_scorer,
)
from services.verifier.rewards.item import BadReference, BadReward, RewardInput, Score, Scorer
from services.verifier.rewards.mathematics import math_scorer
from services.verifier.rewards.reasoning_gym import GUARDS, REFUSED, is_arithmetic, is_board, is_formula, reasoning_gym_scorer
from services.verifier.sandbox import Means


def item(answer: str | None, reference: dict[str, Any] | str = "", **fields: Any) -> RewardInput:
    """An item whose completion is its answer; a text `reference` is the reference answer."""
    known = {"answer": reference} if isinstance(reference, str) else reference
    return RewardInput(prompt="", completion=answer or "", answer=answer, reference=known, **fields)


def gym_reference(family: str, seed: int = 3, **config: Any) -> dict[str, Any]:
    import reasoning_gym

    entry = reasoning_gym.create_dataset(family, size=1, seed=seed, **config)[0]
    return json.loads(json.dumps({"answer": entry["answer"], "dataset": family, "entry": entry}))


@pytest.mark.parametrize(
    ("pattern", "completion", "answer"),
    [
        (r"= *(-?\d+)", "3 + 4 = 7, 7 - 9 = -2", "-2"),
        (r"answer: (\d+)", "I do not know", None),
        (r"x(\d)?", "x1 x", None),  # the last match has no group
        ("", "  42\n", "42"),
        ("<answer>(.*)</answer>", "<think>a\nb</think>\n<answer>\n42\n</answer>", "42"),
        ("<answer>(.*)</answer>", "<answer>7</answer>, no:\n<answer>\n42\n</answer>", "42"),
        ("Answer: (.*)", "Answer: 7\nno:\nAnswer: 42\nThat is all.", "42"),  # no more than its line
        (r"#(\d+)$", "#7\n#42", "42"),
        ("#(.+)", "<think>#7</think> #42 <think>#8", "42"),
        ("#(.+)", "<think>#7</think> I give up", None),
        ("#(.+)", "[THINK]so #7, or", None),
        ("<answer>(.*)</answer>", "<think><answer>\n7\n</answer></think><answer>\n42\n</answer>", "42"),
        (r"</think>\s*(.*)", "<think>7</think> 42", "42"),
        (r"^#(\d+)", "<think>#7</think>\n#42", "42"),
        (r"<answer>(.*)</answer>", "<answer>42</answer><reasoning>or <answer>7</answer>", "42"),
        (r"#(\d+)", "<think>a</think>#4<think>b</think>2 7</think>", "4"),
    ],
)
def test_the_answer_is_the_group_of_the_last_match_outside_thoughts(pattern: str, completion: str, answer: str | None) -> None:
    reward = ComposedReward(RewardConfig(answer_pattern=pattern), exact)
    assert reward.find_answer(completion) == answer
    in_begun_thought = reward.find_answer(completion.replace("<think>", "", 1), "<think>\n")
    assert in_begun_thought == (answer if "</think>" in completion or not pattern else None)


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("scorer", "reference", "answer", "value"),
    [
        *((exact, "  Paris ", answer, 0.0) for answer in ("paris", "Paris.", "", None)),
        (exact, "  Paris ", "Paris", 1.0),
        (regex, ".*42", "so that is\n42", 1.0),
        *((regex, "colou?r", answer, 0.0) for answer in ("colours", None)),  # the whole answer has to match
        *((regex, "colou?r", answer, 1.0) for answer in ("colour", "color")),
        (json_schema_scorer(POINT), "", '{"x": 1}', 1.0),
        *((json_schema_scorer(POINT), "", answer, 0.0) for answer in ('{"x": 1.5}', '{"x": 1, "y": 2}', "{}", "{x: 1}", None)),
    ],
)
def test_exact_regex_and_json_schema(scorer: Scorer, reference: str, answer: str | None, value: float) -> None:
    assert scorer(item(answer, reference)).value == value


@pytest.mark.parametrize(
    ("make", "reference", "problem"),
    [
        (lambda: exact, {}, "answer"),
        (lambda: exact, {"answer": ""}, "answer"),
        (lambda: exact, {"answer": None}, "answer"),
        (lambda: exact, {"answer": 7}, "answer"),
        (lambda: regex, "(", "answer.*not a regular expression"),
        (lambda: json_schema_scorer({}), "not json", "not a JSON Schema"),
        (lambda: json_schema_scorer({}), "[]", "not a JSON Schema: an object is needed"),
        (lambda: json_schema_scorer({}), '{"type": "objekt"}', "not a JSON Schema"),
        (lambda: json_schema_scorer({}), '{"$ref": "https://example.org/schema"}', "refers to https://example.org/schema"),
        (lambda: json_schema_scorer({"$ref": "#"}), "", "schema: refers to itself without end"),
        (lambda: compose(Score(1.0), overlong=OverlongConfig(buffer_tokens=4)), "", "max_tokens"),
    ],
)
def test_a_bad_reference_is_no_wrong_answer(make: Callable[[], Scorer], reference: dict[str, Any] | str, problem: str) -> None:
    with pytest.raises(BadReference, match=problem):
        make()(item("[" * 32 + "]" * 32 if "itself" in problem else "{}", reference))


def test_the_recipe_that_asks_for_a_box_scores_nothing_else() -> None:
    recipe = load_recipe("gsm")
    (share,) = recipe.mixture.values()
    reward = make_reward(share.reward, share.task)
    for completion, value in ((r"so that is \boxed{42}", 1.0), ("so that is 42", 0.0), (r"so that is \boxed{42", 0.0)):
        about = {"answer": reward.find_answer(completion), "completion_tokens": 9, "max_tokens": 8192}
        scored = reward(RewardInput("", completion, reference={"answer": "42"}, **about))
        assert (scored.parts["answer"], scored.reason) == (value, "" if value else r"no closed \boxed{} in the answer")
    assert math_scorer(8.0, boxed=True)(item(None, "42")).value == 0.0


PAIRS = [{"input": "2 3", "output": "5"}, {"input": "4\n4", "output": "8\n"}]
ADDS = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"
FUNCTION = "def add(a, b):\n    return a + b"


def of_code(row: dict[str, Any], answer: str, **config: Any) -> Score:
    limits = {"test_timeout_s": 60.0, "timeout_s": 600.0}
    return code_scorer(RewardConfig(scorer="code", **limits | config))(RewardInput("", answer, answer, {"row": row}))


@pytest.mark.parametrize(
    ("row", "answer", "value", "reason"),
    [
        ({"tests": PAIRS}, ADDS, 1.0, "took the whole answer as code"),
        ({"tests": PAIRS}, f"Wrong:\n```python\n1/0\n```\nSo:\n```py\n{ADDS}\n```\nDone.", 1.0, "last of its 2 code blocks"),
        ({"tests": PAIRS}, f"```py\n{ADDS}", 1.0, "took its code block"),
        ({"tests": PAIRS}, f"```python\n{ADDS}\n```\n```sh\npython add.py\n```", 1.0, "took its code block"),
        ({"tests": PAIRS}, "print(5)", 0.5, "test 2 of 2: prints '5\\n', not '8\\n'"),
        ({"tests": PAIRS}, "print(1/0)", 0.0, "test 1 of 2: ZeroDivisionError: division by zero"),
        ({"tests": PAIRS}, "print(5); raise SystemExit(2)", 0.0, "ends with code 2"),
        ({"tests": PAIRS}, f"{ADDS}\nexit(0)", 1.0, ""),
        ({"tests": PAIRS[:1]}, "while True: pass", 0.0, "took more than 1 s"),
        ({"tests": json.dumps({"inputs": ["2 3", ["4", "4"]], "outputs": ["5", "8"]})}, ADDS, 1.0, ""),
        ({"tests": {"fn_name": "add", "inputs": [[2, 3], [[1], [2]]], "outputs": [5, [1, 2]]}}, FUNCTION, 1.0, ""),
        ({"tests": {"fn_name": "add", "inputs": [[2, 3]], "outputs": [[5]]}}, SOLUTION, 1.0, ""),
        ({"tests": {"fn_name": "add", "inputs": [[2, 3]], "outputs": [[6]]}}, SOLUTION, 0.0, "returns 5, not [6]"),
        ({"tests": {"fn_name": "add", "inputs": [[2, 3], [[1], [2]]], "outputs": [[5], [1, 2]]}}, FUNCTION, 0.5, "5, not [5]"),
        ({"tests": ["assert add(2, 3) == 5", "assert add(2, 3) == 6"]}, FUNCTION, 0.5, "test 2 of 2: AssertionError"),
        ({"tests": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"}, FUNCTION, 1.0, ""),
        ({"tests": ["assert add(2, 3) == 5"]}, "raise SystemExit(0)", 0.0, "after its early exit, the program does not"),
        ({"tests": ["assert add(2, 3) == 5"]}, "import os; os._exit(0)", 0.0, "ends too soon"),
    ],
)
def test_code_is_worth_the_tests_that_it_passes(row: dict[str, Any], answer: str, value: float, reason: str) -> None:
    score = of_code(row, answer, test_timeout_s=1.0 if "took more" in reason else 60.0, binary=False)
    assert score.value == value
    assert reason in score.reason


ADD_CALL = {"fn_name": "add", "inputs": [[2, 3]], "outputs": [5]}
LCB = {"tests": [{"input": "2\n3", "output": "5", "testtype": "functional"}], "metadata": '{"func_name": "add"}'}


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


DECEIVERS = {
    "reads the word again": "import os\nos.write(1, os.pread(0, 99, 0))\nos._exit(0)",
    "overrides what runs its tests": "import builtins\nadd = lambda a, b: 6\nbuiltins.exec = lambda *_: None",
    "overrides what reads the result": "import json\nadd = lambda a, b: 6\njson.loads = lambda _: [2, 3]",
    "reads its tests": "import re\nadd = lambda a, b: int(re.findall('== (.)', open('tests.py').read())[-1])",
    "looks at frames": """
import os, sys
frame = sys._getframe()
while frame:
    if 'passed' in frame.f_locals:
        os.write(1, frame.f_locals['passed'].encode())
        os._exit(0)
    frame = frame.f_back""",
    "equals everything": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __contains__(self, other): return True
add = lambda a, b: Same(6)""",
    "is an object that equals everything": """
class Same:
    def __eq__(self, other): return True
add = lambda a, b: Same()""",
    "ends well": "import os\ndef add(a, b): os._exit(0)",
    "raises": "def add(a, b): raise StopIteration",
    **{
        f"answers {value}": f"import os\n[os.write(n, b'[\"value\",{value},null]\\n') for n in range(3, 9) if not os.isatty(n)]"
        for value in (6, '["array",["made","builtins.range",[0,1000000000000,1]]]')
    },
}


@pytest.mark.parametrize("name", DECEIVERS)
def test_programs_that_set_out_to_deceive_earn_nothing(name: str) -> None:
    check = {"tests": "def check(candidate):\n    assert candidate(2, 3) == 5", "entry_point": "add"}
    for row in ({"tests": ADD_CALL}, {"tests": ["assert add(2, 3) == 5"]}, check):
        for program, value in ((DECEIVERS[name], 0.0), (f"{FUNCTION}\nprint(5)\nraise SystemExit", 1.0)):
            assert of_code(row, program).value == value


@pytest.mark.parametrize(
    ("row", "program"),
    [
        (LCB, "class Solution:\n    def add(self, a: List[int], b: Optional[int]):\n        return a + b"),
        ({"tests": {"fn_name": "add", "inputs": ["2\n3"], "outputs": ["5"]}}, FUNCTION),
        ({**LCB, "tests": packed(json.dumps(LCB["tests"]))}, SOLUTION),
        ({"tests": {"language": "python", "test_cases": json.dumps(PAIRS)}}, ADDS),
        ({"tests": [{"input": "", "output": "a 0.500000\n2.0"}]}, "print('a', 0.5)\nprint(2)"),
        ({"tests": {"input": ["2 3"], "output": ["5"]}}, ADDS),
        ({"tests": ["assert pair(1) == (1, 2)"]}, "pair = lambda a: (a, a + 1)"),
        ({"tests": ["assert sum(10, 15) == 25"]}, "def sum(a, b): return a + b"),
        ({"tests": ["values = [2, 1]\nput(values)\nassert values == [1, 2]"]}, "def put(values): values.sort()"),
        ({"tests": ["stack = Stack()\nstack.push(1)\nassert len(stack) == 1 and stack.pop() == 1"]},
         "class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
         "    def pop(self): return self.a.pop()\n    def __len__(self): return len(self.a)"),
        ({"tests": "from solution import add\ndef test_add():\n    assert add(2, 3) == 5"}, FUNCTION),
        ({"tests": "class TestAdd:\n    test_cases = [(2, 3, 5)]\n    def test_all(self):\n"
          "        for a, b, c in self.test_cases: assert add(a, b) == c"}, FUNCTION),
        ({"tests": "import unittest\nclass Add(unittest.IsolatedAsyncioTestCase):\n    def setUp(self): self.c = 5\n"
          "    async def test_add(self): self.assertEqual(add(2, 3), self.c)\n"
          "    @unittest.skip('slow')\n    def test_slow(self): assert False"}, FUNCTION),
        ({"tests": {"fn_name": "add", "inputs": [[0.1, 0.2]], "outputs": [0.3]}}, FUNCTION),
        ({"tests": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [None]}}, "def add(a, b): print(a)"),
        ({"tests": ["assert math.isclose(add(0.1, 0.2), 0.3)"]}, FUNCTION),
        ({"tests": ["assert add(2, 3) == 5"]}, "class Sum(complex): pass\ndef add(a, b): return Sum(a + b)"),
        ({"tests": ["assert add(2, 3).total == 5 and not hasattr(add(2, 3), '__array_interface__')"]},
         "class Sum:\n    __array_interface__ = {'shape': (2,), 'typestr': '<i8', 'data': (4096, True), 'version': 3}\n"
         "def add(a, b):\n    made = Sum()\n    made.total = a + b\n    return made"),
        ({"tests": PAIRS}, f"```python\n{ADDS}\n```\n```\n$ python a.py\n5\n```"),
        ({"tests": PAIRS}, f"~~~python\n{ADDS}\n~~~\n"),
        ({"tests": PAIRS}, f"Here it is: ```python\n{ADDS}\n```"),
        ({"tests": PAIRS}, f"````python\n{ADDS}\nd = \'\'\'\n```\n\'\'\'\n````"),
        ({"tests": PAIRS}, f"1. So:\n   ```python\n   {ADDS}\n   ```".replace("sys\n", "sys\n   ")),
        ({"tests": PAIRS}, f"```python\n{ADDS}\n```\n".replace("\n", "\r\n")),
    ],
)  # fmt: skip
def test_rows_and_answers_of_users_are_understood(row: dict[str, Any], program: str) -> None:
    assert of_code(row, program).value == 1.0
    broken = "1" if "```" in program else f"{program.replace('a + b', 'a - b')}\nraise ValueError"
    assert of_code(row, f"```python\n{broken}\n```").value == 0.0


@pytest.mark.parametrize("printed", ["a 0.51\n2.0", "a 0.5", "b 0.5\n2.0", "a 0.5 0.5\n2.0", "a 1e999\n2.0", "a nan\n2.0"])
def test_what_is_printed_instead_of_a_number_with_a_decimal_point_is_wrong(printed: str) -> None:
    assert of_code({"tests": [{"input": "", "output": "a 0.500000\n2.0"}]}, f"print({printed!r})").value == 0.0


def test_a_message_that_is_none_ends_the_tests_whatever_they_catch() -> None:
    tests = "try:\n    add(2, 3)\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError"
    program = "import os\ndef add(a, b):\n    for number in range(3, 9):\n        try: os.write(number, b'no message\\n')\n"
    program += "        except OSError: pass\n    return 6"
    assert of_code({"tests": tests}, program).value == 0.0


NO_TESTS = (None, [], "", "[", 7, [7], {"inputs": ["1"], "outputs": []}, [{"input": "1"}])
NOT_RUN = (
    "async def test_add():\n    assert add(2, 3) == 5",
    "def test_add():\n    yield add(2, 3) == 5",
    "import unittest\nclass Add(unittest.TestCase):\n    async def test_add(self): assert add(2, 3) == 5",
    "class TestAdd:\n    def setup_method(self): self.c = 5\n    def test_add(self): assert add(2, 3) == self.c",
    "import unittest\n@unittest.skip('slow')\nclass Add(unittest.TestCase):\n    def test_add(self): assert add(2, 3) == 5",
    "def test_add(c):\n    assert add(2, 3) == c",
)


@pytest.mark.parametrize("tests", [*NO_TESTS, *NOT_RUN, packed(os.system), packed([]), packed("[")])
def test_tests_that_are_none_are_told(tests: Any) -> None:
    with pytest.raises(BadReference, match="tests: "):
        of_code({"tests": tests}, "x")


def test_one_line_functions_pass_their_own_tests_and_fail_without_brackets() -> None:
    task = TaskConfig(name="one_line_function", config={"min_operations": 3}, prompt_style="compact")
    source, scorer = make_source(task, 0), code_scorer(RewardConfig(scorer="code", timeout_s=60.0, test_timeout_s=60.0))
    for index in range(8):
        problem = source.problem(Split.TRAIN, index)
        careful, hasty = (demonstrate_function(problem.question, (care,), random.Random(0)) for care in (1.0, 0.0))
        assert careful == problem.reference["answer"]
        scores = [scorer(RewardInput("", program, program, problem.reference)).value for program in (careful, hasty)]
        assert scores == [1.0, float(hasty == careful)]


def test_programs_that_hang_cost_their_tests_and_not_the_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is a model's program run where nothing would keep it in."""
    config = RewardConfig(scorer="code", binary=False, test_timeout_s=0.5, timeout_s=1.0)
    tests = [{"input": "", "output": ""}] * 9
    score = code_scorer(config)(RewardInput("", "x", "import time; time.sleep(60)", {"row": {"tests": tests}}))
    assert score == Score(0.0, "took the whole answer as code; test 1 of 9: took more than 0.5 s")
    monkeypatch.setattr("services.verifier.rewards.code.strongest_means", lambda: Means.NONE)
    with pytest.raises(FieldError, match=r"reward\.sandbox = None: .*Landlock"):
        code_scorer(config)
    trusted = config.model_copy(update={"sandbox": False, "test_timeout_s": 60.0, "timeout_s": 600.0})
    assert code_scorer(trusted)(RewardInput("", "", "", {"tests": tests[:1]})).value == 1.0


def test_json_schema_names_what_is_wrong_with_the_answer_and_a_bad_one_is_found_at_the_start() -> None:
    integers = RewardConfig(scorer="json_schema", json_schema={"additionalProperties": {"type": "integer"}})
    reward = make_reward(integers, TaskConfig())
    half = score_item(reward, wire_item('{"\\ud800": "x"}', {}))
    assert (half.status, half.reward, "\ufffd" in half.message) == (verifier_pb2.VERIFY_STATUS_OK, 0.0, True)
    assert json_schema_scorer(POINT)(item('{"x": "one"}')).reason == "$.x: 'one' is not of type 'integer'"
    nested = {"type": "array", "items": {"$ref": "#"}}
    for schema, answer in ((POINT, "[" * 100_000), (nested, "[" * 500 + "]" * 500)):
        assert json_schema_scorer(schema)(item(answer)).reason == "the answer is nested too deeply to be checked"
    assert json_schema_scorer(nested)(item("[" * 100 + "]" * 100)).value == 1.0
    with pytest.raises(FieldError, match=r"reward\.json_schema.*objekt"):
        json_schema_scorer({"type": "objekt"})


# --- reasoning-gym


@pytest.mark.parametrize("family", ["chain_sum", "gsm_symbolic", "prime_factorization", "countdown", "rearc"])
def test_reasoning_gym_accepts_its_own_answer_after_json(family: str) -> None:
    reference = gym_reference(family)
    assert reasoning_gym_scorer(family)(item(reference["entry"]["answer"], reference)).value == 1.0


def test_reasoning_gym_scorer_that_raises_means_a_wrong_answer_unless_the_entry_lacks_what_it_needs() -> None:
    assert reasoning_gym_scorer("chain_sum")(item(None, gym_reference("chain_sum"))).value == 0.0
    score = reasoning_gym_scorer("prime_factorization")(item("a word", gym_reference("prime_factorization")))
    assert score == Score(0.0, "not an answer of this family's form (ValueError)")
    reference = gym_reference("chain_sum")
    reference["entry"]["answer"] = 214
    with pytest.raises(BadReference, match="entry: its own answer cannot be scored"):
        reasoning_gym_scorer("chain_sum")(item("214", reference))
    for broken in ({"dataset": None}, {"dataset": "chain_summ"}, {"entry": None}, {"entry": {}}):
        with pytest.raises(BadReference, match=next(iter(broken))):
            reasoning_gym_scorer("chain_sum")(item("1", gym_reference("chain_sum") | broken))
    with pytest.raises(FieldError, match=r"task\.name = 'chain_summ'.*did you mean chain_sum"):
        reasoning_gym_scorer("chain_summ")


@pytest.mark.parametrize(
    ("tokens", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (95, -0.75), (100, -1.0), (130, -1.0)]
)
def test_overlong_penalty_is_equation_13(tokens: int, expected: float) -> None:
    assert overlong_penalty(tokens, max_tokens=100, buffer_tokens=20, penalty=1.0) == pytest.approx(expected)
    assert overlong_penalty(tokens, max_tokens=20, buffer_tokens=90, penalty=1.0) == -min(1.0, tokens / 20), "no wider"


# --- a user's function


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "house_rewards.py").write_text(
        "def half(item): return 0.5 if item.answer == item.reference['answer'] else 0\n"
        "def parts(item): return {'style': 0.25, 'length': len(item.completion) / 10}\n"
        "def word(item): return '1'\n"
        "def many(item): return dict.fromkeys(range(129), 0.1)\n"
        "def named(item): return {item.completion: 1}\n"
        "def nothing(item): pass\n"
        "def two(a, b): return 1\n"
        "async def later(item): return 1\n"
        "def several(item): yield 1\n"
        "class Later:\n    async def __call__(self, item): return 1\n"
        "object_of = Later()\n"
        "def text(completion): return float('42' in completion)\n"
        "def big(item): return 10**400\n"
    )
    (tmp_path / "leaving_rewards.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "broken_rewards.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "house_rewards"
    for name in ("house_rewards", "broken_rewards", "leaving_rewards"):
        sys.modules.pop(name, None)


def test_a_users_number_or_mapping_is_the_score(user_module: str) -> None:
    scorer = user_scorer("house_rewards:half")
    assert (scorer(item("a", "a")).value, scorer(item("b", "a")).value) == (0.5, 0.0)
    assert [user_scorer(f"house_rewards:{name}")(item("a")).value for name in ("later", "object_of")] == [1.0, 1.0]
    score = user_scorer("house_rewards:parts")(item("12345"))
    assert (score.value, score.parts) == (0.75, {"style": 0.25, "length": 0.5})
    for name, value in (("half", 0.5), ("parts", 0.35)):  # though `binary` is on, as it is by default
        reward = make_reward(RewardConfig(scorer=f"house_rewards:{name}"), TaskConfig(name="chain_sum"))
        assert reward(item("a", "a")).value == pytest.approx(value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "not a number") for name in ("word", "nothing")),
        ("big", "the reward is a number too large"),
        ("many", "has 129 entries; return at most 128"),
        ("named", r"name of an entry has 101 characters; use at most 100: x{40}\.\.\."),
    ],
)
def test_what_is_no_number_is_no_reward(user_module: str, name: str, said: str) -> None:
    with pytest.raises(BadReward, match=said):
        user_scorer(f"house_rewards:{name}")(item("x" * 101))
    assert user_scorer("house_rewards:named")(item("\ud800")).parts == {"\ufffd": 1.0}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("house_rewards:haff", "haff does not exist in house_rewards; did you mean half"),
        ("house_rewards:two", "must take one argument.*of verl.*of TRL"),
        ("house_rewards:several", "a generator function"),
        ("leaving_rewards:score", "cannot import leaving_rewards: SystemExit: 3 at .*leaving_rewards.py:2"),
        ("no_such_module:score", "cannot import no_such_module"),
        ("house_rewards.py:half", "cannot import house_rewards.py: .*; write house_rewards:half"),
        ("broken_rewards:score", "No module named 'no_such_library' at .*broken_rewards.py:1; install the package"),
    ],
)
def test_user_function_that_cannot_be_used(user_module: str, path: str, problem: str) -> None:
    with pytest.raises(FieldError, match=rf"reward\.scorer = '{path}'.*{problem}"):
        user_scorer(path)


# --- the whole reward


def compose(score: Score, *, graded: bool = False, **config: Any) -> ComposedReward:
    return ComposedReward(RewardConfig(**config), lambda _: score, graded=graded)


@pytest.mark.parametrize(
    ("config", "value", "reward"),
    [
        ({"correct": 2.0}, 1.0, 2.0),
        ({"correct": 2.0}, 1.0 - 1e-12, 2.0),
        ({"correct": 2.0}, 0.99, 0.0),
        ({"correct": 2.0}, 0.0, 0.0),
        ({"correct": 2.0, "binary": False}, 0.25, 0.5),
        ({"graded": True}, 0.25, 0.25),
        ({"graded": True}, -3.0, -3.0),
    ],
)
def test_binary_keeps_full_answers_and_a_users_number_as_it_is(config: dict[str, Any], value: float, reward: float) -> None:
    assert compose(Score(value), **config)(item("x")).parts == {"answer": reward}


def test_terms_add_up() -> None:
    overlong = OverlongConfig(buffer_tokens=20, penalty=0.4)
    reward = compose(Score(1.0), correct=2.0, format_pattern=r"<a>.*</a>\s*<b>.*</b>", format_weight=0.5, overlong=overlong)
    full = reward(item("<a>\n7\n</a>\n\n<b>7\n</b>\n", completion_tokens=90, max_tokens=100))
    assert full.parts == pytest.approx({"answer": 2.0, "format": 0.5, "overlong": -0.2})
    assert full.value == pytest.approx(2.3)
    unformatted = reward(item("<a>\n7\n</a>\n7", completion_tokens=100, max_tokens=100))
    assert unformatted == Score(
        pytest.approx(1.6),
        "the completion does not match reward.format_pattern",
        pytest.approx({"answer": 2.0, "format": 0.0, "overlong": -0.4}),
    )


def test_a_cut_completion_earns_nothing_where_the_recipe_says_so() -> None:
    config: dict[str, Any] = {"format_pattern": "x", "format_weight": 0.5, "overlong": OverlongConfig(buffer_tokens=20)}
    cut, whole = (item("x", completion_tokens=100, max_tokens=100, finish_reason=why) for why in ("length", "stop"))
    scored = {"answer": 1.0, "format": 0.5, "overlong": -1.0}
    assert compose(Score(1.0), truncated="zero", **config)(cut) == Score(
        -1.0, "cut at its length limit (reward.truncated)", {"answer": 0.0, "truncated": 0.0, "overlong": -1.0}
    )
    assert compose(Score(1.0), truncated="zero", **config)(whole).parts == scored
    assert compose(Score(1.0), truncated="mask", **config)(cut).parts == scored


def test_a_users_parts_stay_apart_and_cannot_hide_a_term() -> None:
    score = Score(0.75, parts={"format": 0.25, "style": 0.5})
    reward = compose(score, graded=True, correct=2.0, format_pattern="x", format_weight=1.0)(item("x"))
    assert reward.parts == {"answer.format": 0.5, "answer.style": 1.0, "format": 1.0}
    assert reward.value == 2.5


@pytest.mark.parametrize(("parts", "max_abs"), [({"a": 1e308, "b": -1e308}, 1e4), ({"a": -10_001.0}, 1e4), ({"a": 3.0}, 2.0)])
def test_a_reward_or_a_term_beyond_the_bound_fails_by_name(parts: dict[str, float], max_abs: float) -> None:
    with pytest.raises(BadReward, match=rf"one of its terms exceeds reward\.max_abs \({max_abs:g}\): answer\.a = "):
        compose(Score(sum(parts.values()), parts=parts), graded=True, max_abs=max_abs)(item("x"))
    assert compose(Score(-max_abs), graded=True, max_abs=max_abs)(item("x")).value == -max_abs, "the bound itself is one"
    for value, graded in ((math.nan, True), (math.inf, True), (-math.inf, True), (math.nan, False)):
        with pytest.raises(BadReward):
            compose(Score(value), graded=graded)(item("x"))


# --- functions written for other libraries


FOREIGN = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert not kwargs
    right = solution_str.strip() == ground_truth
    of_gsm8k = data_source == "gsm8k"
    return {"score": 0.5 * right, "acc": right, "pred": solution_str, "data": of_gsm8k, "index": extra_info["index"]}

def gsm8k(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth and method == "strict")

def no_score(solution_str, ground_truth):
    return {"acc": 1.0}

def columns(completions, solution, **kwargs):
    return [float(text == wanted) for text, wanted in zip(completions, solution, strict=True)]

async def chat(prompts, completions, **kwargs):
    asked, (answer,) = prompts[0], completions[0]
    return [asked[-1] == {"role": "user", "content": "2+2?\\nBe brief."} and answer == {"role": "assistant", "content": "4"}]

def skipped(completions, **kwargs):
    return [None]

def bare(completions, **kwargs):
    return 1.0

def other(solution_str, tokenizer):
    return 1.0
"""
ROW = {"prompt": "2+2?", "solution": "4", "data_source": "gsm8k", "extra_info": {"index": 3}}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scorer]:
    (tmp_path / "foreign_rewards.py").write_text(FOREIGN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "foreign_rewards", raising=False)
    task = {"source": "jsonl", "path": "p.jsonl", "answer_field": "solution"}
    return lambda name, pattern="", **fields: user_scorer(f"foreign_rewards:{name}", TaskConfig(**task | fields), pattern)


def asked(completion: str, **row: Any) -> RewardInput:
    return RewardInput("2+2?", completion, completion, {"answer": "4", "row": ROW | row})


def test_a_function_of_verl_is_taken_as_it_is(foreign: Callable[..., Scorer]) -> None:
    score = foreign("compute_score")(asked("4"))
    assert (score.value, score.parts) == (0.5, {}), "`score` alone"
    assert score.metrics == {"acc": 1.0, "data": 1.0, "index": 3.0}, "and no text"
    assert [foreign("gsm8k")(asked(text)).value for text in ("4", "5")] == [1.0, 0.0]
    with pytest.raises(BadReward, match="has no 'score', only acc"):
        foreign("no_score")(asked("4"))
    with pytest.raises(BadReference, match="row: has no tokenizer, which foreign_rewards:other takes"):
        foreign("other")(asked("4"))
    with pytest.raises(FieldError, match=r"reward\.answer_pattern.*verl's parameters and gets the whole completion"):
        foreign("gsm8k", r"(\d+)")


def test_a_function_of_trl_is_taken_as_it_is(foreign: Callable[..., Scorer]) -> None:
    assert [foreign("columns")(asked(text)).value for text in ("4", "5")] == [1.0, 0.0]
    assert foreign("columns")(RewardInput("2+2?", "4", "4", {"answer": "4"})).value == 1.0, "a row of prompt and answer alone"
    chat = foreign("chat", prompt_style="chat", instruction="Be brief.")
    assert [chat(asked(text)).value for text in ("4", "5")] == [1.0, 0.0]
    with pytest.raises(BadReward, match="is None, not a number"):
        foreign("skipped")(asked("4"))
    with pytest.raises(BadReward, match=r"is 1\.0, not a list of one number"):
        foreign("bare")(asked("4"))
    with pytest.raises(BadReference, match="has no solution, which foreign_rewards:columns takes; it has answer, prompts"):
        foreign("columns", answer_field="answer")(RewardInput("2+2?", "4", "4", {"answer": "4"}))


# --- from recipe to result


BAD_REFERENCE = verifier_pb2.VERIFY_STATUS_BAD_REFERENCE


def wire_item(completion: str, reference: dict[str, Any] | str, **fields: Any) -> verifier_pb2.VerifyItem:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    return verifier_pb2.VerifyItem(sequence_id="s", completion_text=completion, reference_json=text, **fields)


def test_the_task_scorer_is_the_familys_or_for_a_file_exact() -> None:
    reward = make_reward(RewardConfig(answer_pattern=r"= (-?\d+)"), TaskConfig(name="chain_sum"))
    reference = gym_reference("chain_sum")
    right = score_item(reward, wire_item(f"1 + 1 = 2 ... = {reference['answer']}", reference))
    assert (right.status, right.reward, dict(right.components)) == (verifier_pb2.VERIFY_STATUS_OK, 1.0, {"answer": 1.0})
    silent = score_item(reward, wire_item("I give up", reference))
    assert (silent.status, silent.reward) == (verifier_pb2.VERIFY_STATUS_OK, 0.0)
    assert silent.message == "reward.answer_pattern found no answer"
    of_file = make_reward(RewardConfig(), TaskConfig(source="jsonl", name="capitals", path="capitals.jsonl"))
    assert score_item(of_file, wire_item(" Paris", {"answer": "Paris"})).reward == 1.0


def test_reference_finish_reason_and_lengths_reach_the_function(user_module: str) -> None:
    for text in ("", "{", "[1]", "null", "[" * 100_000):  # no JSON object
        assert score_item(ComposedReward(RewardConfig(), exact), wire_item("x", text)).status == BAD_REFERENCE
    seen: list[RewardInput] = []
    reward = ComposedReward(RewardConfig(), lambda got: seen.append(got) or Score(1.0))
    cut = {"completion_tokens": 7, "max_tokens": 9, "finish_reason": sequence_pb2.FINISH_REASON_LENGTH}
    score_item(reward, wire_item("x", {}, prompt_text="p", **cut))
    assert seen == [RewardInput("p", "x", "x", {}, completion_tokens=7, max_tokens=9, finish_reason="length", sequence_id="s")]
    result = score_item(ComposedReward(RewardConfig(), user_scorer("house_rewards:text")), wire_item("42", {}))
    assert "; the argument is an item, with the attributes prompt, completion, answer, reference, " in result.message


def raiser(error: BaseException) -> ComposedReward:
    def score(_: RewardInput) -> Score:
        raise error

    return ComposedReward(RewardConfig(), score)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadReference("entry", "none"), BAD_REFERENCE),
        (BadReward("nan"), verifier_pb2.VERIFY_STATUS_BAD_REWARD),
        (MemoryError(), verifier_pb2.VERIFY_STATUS_OUT_OF_MEMORY),
        (RuntimeError("boom"), verifier_pb2.VERIFY_STATUS_CRASHED),
        (ValueError("of the policy: \ud800"), verifier_pb2.VERIFY_STATUS_CRASHED),  # which no message takes
        (RecursionError(), verifier_pb2.VERIFY_STATUS_CRASHED),
        (SystemExit(0), verifier_pb2.VERIFY_STATUS_CRASHED),
        (KeyboardInterrupt(), verifier_pb2.VERIFY_STATUS_CRASHED),
    ],
)
def test_what_a_reward_raises_is_its_items_status(error: BaseException, status: int) -> None:
    result = score_item(raiser(error), wire_item("x", {}))
    assert (result.status, result.sequence_id, result.reward) == (status, "s", 0.0)
    assert result.message


# --- answers that some scorers would evaluate: nothing that a model wrote is run

EVALUATES = re.compile(r"\b(eval|exec|parse_expr|parse_latex|sympify|__import__)\(")
ON_ITS_OWN_TEXT = {
    "basic_arithmetic": "the problem that it makes",
    "bitwise_arithmetic": "the problem in the entry",
    "codeio": "the program that it makes problems of",
    "number_sorting": "the entry's answer",
    "propositional_logic": "by a parser of its own, which evaluates nothing",
}
"""Families whose module evaluates something other than the answer."""


def scored(family: str, answer: str, seed: int = 3) -> Score:
    reference = gym_reference(family, seed)
    return reasoning_gym_scorer(family)(item(answer or reference["entry"]["answer"], reference))


@pytest.mark.parametrize("family", sorted(GUARDS))
@pytest.mark.parametrize(
    "attack",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "[__import__('pathlib').Path({path!r}).touch()]",
        "1 + (lambda: __import__('pathlib').Path({path!r}).touch())()",
        "[].__class__.__base__.__subclasses__()[0] if open({path!r}, 'w') else 1",
        "f\"{{open({path!r}, 'w')}}\"",
    ],
)
def test_an_answer_that_is_code_is_not_run(family: str, attack: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    assert scored(family, attack.format(path=str(touched))) == REFUSED
    assert not touched.exists()


@pytest.mark.parametrize("family", sorted(GUARDS))
@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4])
def test_a_guarded_family_accepts_its_own_answers(family: str, seed: int) -> None:
    assert scored(family, "", seed).value == 1.0


def test_every_family_that_evaluates_answers_is_guarded() -> None:
    from reasoning_gym.factory import DATASETS

    modules = {family: inspect.getmodule(dataset) for family, (dataset, _) in DATASETS.items()}
    evaluate = {family for family, module in modules.items() if EVALUATES.search(inspect.getsource(module))}
    assert evaluate - set(ON_ITS_OWN_TEXT) == set(GUARDS)


@pytest.mark.parametrize(
    ("guard", "answer", "passes"),
    [
        (is_arithmetic, " 42*(30 - 4 - 23) ", True),
        (is_arithmetic, "-2**3/4.5", True),
        (is_arithmetic, "x + 1", False),
        (is_arithmetic, "1 if 2 else 3", False),
        (is_arithmetic, "(1).real", False),
        (is_arithmetic, "True", False),
        (is_formula, "-2*x**3*cos(x) + sqrt(X)/pi + C", True),
        (is_formula, "Integral(x**2*cos(x), x)", False),
        (is_formula, "exit(x)", False),
        (is_formula, "sin(x, y)", False),
        (is_formula, "sin(x).func", False),
        (is_formula, "open + x", False),
        (is_formula, "lambda x: x", False),
        (is_board, "_ Q\nQ _", True),
        (is_board, "[['_', 'Q'], ['Q', '_']]", True),
        (is_board, "[exit()]", False),
        (is_board, "(" * 10_000, False),
    ],
)
def test_what_a_guard_lets_through(guard: object, answer: str, passes: bool) -> None:
    assert guard(answer) is passes  # type: ignore[operator]
