"""Documents are true: links lead somewhere, generated parts are current, commands work, every reason is described."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import table
from deploy.tools.doctor_reference import PART as RULES
from deploy.tools.figures_reference import PARTS as FIGURES
from deploy.tools.metrics_reference import PART as METRICS
from deploy.tools.recipe_reference import PART as FIELDS
from pipelinerl.cli import build_parser, parsed
from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.rl.groups import StaleReason
from pipelinerl.rl.ledger import MEANINGS, Outcome
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VerifyStatus

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "benchmarks/README.md"]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
_COMMAND = re.compile(r"^    pipelinerl (\S.*?)(?:  +#.*)?$", re.MULTILINE)


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    assert list(broken_links(document)) == []


def test_generated_parts_are_up_to_date() -> None:
    figures = [("docs/run-directory.md", part) for part in FIGURES]
    own = (("docs/recipe-fields.md", FIELDS), ("docs/metrics.md", METRICS), ("docs/doctor.md", RULES))
    for document, part in (*own, *figures):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert part.replaced(text) == text, f"run: {part.command}"
    with pytest.raises(ValueError, match="needs one line"):
        FIELDS.replaced("no marks")


def test_commands_are_known_and_their_recipes_and_settings_valid() -> None:
    lines = [
        line for document in DOCUMENTS for line in _COMMAND.findall(document.read_text(encoding="utf-8").replace("\\\n", ""))
    ]
    shipped = {path.stem for path in ROOT.glob("recipes/*.yaml")}
    commands = [parsed(build_parser(), shlex.split(line)) for line in lines if "SIZE" not in line]
    named = [
        args for args in commands if (name := getattr(args, "recipe", None)) in shipped or (name and (ROOT / name).is_file())
    ]
    assert len(named) > 8
    for args in named:
        load_recipe(args.recipe, args.overrides)


def test_benchmark_results_are_those_of_the_result_files_and_each_has_its_place() -> None:
    for document in table.DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        assert table.filled(text) == text, "run: python -m benchmarks.table"
    text = "".join(document.read_text(encoding="utf-8") for document in table.DOCUMENTS)
    results = [path.stem for path in (table.FOLDER / "results").glob("*.json")]
    assert [name for name in results if f"<!-- result: {name} -->" not in text and f"(results/{name}.json)" not in text] == []


def described(section: str) -> set[str]:
    """Keys with a row of their own in a section of docs/run-directory.md."""
    text = (ROOT / "docs/run-directory.md").read_text(encoding="utf-8")
    body = re.split(r"^## ", text.partition(f"\n## {section}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    first_cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(first_cells)))


def test_every_outcome_and_reason_is_described() -> None:
    text = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert [name for name in Outcome if name is not Outcome.TRAINED and f"`{name}`" not in text] == []
    bad_rewards = [f"reward_{status_name(status)}" for status in VerifyStatus.values() if status > VERIFY_STATUS_OK]
    given = re.findall(r'return "([a-z ]+)"', (ROOT / "pipelinerl/rl/groups.py").read_text())
    given += re.findall(r'^QUARANTINED = "(\w+)"', (ROOT / "services/trainer/data/intake.py").read_text(), re.MULTILINE)
    assert len(given) >= 3
    assert [reason for reason in (*given, *bad_rewards, *StaleReason) if reason not in MEANINGS] == []
    table = text.partition("| reason | given by | meaning |")[2].partition("\n\n")[0]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", table).replace("`", "")
    rows = re.findall(r"^\| (.+?) \| \w+ \| (.+) \|$", plain, re.MULTILINE)
    assert dict(rows) == MEANINGS, "the table of docs/errors.md has the words of pipelinerl.rl.ledger"
