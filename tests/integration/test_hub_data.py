"""Data sets by name: the real library `datasets` against a stand-in for the hub, its cache, and a local folder."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.hub import COMMIT, hub_with

NAME = "openai/gsm8k"
README = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""
CHILD = """
import json, sys
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.tasks.source import make_source
for task in json.load(sys.stdin):
    try:
        source = make_source(TaskConfig(**task), seed=0)
        first = source.problems[0]
        print(json.dumps([len(source.problems), first.question, first.reference["answer"], first.place]))
    except ValueError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""
NUM_ROWS = {"main/train-0.parquet": 50, "main/test-0.parquet": 20, "socratic/train-0.parquet": 5}
CARD_OF_IMAGES = b"""---
dataset_info:
  features:
  - {name: picture, dtype: image}
  - {name: question, dtype: string}
  - {name: answer, dtype: string}
---
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    from pyarrow import Table
    from pyarrow.parquet import write_table

    buffer = io.BytesIO()
    write_table(Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def problems(num_rows: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>.\n#### {n + 1}"} for n in range(num_rows)]


def loaded(tasks: list[dict[str, Any]], home: Path, **environment: str) -> list[list[Any]]:
    given = {"source": "hub", "path": NAME, "config": "main", "prompt_field": "question", "heldout_problems": 2}
    set_here = {"HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([{**given, **task} for task in tasks]),
        capture_output=True,
        text=True,
        env={**os.environ, **set_here, **environment},
    )
    assert "hf_secret" not in child.stdout + child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_a_set_of_the_hub_is_read_by_name_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    pattern = {"answer_pattern": r"####\s*(.+)"}
    files = {path: parquet(problems(number)) for path, number in NUM_ROWS.items()}
    (folder := tmp_path / "set").mkdir()
    (folder / "README.md").write_bytes(CARD_OF_IMAGES)
    rows = [{"picture": {"bytes": b"no picture", "path": None}, "question": f"q{n}", "answer": "a"} for n in range(4)]
    (folder / "train.parquet").write_bytes(parquet(rows))
    with hub_with(NAME, {"README.md": README.encode(), **files}) as (endpoint, asked):
        whole, test, few, pictures, missing, split, subset, column, revision = loaded(
            [
                {},
                {"split": "test", **pattern},
                {"max_rows": 7, "config": "socratic", "prompt_template": r"Problem: {question} \boxed{} {{question}}"},
                {"path": str(folder), "config": ""},
                {"path": "openai/none"},
                {"split": "dev"},
                {"config": "other"},
                {"answer_field": "solution"},
                {"revision": "v2"},
            ],
            tmp_path,
            HF_ENDPOINT=endpoint,
            HF_TOKEN="hf_secret",
        )
    assert whole == [50, "What is 0 + 1?", "It is <<0+1=1>>.\n#### 1", "row 1 of /main/train"]
    assert test == [20, "What is 0 + 1?", "1", "row 1 of /main/test"]
    assert pictures == [4, "q0", "a", "row 1 of /train"], "they are left out"
    assert few[:2] == [5, r"Problem: What is 0 + 1? \boxed{} {question}"]
    assert (missing[0], missing[1].partition(", or")[0]) == (
        "FieldError",
        "task.path = 'openai/none': the hub has no such data set",
    )
    assert split[1].startswith("task.split = 'dev': openai/gsm8k has no such split")
    assert "'train', 'test'" in split[1]
    assert subset[1].startswith("task.subset = 'other': openai/gsm8k cannot be read with this configuration")
    assert "'main', 'socratic'" in subset[1]
    assert column[1].startswith("task.answer_field = 'solution': openai/gsm8k has no such field; ")
    assert column[1].endswith("question, answer")
    assert revision == ["FieldError", "task.revision = 'v2': openai/gsm8k has no such branch, tag or commit"]
    assert all(line.endswith("Bearer hf_secret") for line in asked)

    away = [{}, {"path": "openai/other"}, {"revision": COMMIT}, {"revision": "v2"}, {"max_rows": 3}]
    kept, absent, same, other, first = loaded(away, tmp_path, HF_ENDPOINT=endpoint)
    assert kept == same == whole, "of the cache: the hub is away"
    assert (other[0], absent[0]) == ("Lacking", "Lacking")
    assert other[1].startswith("task.revision = 'v2': the hub cannot be reached from here, and the cache of this machine holds")
    assert first == [3, *whole[1:]]
    assert "the hub cannot be reached from here" in absent[1]
