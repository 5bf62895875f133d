"""Sources of problems: the same index means the same problem, held-out ones stay apart, mistakes are named."""

import gzip
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.errors import FieldError, UserError
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks import rows
from pipelinerl.tasks.source import BLOCK, FileSource, Interleaving, Problem, ReasoningGymSource, Split, make_source

ONE_DIGIT = {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def sums(seed: int = 0, num_heldout: int = 16, config: dict[str, Any] = ONE_DIGIT) -> ReasoningGymSource:
    return ReasoningGymSource(TaskConfig(config=config, heldout_problems=num_heldout, prompt_style="compact"), seed)


def questions(source: ReasoningGymSource, split: Split, indices: range) -> list[str]:
    return [source.problem(split, index).question for index in indices]


# reasoning-gym


def test_repeated_additions_are_a_family_of_ours_with_few_long_ones() -> None:
    """Of a Pareto distribution with α = 1, from 2 and cut off before 51, a share of (2/k - 2/51) / (1 - 2/51) is k or more."""
    from reasoning_gym import get_score_answer_fn

    task = TaskConfig(name="repeated_addition", heldout_problems=16, prompt_style="compact")
    source = ReasoningGymSource(task, 0)
    problems = [source.problem(Split.TRAIN, index) for index in range(2000)]
    times = [int(problem.question[:2]) for problem in problems]
    assert (min(times), max(times)) == (2, 50)
    share = (2 / 10 - 2 / 51) / (1 - 2 / 51)
    found = sum(one >= 10 for one in times) / 2000
    assert found == pytest.approx(share, abs=4 * (share * (1 - share) / 2000) ** 0.5)
    count, step, start = (int(number) for number in problems[0].question[:-1].replace("x", "+").split("+"))
    reference = json.loads(problems[0].reference_json)
    assert reference["answer"] == str(start + count * step)
    assert get_score_answer_fn("repeated_addition")(answer=reference["answer"], entry=reference["entry"]) == 1.0
    with pytest.raises(FieldError, match=r"task.config = .*max_times must be >= min_times"):
        ReasoningGymSource(task.model_copy(update={"config": {"min_times": 60}}), 0)


def test_a_problem_is_its_index_whatever_was_asked_before() -> None:
    forwards, other = sums(), sums()
    indices = range(0, 3 * BLOCK, 37)
    asked = {index: other.problem(Split.TRAIN, index) for index in reversed(indices)}
    assert all(forwards.problem(Split.TRAIN, index) == asked[index] for index in indices)
    assert questions(sums(seed=1), Split.TRAIN, range(20)) != questions(sums(), Split.TRAIN, range(20))


def test_the_reference_holds_what_the_familys_scorer_needs() -> None:
    from reasoning_gym import get_score_answer_fn

    problem = sums().problem(Split.TRAIN, 5)
    reference = json.loads(problem.reference_json)
    first, *rest = problem.question[:-1].replace("+", " +").replace("-", " -").split()
    total = str(int(first) + sum(map(int, rest)))
    assert (reference["dataset"], reference["answer"]) == ("chain_sum", total)
    assert get_score_answer_fn("chain_sum")(answer=total, entry=reference["entry"]) == 1.0


def test_heldout_problems_are_distinct_never_trained_on_and_the_same_for_every_seed() -> None:
    # One-digit pairs have 200 questions, so that half of the training candidates collide with the 100 held out.
    pairs = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = sums(num_heldout=100, config=pairs)
    heldout = questions(source, Split.HELDOUT, range(100))
    assert len(set(heldout)) == 100
    assert not set(heldout) & set(questions(source, Split.TRAIN, range(400)))
    assert questions(sums(seed=9, num_heldout=100, config=pairs), Split.HELDOUT, range(100)) == heldout


def test_what_a_family_cannot_give_and_arguments_that_cannot_be_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}  # ten questions
    with pytest.raises(FieldError, match=r"task\.heldout_problems = 11: .*too few distinct problems"):
        sums(num_heldout=11, config=zeros).problem(Split.HELDOUT, 0)
    with pytest.raises(FieldError, match="too few distinct problems"):
        sums(num_heldout=10, config=zeros).problem(Split.TRAIN, 0)
    for key, said in (("zzz", "chain_sum has no such argument; allowed: min_terms, max_terms, "), ("seed", "leave it out")):
        with pytest.raises(FieldError, match=rf"^task\.config\.{key} = 3: {said}"):
            sums(config={key: 3})
    with pytest.raises(FieldError, match=r"task\.config = .*simple_integration refuses it: Cannot choose from an empty"):
        ReasoningGymSource(TaskConfig(name="simple_integration", config={"operators": []}), 0)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)  # an import of it fails
    with pytest.raises(FieldError, match=r"task\.source = 'reasoning_gym': .*pip install 'pipelinerl\[local\]'"):
        sums()


