"""`pipelinerl recipes` and `pipelinerl init`: what is listed and written, and that each template works as it is written."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import yaml

from pipelinerl.cli import main
from pipelinerl.commands.init import TEMPLATES
from pipelinerl.doctor.recipes import quick_findings
from pipelinerl.errors import FieldError
from pipelinerl.recipe.loading import find_recipe, found_beside, load_recipe, modules_beside, read_recipe
from pipelinerl.recipe.preflight import Examination, environment_with, try_import
from pipelinerl.run_dir import create_run_dir
from pipelinerl.tasks.rows import rows_of
from pipelinerl.tasks.source import FileSource, Split
from tests.support.runs import Command

REPO = Path(__file__).parents[2]
OPTIONS = {"sums": []} | {name.name: ["--from", name.name] for name in TEMPLATES.iterdir() if name.name not in ("sums", "data")}
CSV = 'Nr,Question,Answer\n1,"What is 2+2, roughly?",4\n2,Capital of France?,Paris\n'


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_API_KEY", "none")
    return tmp_path


def test_every_shipped_recipe_is_listed_with_what_it_needs(pipelinerl: Command) -> None:
    code, printed, _ = pipelinerl("recipes", "--json")
    rows = {row["name"]: row for row in json.loads(printed)}
    assert code == 0
    assert rows.keys() == {file.stem for file in (REPO / "recipes").glob("*.yaml")}
    for name, row in rows.items():
        on_cpu = read_recipe(find_recipe(name))["model"]["dtype"] == "float32"
        assert (row["device"], row["minutes"] is not None, row["memory_gib"] is not None) == (
            "cpu" if on_cpu else "gpu", on_cpu, on_cpu,
        )  # fmt: skip
    states_gib = 7.7e9 * 18 / 2**30  # by its name; 16-bit and float32 weights, gradients, moments
    assert rows["gsm"]["trainer_gib"] == pytest.approx(states_gib, abs=0.1)
    shown = pipelinerl("recipes")[1]
    assert all(row["description"][:40] in shown for row in rows.values())


@pytest.mark.parametrize("template", OPTIONS)
def test_a_template_is_valid_and_passes_its_own_test(pipelinerl: Command, workplace: Path, template: str) -> None:
    code, printed, _ = pipelinerl("init", "tasks/My Task", *OPTIONS[template])
    folder = workplace / "tasks" / "My Task"
    assert code == 0
    assert "pipelinerl run 'tasks/My Task'/recipe.yaml" in printed
    assert len((folder / "README.md").read_text().splitlines()) <= 10
    (tests,) = folder.glob("test_*.py")
    assert f", change {tests.name}, too\n" in printed
    assert "change these tests too" in tests.read_text()
    code, printed, _ = pipelinerl("validate", "tasks/My Task/recipe.yaml")
    assert code == 0
    assert printed.startswith("my-task: valid")
    assert "warning" not in printed
    data = next(file for file in folder.iterdir() if file.stem in ("problems", "questions"))
    assert len(data.read_text().splitlines()) == (11 if data.suffix == ".csv" else 10)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    pipelinerl("init", "tasks/My Task")
    assert pipelinerl("init", "tasks/My Task")[0] == 2, "it is not empty"


def test_questions_of_a_file_become_a_task(pipelinerl: Command, workplace: Path) -> None:
    (workplace / "mine.csv").write_text(CSV.replace(",", ";"), encoding="utf-8-sig")
    assert pipelinerl("init", "first", "--data", "mine.csv")[0] == 0
    task = load_recipe("first/recipe.yaml").task
    assert (task.path, task.heldout_problems) == ("first/mine.csv", 1)
    assert (task.prompt_field, task.answer_field) == ("Question", "Answer")
    code, printed, _ = pipelinerl("validate", "first")
    assert (code, "reference answers (1) earn 1; empty ones (1) earn 0" in printed) == (0, True), printed
    (workplace / "mine.jsonl").write_text("".join(json.dumps({"a": str(n), "b: c": "x"}) + "\n" for n in range(50)))
    assert pipelinerl("init", "second", "--data", "mine.jsonl", "--question", "a", "--answer", "b: c")[0] == 0
    task = load_recipe("second/recipe.yaml").task
    assert (task.prompt_field, task.answer_field, task.heldout_problems) == ("a", "b: c", 10)
    text = 'DATA, ANSWER, Question \U0001f600,,\n1, "x, y",a,,\n,,,,\n1,DATA,"b\nc",,\n , ,,,\n'
    (workplace / "DATA \U0001f600.CSV").write_text(text, encoding="utf-8", newline="\r\n")
    options = ["--question", "ANSWER", "--answer", "Question \U0001f600"]  # ANSWER is a placeholder, too
    assert pipelinerl("init", "third", "--data", "DATA \U0001f600.CSV", *options)[0] == 0
    task = load_recipe("third/recipe.yaml").task
    rows = [row.values for row in rows_of(task)]
    names = {"DATA": "1", "ANSWER": "x, y", "Question \U0001f600": "a"}
    assert (task.prompt_field, task.answer_field, rows[0], len(rows)) == ("ANSWER", "Question \U0001f600", names, 2)


def test_known_forms_of_data_sets_become_prompts_and_final_answers(pipelinerl: Command, workplace: Path) -> None:
    worked, long = "He has 5 - 2 = <<5-2=3>>3.\n#### 3", "She writes a letter of many words. " * 6
    forms = {
        "gsm8k": ("question", "", worked, "3"),
        "math": ("problem", "", r"So $f(0) = \boxed{\sqrt{\frac{1}{2}}}$.", r"\sqrt{\frac{1}{2}}"),
        "alpaca": ("instruction", "twelve", long, long),
    }
    for name, (column, more, given, wanted) in forms.items():
        rows = [{"input": f"{more} {number}", column: f"Write {number}", "output": given} for number in range(5)]
        (workplace / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert pipelinerl("init", name, "--data", f"{name}.jsonl")[0] == 0
        task = (recipe := load_recipe(f"{name}/recipe.yaml")).task
        problem = (source := FileSource(task, 0)).problem(Split.HELDOUT, 0)
        number = problem.question.split()[1]
        assert problem.question == f"Write {number}" + f"\ntwelve {number}" * (name == "alpaca")
        assert problem.reference["answer"] == wanted
        found = [f"{one.gravity} {one.id}" for one in quick_findings(recipe, Examination(sources={"": source}))]
        assert ("warning max-tokens-small" in found) == (name == "alpaca")
    verl = [{"prompt": [{"role": "user", "content": f"{n}?"}], "reward_model": {"ground_truth": str(n)}} for n in range(5)]
    (workplace / "verl.jsonl").write_text("\n".join(map(json.dumps, verl)))
    assert pipelinerl("init", "verl", "--data", "verl.jsonl")[0] == 0
    assert load_recipe("verl/recipe.yaml").task.answer_field == "reward_model.ground_truth"
    pipelinerl("init", "bare", "--data", "alpaca.jsonl", "--question", "instruction")
    assert "prompt_template" not in Path("bare/recipe.yaml").read_text(), "a column that is given is the whole prompt"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("full", "DIR = 'full': is not an empty folder; name a new one"),
        ("new --data none.csv", "--data = 'none.csv': there is no file at /"),
        ("new --data full/data.txt", "--data = 'full/data.txt': give a file of questions and answers: CSV"),
        ("a:b --data full/mine.csv", "a:b': Python cannot import a reward from a path with ':'; choose one without it"),
        ("new --data full/mine.csv --answer nr", "--answer = 'nr': is no column of the file; use Nr, Question or Answer"),
        ("new --data full/other.jsonl", "--question is missing: no column is called question, prompt, problem, query, "),
        ("new --data full/header.csv", "contains no problems; give another file (at least 2 problems are needed"),
        ("new --data full/same.csv", "same.csv, which repeats line 3 ('a'), has 1 distinct problem; some must be left for"),
        ("new --data full/bool.jsonl", "line 1: field 'answer' is True; it must be a text or a number, such as 'true'"),
        ("new --data full/whole.json", "whole.json: holds one object with data; give an array of objects, or one object on"),
        ("new --data full/utf16.csv", "not UTF-8: 26 of 53 bytes are zero; save it as UTF-8, or convert it: iconv -f UTF-16LE"),
        ("new --data full/cr.csv", "save it with the line ends of Linux or Windows"),
        ("new --data full/mine.csv --question Answer", "--answer = 'Answer': is the column of the questions; name another one"),
        ("full/mine.csv/new", "DIR = 'full/mine.csv/new': cannot be written: Not a directory; name another folder"),
        ("new --question a", "--question = 'a': applies only to --data FILE; give that, too, or leave this out"),
    ],
)
def test_a_mistake_is_named_and_nothing_is_written(pipelinerl: Command, workplace: Path, arguments: str, said: str) -> None:
    (workplace / "full").mkdir()
    for name, text in {
        "mine.csv": CSV,
        "data.txt": CSV,
        "other.jsonl": '{"a": 1, "b": 2}\n' * 3,
        "header.csv": "question,answer\n",
        "same.csv": "question,answer\na,1\na,1\n",
        "bool.jsonl": '{"question": 1, "answer": true}\n' * 2,
        "whole.json": json.dumps({"data": [{"question": 1, "answer": 2}]}),
        "utf16.csv": "\0".join("question, answer, and more\n") + "\0\na\n",
        "cr.csv": "question,answer\ra,1\rb,2\r",
    }.items():
        (workplace / "full" / name).write_text(text)
    before = sorted(workplace.rglob("*"))
    code, _, errors = pipelinerl("init", *arguments.split())
    assert code == 2
    assert said in errors
    assert sorted(workplace.rglob("*")) == before


def test_a_recipe_finds_what_is_beside_it_and_a_run_keeps_its_modules(workplace: Path) -> None:
    assert main(["init", "mine", "--from", "agent"]) == 0
    recipe = load_recipe("mine/recipe.yaml")
    assert (recipe.task.path, recipe.task.command) == ("mine/problems.jsonl", "python mine/agent.py")
    assert modules_beside(recipe, Path("mine/recipe.yaml")) == Path("mine")
    for library in ("json.py", "numpy/__init__.py"):
        (hiding := Path("mine", library)).parent.mkdir(exist_ok=True)
        hiding.touch()
        with pytest.raises(FieldError, match=r"would hide the library (json|numpy) from the verifier; rename or move it"):
            modules_beside(recipe, Path("mine/recipe.yaml"))
        hiding.unlink()
    (workplace / "problems.jsonl").touch()  # the file beside the recipe comes first
    (workplace / "reward.py").write_text("raise SystemExit('of the current folder')")
    try_import("reward.scorer", "reward:score", "{}", environment_with(Path("mine")))
    in_lists = read_recipe(Path("mine/recipe.yaml"))
    in_lists |= {
        "tasks": [{"task": in_lists.pop("task")}],
        "evaluation": {"sets": [{"task": {"source": "jsonl", "path": "*.csv"}}]},
    }
    Path("mine/both.yaml").write_text(yaml.safe_dump(in_lists))
    Path("mine/a.csv").touch()
    places = load_recipe("mine/both.yaml", ["evaluation.sets.0.name=set"]).sets_by_place
    assert [one.task.path for one in places.values()] == ["mine/problems.jsonl", "mine/*.csv"]
    Path("mine/a [1].csv").touch()
    assert found_beside({"task": {"path": "a [1].csv"}}, Path("mine"))["task"] == {"path": "mine/a [1].csv"}
    assert found_beside({"task": {"path": "a" * 256}}, Path("mine"))["task"] == {"path": "a" * 256}
    run_dir = create_run_dir("mine", datetime.now(), path=workplace / "run")
    run_dir.keep_modules(Path("mine"))
    run_dir.keep_modules(None)
    assert {file.name for file in run_dir.modules.iterdir()} == {"agent.py", "reward.py", "test_reward.py"}
