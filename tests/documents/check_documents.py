"""Documents are true: links lead somewhere, generated parts are current, every recipe, file and key is described."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from deploy.tools import recipe_reference as reference
from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.fields import Recipe, section_of
from pipelinerl.rl.groups import StaleReason
from pipelinerl.rl.ledger import LedgerCounts, Outcome
from pipelinerl.run_dir import RunDir
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyStatus
from tests.unit.builders import make_group, make_recipe, make_sequence

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "benchmarks/README.md"]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)


def prose(document: Path) -> str:
    """The text without fenced and indented code."""
    text = _FENCED.sub("", document.read_text(encoding="utf-8"))
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, punctuation gone, spaces to dashes."""
    words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return words.replace(" ", "-")


def broken_links(document: Path) -> Iterator[str]:
    for target in _LINK.findall(prose(document)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            yield f"{target}: no such file"
        elif re.fullmatch(r"L\d+", fragment):
            if int(fragment[1:]) > len(file.read_text(encoding="utf-8").splitlines()):
                yield f"{target}: no such line"
        elif fragment and fragment not in map(anchor, _HEADING.findall(prose(file))):
            yield f"{target}: no such heading"


def test_there_are_documents_to_check() -> None:
    assert {"README.md", "architecture.md", "0001-one-shared-package.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One, two\n[a](#one-two) [b](#three) [c](gone.md) [d](https://example.org/x)\n    [e](code.md)\n")
    assert list(broken_links(page)) == ["#three: no such heading", "gone.md: no such file"]


def test_the_recipe_reference_is_what_the_models_say() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert reference.PART.replaced(text) == text, f"run: {reference.PART.command}"


def test_the_reference_has_type_default_bounds_and_meaning_of_a_field() -> None:
    assert (
        "| `group_size` | an integer, at least 1 and at most 1024 | `8` | n: samples per prompt. |"
        in reference.reference()
    )


def test_every_recipe_field_has_a_meaning() -> None:
    silent = [
        f"{path}.{name}"
        for path, model in reference.sections(Recipe)
        for name, field in model.model_fields.items()
        if not field.description and section_of(field.annotation) is None
    ]
    assert silent == []


def test_every_recipe_is_described() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert [path.stem for path in ROOT.glob("recipes/*.yaml") if f"| `{path.stem}` |" not in text] == []


def test_benchmark_results_are_those_of_the_result_files() -> None:
    for document in table.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert table.filled(text) == text, "run: python -m benchmarks.table"


def test_every_benchmark_result_has_its_place() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in table.DOCUMENTS)
    results = [path.stem for path in (table.FOLDER / "results").glob("*.json")]
    assert [name for name in results if f"<!-- result: {name} -->" not in text] == []


def test_a_result_becomes_a_table(tmp_path: Path) -> None:
    result = {"goal": 0.5, "machine": {"cores": 2}, "rows": [{"payload": "1 KB", "ratio": 0.75, "rounds": [1, 2]}]}
    (tmp_path / "speed.json").write_text(json.dumps(result))
    filled = table.filled("<!-- result: speed -->\nold\n<!-- end -->\n", tmp_path)
    rows = "| goal | payload | ratio |\n|---|---|---|\n| 0.500 | 1 KB | 0.750 |"
    assert filled == f"<!-- result: speed -->\n\n{rows}\n\nMeasured with cores 2.\n\n<!-- end -->\n"