@pytest.mark.parametrize("family", ["list_functions", "gsm_symbolic", "countdown"])
def test_other_families_repeat_and_leave_the_global_generator_alone(family: str) -> None:
    def ask() -> Problem:
        return ReasoningGymSource(TaskConfig(name=family, heldout_problems=2), 3).problem(Split.TRAIN, 300)

    ask()  # the first import of reasoning-gym draws from the global generator, once in a process
    random.seed(1)
    before = random.getstate()
    first = ask()
    assert random.getstate() == before
    random.seed(2)
    assert ask() == first
    assert first.question
    assert json.loads(first.reference_json)["entry"]["metadata"]


# Files


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[Any], *, prompts_are_text: bool = False) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows)
    if prompts_are_text:  # whatever their bytes
        table = table.set_column(0, "prompt", table["prompt"].cast(pyarrow.string(), safe=False))
    parquet.write_table(table, path)
    return path


def file_task(path: Path, heldout: int = 2, **fields: Any) -> TaskConfig:
    return TaskConfig(source="jsonl", name="mine", path=str(path), heldout_problems=heldout, **fields)


def refused(error: type[UserError], said: str, path: Path, **task: Any) -> None:
    with pytest.raises(error, match=said):
        make_source(file_task(path, **task), seed=0)


ROWS = [{"prompt": f"q{number}", "answer": number} for number in range(10)]


@pytest.mark.parametrize(("suffix", "write"), [(".jsonl", write_jsonl), (".parquet", write_parquet)])
def test_a_file_is_shuffled_and_a_part_held_out(suffix: str, write: Callable[[Path, list[Any]], Path], tmp_path: Path) -> None:
    task = file_task(write(tmp_path / f"p{suffix}", [*ROWS, ROWS[0]]))
    drawn = []
    for seed in (0, 0, 1, 2, 3):
        source = make_source(task, seed)
        heldout = [source.problem(Split.HELDOUT, index).question for index in range(2)]
        epochs = [[source.problem(Split.TRAIN, 8 * epoch + i).question for i in range(8)] for epoch in (0, 1)]
        assert [sorted([*epoch, *heldout]) for epoch in epochs] == [[f"q{number}" for number in range(10)]] * 2
        assert epochs[0] != epochs[1]
        row = {"prompt": heldout[0], "answer": int(heldout[0][1:])}
        assert source.problem(Split.HELDOUT, 0) == Problem(heldout[0], {"answer": heldout[0][1:], "row": row})
        drawn.append(heldout)
    assert drawn[0] == drawn[1]
    assert len(set(map(frozenset, drawn))) > 1, "not the file's end"


