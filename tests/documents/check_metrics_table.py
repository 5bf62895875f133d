"""docs/metrics.md says what the services export, docs/run-directory.md the figures of a step and of the run, and docs/doctor.md
the rules of the doctor."""

from deploy.tools.doctor_reference import PART as RULES
from deploy.tools.figures_reference import PARTS
from deploy.tools.metrics_reference import PART, ROOT, catalogue, sources


def test_the_tables_of_metrics_and_figures_are_up_to_date() -> None:
    figures = [("docs/run-directory.md", part) for part in PARTS]
    for document, part in (("docs/metrics.md", PART), *figures, ("docs/doctor.md", RULES)):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert part.replaced(text) == text, f"run: {part.command}"


def test_a_service_is_linked_to_the_files_that_make_its_metrics() -> None:
    for service, families in catalogue().items():
        texts = "".join((ROOT / path).read_text(encoding="utf-8") for path in sources(service))
        names = [family.name.partition("_")[2].partition("_")[2] for family in families]
        said = (f'"{name}"' in texts or f'"{name.removeprefix("task_")}"' in texts for name in names)
        assert [name for name, known in zip(names, said, strict=True) if not known] == [], service


def test_names_are_of_one_service_each() -> None:
    names = [family.name for families in catalogue().values() for family in families]
    assert len(names) == len(set(names))
    assert all(name.startswith("pipelinerl_") for name in names)