def undescribed(keys: Iterator[str] | set[str], section: str) -> list[str]:
    """Keys without a row of their own in a section of docs/run-directory.md."""
    text = (ROOT / "docs/run-directory.md").read_text(encoding="utf-8")
    body = re.split(r"^## ", text.partition(f"\n## {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    described = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    return sorted(set(keys) - described)


def figures_of_a_step() -> dict[str, Any]:
    """What the learner and the loop hand to the report, of two tokens of lag 0 and 1."""
    import numpy as np

    from services.trainer.learn.batch import host_microbatch
    from services.trainer.learn.metrics import token_figures
    from services.trainer.learn.step import StepOutcome
    from services.trainer.policy_trainer import throughput

    batch = host_microbatch([make_sequence(make_group(), 0)], np.ones(1), np.ones(1), 1)
    values = np.zeros((5, len(batch.targets)), dtype=np.float32)
    told = {"learning_rate": 1e-4, "grad_norm": 1.0, "skipped": "", "advantage_abs_mean": 0.5, "imbalance": 0.0}
    outcome = StepOutcome(token_figures(values, np.zeros(3), [batch], 8) | told, {"plan": 1.0}, 1, {})
    return {
        **outcome.metrics,
        **throughput(outcome, 1.0, 1.0, num_devices=1, peak_flops=None),
        "idle_s": 0.2,
        "step": 1,
        "policy_version": 1,
        "step_s": {"wait": 1.0, "compute": 1.0, "snapshot": 0.1, "send": 0.1, "total": 2.2},
        "sequences": LedgerCounts().as_dict(),
    }


def test_every_key_of_metrics_and_summary_is_described(tmp_path: Path) -> None:
    import numpy as np
    from prometheus_client import CollectorRegistry

    from services.trainer.learn.batch import TrainingGroup
    from services.trainer.records import RunFiles
    from services.trainer.reporting.metrics import TrainerMetrics
    from services.trainer.reporting.recorder import Recorder
    from services.trainer.weight_sync.updater import UpdateRecord
    from tests.unit.trainer_fakes import parts_of_a_run

    group = make_group()
    batch = [TrainingGroup((make_sequence(group, 0), make_sequence(group, 1)), np.array([0.5, -0.5]))]
    with RunFiles(tmp_path) as files:
        recorder = Recorder(make_recipe(), files, TrainerMetrics(CollectorRegistry()))
        recorder.served(UpdateRecord(1, stall_s={"actor-0": 0.01}))
        recorder.step(figures_of_a_step(), batch, tokens_arrived=4)
        recorder.watch(parts_of_a_run())
        recorder.write_summary(finished=True)
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    sample = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert undescribed({*record, *record["weight_update"]}, "metrics.jsonl") == []
    assert undescribed(set(sample), "samples.jsonl") == []
    assert undescribed({*summary, "restarts", "error"}, "summary.json") == []


def test_an_undescribed_key_is_found() -> None:
    assert undescribed({"loss", "flux"}, "metrics.jsonl") == ["flux"]


def test_every_file_of_the_run_directory_is_described() -> None:
    text = (ROOT / "docs/run-directory.md").read_text(encoding="utf-8")
    run = RunDir(Path("runs/a"), "a")
    files = [
        run.recipe,
        run.metrics,
        run.samples,
        run.summary,
        run.pids,
        run.report,
        run.checkpoint,
        run.nats_store,
        run.scale,
    ]
    assert [path.name for path in files if f"`{path.name}" not in text] == []


def test_every_outcome_and_reason_is_described() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    bad_rewards = [f"reward_{status_name(status)}" for status in VerifyStatus.values() if status > VERIFY_STATUS_OK]
    fixed = [*bad_rewards, *StaleReason, *(outcome for outcome in Outcome if outcome is not Outcome.TRAINED)]
    assert [name for name in fixed if f"`{name}`" not in text] == []
    given = re.findall(r'return "([a-z ]+)"', (ROOT / "pipelinerl/rl/groups.py").read_text())
    assert len(given) >= 2
    assert [reason for reason in given if f"`{reason}`" not in text] == []


def span_names() -> set[str]:
    """Written out in files that make spans; the names of an update's orders are put together there."""
    files = [file for folder in ("pipelinerl", "services") for file in (ROOT / folder).rglob("*.py")]
    texts = [text for file in files if "telemetry.spans import" in (text := file.read_text(encoding="utf-8"))]
    name = re.compile(r'"((?:group|sequence|step|reward|weight_update|evaluation)\.[a-z]+|weight_update|evaluation)"')
    return {found for text in texts for found in name.findall(text)} | {"weight_update.announce"}


def test_every_span_is_documented_and_no_others_are() -> None:
    text = (ROOT / "docs" / "traces.md").read_text(encoding="utf-8").partition("## One sequence")[0]
    assert span_names() == set(re.findall(r"^\| `([a-z_]+(?:\.[a-z]+)?)` \|", text, re.MULTILINE))