def test_a_file_that_is_only_evaluated_needs_no_other_problems(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("".join(f'{{"prompt": "q{number}", "answer": "{number}"}}\n' for number in range(3)))
    for heldout, expected in ((5, 3), (2, 2)):
        source = make_source(file_task(path, heldout=heldout), seed=0, is_trained_on=False)
        drawn = {source.problem(Split.HELDOUT, index).question for index in range(source.num_heldout)}
        assert (source.num_heldout, len(drawn)) == (expected, expected)
    path.write_text("")
    with pytest.raises(FieldError, match=r"task\.path = .*p\.jsonl'?: contains no problems; give another file"):
        make_source(file_task(path, heldout=5), seed=0, is_trained_on=False)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "q"', "line 2: not JSON: Expecting ',' delimiter at character 15"),
        ('["q", "a"]', "line 2: list instead of an object"),
        ({"prompt": "q"}, "line 2: has no field 'answer', only prompt"),
        ({"prompt": "q", "answer": None}, "line 2: field 'answer' is None"),
        ('{"prompt": "q \\ud800", "answer": "a"}', r"line 2: field 'prompt' holds \ud800, half of a surrogate pair"),
        ({"prompt": [{"role": "user", "content": "\udfff"}], "answer": "a"}, r"line 2: field 'prompt' holds \udfff, half"),
        ({"prompt": [{"role": "user"}], "answer": "a"}, "line 2: field 'prompt' has {'role': 'user'}, which is no"),
        ({"prompt": [{"role": "assistant", "content": "a"}], "answer": "a"}, "line 2: field 'prompt' must end with a"),
        ({"prompt": "q", "answer": True}, "line 2: field 'answer' is True"),
        ({"prompt": "q", "answer": float("nan")}, "line 2: field 'answer' is nan, which is not a finite number"),
        ({"prompt": " ", "answer": "a"}, "line 2: field 'prompt' is empty"),
    ],
)
def test_a_bad_line_is_named_by_file_line_and_field(row: Any, said: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [ROWS[0], row, *ROWS[1:]])
    with pytest.raises(UserError) as info:
        make_source(file_task(path, prompt_style="chat"), seed=0)
    assert f"{path}, {said}" in str(info.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "p.docx").write_text("prompt,answer\n")
    refused(FieldError, r"task\.path.*give a \.jsonl, .* or \.parquet file", tmp_path / "p.docx")
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "answer": "a"}])
    refused(UserError, r"line 1: field 'prompt' is a list of messages, .* use chat", path)
    path = write_jsonl(tmp_path / "many.jsonl", [*ROWS, *["{"] * 12, {"prompt": " ", "answer": "a"}])
    with pytest.raises(UserError) as info:
        make_source(file_task(path), seed=0)
    first, *lines = str(info.value).splitlines()
    assert first.endswith("many.jsonl: 13 rows cannot be used")
    assert [line.split(":")[0].strip() for line in lines] == [*(f"line {number}" for number in range(11, 21)), "and 3 more"]
    rows = [{"prompt": b"q", "answer": "a"}, {"prompt": b"\xff", "answer": "b"}]
    path = write_parquet(tmp_path / "latin.parquet", rows, prompts_are_text=True)
    refused(UserError, r"latin\.parquet, row 2: a text is not UTF-8: .* at byte 1", path)


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    return "\r\n".join(lines).encode("utf-8-sig")


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def as_zstd(content: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("pyarrow").Codec("zstd").compress(content, asbytes=True)
    return compressed


MULTILINE = [{"prompt": f"q{number},\nnext line", "answer": number} for number in range(4)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.csv", as_csv(MULTILINE)),
        ("p.tsv", as_csv(MULTILINE).replace(b'","', b'"\t"').replace(b"t,a", b"t\ta")),
        ("semicolons.csv", as_csv(MULTILINE).replace(b'","', b'";"').replace(b"t,a", b"t;a")),
        ("long names.tsv", as_csv(MULTILINE).replace(b'","', b'"\t"x"\t"').replace(b"t,a", b"t\tw, x, y, z\ta")),
        ("p.json", json.dumps(MULTILINE).encode()),
        ("lines.json", as_jsonl(MULTILINE)),
        ("p.CSV.GZ", gzip.compress(as_csv(MULTILINE), mtime=0)),
        ("p.jsonl.zst", as_zstd(as_jsonl(MULTILINE))),
    ],
)
def test_files_of_other_forms_hold_the_same_problems(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    source = FileSource(file_task(tmp_path / name, heldout=1), seed=0)
    found = [(one.question, one.reference["answer"]) for one in source.problems]
    assert found == [(f"q{number},\nnext line", str(number)) for number in range(4)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.csv", b"prompt;answer\nq;1\nq;1;2\n", "p.csv, line 3: has 3 values, but the header has 2 columns; quote values"),
        ("p.csv", b'prompt,answer\n"a\nb",1\nq\n', "p.csv, line 4: has 1 values, but the header has 2 columns"),
        ("p.csv", b"prompt,answer\n\xe9,1\n", "or convert it: iconv -f WINDOWS-1252 -t UTF-8"),
        ("p.jsonl", '{"prompt": "q"}\n'.encode("utf-16"), "or convert it: iconv -f UTF-16 -t UTF-8"),
        ("p.json", b'[{"prompt": "\xe9"}]', "p.json: not a JSON array: not UTF-8: invalid continuation byte (0xe9) at byte 14"),
        ("p.csv", b"prompt,prompt\nq,1\n", "p.csv: its header has a column twice: prompt, prompt"),
        ("p.json", b'[{"prompt": "q", "answer": "a"}, 7]', "p.json, entry 2: int instead of an object"),
        ("p.jsonl.gz", gzip.compress(as_jsonl(ROWS), mtime=0)[:-9], "p.jsonl.gz: cannot be read: Compressed file ended"),
    ],
)
def test_what_is_wrong_with_a_file_of_another_form_is_named(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as raised:
        FileSource(file_task(tmp_path / name, heldout=1), seed=0)
    assert said in str(raised.value)


def test_a_folder_and_a_pattern_are_all_their_files_and_mistakes_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write_jsonl(tmp_path / "a.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "more" / "b.jsonl", ROWS[3:6])
    for name in ("README.md", "_SUCCESS", "a.jsonl.sha256", "more/.part-0.jsonl"):
        (tmp_path / name).write_text("not data")
    for path, expected in ((tmp_path, 6), (tmp_path / "*.jsonl", 3), (tmp_path / "**" / "b.*", 3)):
        assert len(FileSource(file_task(path, heldout=1), seed=0).problems) == expected
    assert len(FileSource(file_task(tmp_path, heldout=1, max_rows=4), seed=0).problems) == 4
    assert FileSource(file_task(tmp_path, heldout=1), seed=0).problems[-1].place == "line 3 of /more/b.jsonl"
    (tmp_path / "more" / "c.csv").write_bytes(b"prompt,answer\n,1\n")
    several = r"this folder holds \.csv \(1 file, such as more/c\.csv\), \.jsonl \(2 files, such as a\.jsonl\); select one"
    refused(FieldError, several + r" kind by its folder or a pattern, such as .*\*\*/\*\.jsonl\*", tmp_path, heldout=1)
    (tmp_path / "none").mkdir()
    refused(FieldError, r"task\.path = .*none'?: this folder holds no \.jsonl", tmp_path / "none")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("train/0.jsonl", "Test/0.jsonl"), "test (1 file, such as Test/0.jsonl), train (1 file"),
        (("set-train-0.jsonl", "set-train-1.jsonl", "set-val-0.jsonl"), "train (2 files"),
        (("latest.jsonl", "trained.jsonl", "train.jsonl"), ""),
    ],
)
def test_a_folder_that_holds_a_test_set_too_is_refused(tmp_path: Path, names: tuple[str, ...], told: str) -> None:
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [{"prompt": name, "answer": str(number)}])
    if told:
        refused(FieldError, re.escape(f"this folder holds {told}"), tmp_path, heldout=1)
    else:
        assert len(FileSource(file_task(tmp_path, heldout=1), seed=0).problems) == 3


def test_rows_as_dapo_and_verl_have_them_in_parquet(tmp_path: Path) -> None:
    """Nested reference, messages with null keys and content parts, a column whose own name has a dot."""
    rows: list[dict[str, Any]] = [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {n} + 1?", "tool_calls": None}],
            "reward_model": {"ground_truth": str(n + 1), "style": "rule"},
            "a.b": "plain",
            "a": {"b": "nested"},
        }
        for n in range(4)
    ]
    rows[1]["prompt"][0]["tool_calls"] = []
    path = write_parquet(tmp_path / "dapo.parquet", rows)
    nested = {"prompt_style": "chat", "answer_field": "reward_model.ground_truth"}
    first = FileSource(file_task(path, **nested), seed=0).problems[0]
    assert first.messages == ({"role": "user", "content": "What is 0 + 1?"},)
    assert first.reference["answer"] == "1"
    assert first.reference["row"]["data_source"] == "math_dapo"
    assert FileSource(file_task(path, **{**nested, "answer_field": "a.b"}), seed=0).problems[0].reference["answer"] == "plain"
    filled = file_task(path, **nested, prompt_template="{reward_model.ground_truth}, {{a}} {} \\frac{1}{2}")
    assert FileSource(filled, seed=0).problems[0].question == "1, {a} {} \\frac{1}{2}"
    with pytest.raises(FieldError, match=r"task\.answer_field = 'reward_model\.truth': .*reward_model\.ground_truth, reward"):
        FileSource(file_task(path, **{**nested, "answer_field": "reward_model.truth"}), seed=0)
    with pytest.raises(UserError, match=r"row 1: field 'reward_model' is .* try field 'reward_model\.ground_truth'"):
        FileSource(file_task(path, **{**nested, "answer_field": "reward_model"}), seed=0)


def test_parts_of_text_are_one_text_other_parts_are_a_mistake_and_a_call_of_a_tool_needs_no_content(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": parts}], "answer": ["2"]}, *ROWS])
    first = FileSource(file_task(path, prompt_style="chat"), seed=0).problems[0]
    assert first.messages == ({"role": "user", "content": "What is 1 + 1?"},)
    assert first.reference["answer"] == "2"
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    path = write_jsonl(tmp_path / "i.jsonl", [{"prompt": [{"role": "user", "content": image}], "answer": "2"}])
    refused(UserError, r"i\.jsonl, line 1: field 'prompt' has .*image_url.*not a message", path, prompt_style="chat")
    call = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
    rows = [{"prompt": [call, {"role": "tool", "content": text}], "answer": "a"} for text in "pq"]
    source = make_source(file_task(write_jsonl(tmp_path / "p.jsonl", rows), heldout=1, prompt_style="chat"), seed=0)
    assert source.problem(Split.HELDOUT, 0).messages[0] == {**call, "content": ""}


@pytest.mark.parametrize(
    ("row", "path", "answer"),
    [
        ({"a.b": "column", "a": {"b": "path"}}, "a.b", "column"),
        ({"a.b": {"c": "outer"}}, "a.b.c", "outer"),
        ({"a": ["zero", {"b": "one"}]}, "a.1.b", "one"),
    ],
)
def test_a_path_leads_into_columns_and_lists(row: dict[str, Any], path: str, answer: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "p", **row}, {"prompt": "q", **row}])
    problem = make_source(file_task(file, heldout=1, answer_field=path), seed=0).problem(Split.HELDOUT, 0)
    assert problem.reference["answer"] == answer


def test_repeated_prompts_and_empty_answers_are_counted_and_a_byte_order_mark_or_another_number_is_none(tmp_path: Path) -> None:
    rows = [{"prompt": prompt, "answer": "4", "extra_info": {"index": n}} for n, prompt in enumerate(("p", "p", "q"))]
    source = make_source(file_task(write_jsonl(tmp_path / "p.jsonl", rows), heldout=1), seed=0)
    assert isinstance(source, FileSource)
    assert (source.num_repeated, source.first_repeated, source.num_contradicted) == (1, "line 2 ('p')", 0)
    rows = [*ROWS, {"prompt": "q1", "answer": 1}, {"prompt": "q2", "answer": "two"}, {"prompt": "q", "answer": " "}]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    source = make_source(file_task(path), seed=0)
    assert isinstance(source, FileSource)
    assert (source.num_repeated, source.first_repeated, source.num_contradicted) == (2, "line 11 ('q1')", 1)
    assert (len(source.problems), [one.place for one in source.unanswered]) == (11, ["line 13"])


def test_small_files_that_unpack_to_very_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("LONGEST_LINE", 1000), ("LARGEST_WHOLE", 2000), ("LARGEST_UNPACKED", 3000)):
        monkeypatch.setattr(rows, name, limit)
    much = {"long.jsonl": b" " * 1001, "many.jsonl": b"{}\n" * 1001, "array.json": b" " * 2001, "table.parquet": b" " * 2001}
    for name, content in much.items():
        path = tmp_path / f"{name}.gz"
        path.write_bytes(gzip.compress(content))
        refused(UserError, rf"{name}\.gz: .*more than \d,000 bytes", path)


def test_the_reference_may_be_a_part_of_the_answer(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{n}", "answer": f"<<2+{n}={n + 2}>> so\n#### {n + 2}\n"} for n in range(4)]
    task = {"answer_pattern": r"####\s*(.+)", "heldout": 1}
    source = FileSource(file_task(write_jsonl(tmp_path / "p.jsonl", rows), **task), seed=0)
    assert [one.reference for one in source.problems] == [{"answer": str(n + 2)} for n in range(4)]
    rows[2]["answer"] = "no mark"
    with pytest.raises(UserError, match=r"line 3: task\.answer_pattern finds nothing in field 'answer': 'no mark'"):
        FileSource(file_task(write_jsonl(tmp_path / "p.jsonl", rows), **task), seed=0)


def test_a_field_that_no_line_has_is_told_with_those_that_there_are(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"question": "1+1?", "answer": "2"}] * 3)
    refused(FieldError, r"task.prompt_field = 'prompt': .*no such field; .* its fields: question, answer", path)
    with pytest.raises(FieldError, match=r"task.answer_field = 'solution': .* its fields: question, answer"):
        make_source(file_task(path, prompt_field="question", answer_field="solution"), seed=0)


@given(weights=st.lists(st.floats(0.01, 100) | st.integers(1, 9), min_size=1, max_size=6), start=st.integers(0, 10**9))
def test_each_task_gets_its_share_and_its_problems_in_order(weights: list[float], start: int) -> None:
    """Of any n problems from the first on, off by half the number of tasks at most; each task's own indices have no gap."""
    interleaving, total = Interleaving(weights), sum(weights)
    counts = [0] * len(weights)
    for number in range(60):
        position, index = interleaving.place(number)
        assert index == counts[position]
        counts[position] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (number + 1) * weight / total) <= len(weights) / 2 + 1e-9
    far = [interleaving.place(number) for number in range(start, start + 60)]
    for position in range(len(weights)):
        indices = [index for place, index in far if place == position]
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else True
        for index in indices[:1]:
            assert abs(index - start * weights[position] / total) <= len(weights) / 2 + 1
