"""docs/metrics.md says what the services export."""

from deploy.tools.metrics_reference import PART, ROOT, catalogue


def test_the_table_of_metrics_is_what_the_services_register() -> None:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert PART.replaced(text) == text, f"run: {PART.command}"


def test_a_metric_is_linked_to_the_file_that_makes_it() -> None:
    for sourced in (sourced for metrics in catalogue().values() for sourced in metrics):
        name = sourced.family.name.partition("_")[2].partition("_")[2]
        assert f'"{name}"' in (ROOT / sourced.path).read_text(encoding="utf-8"), f"{sourced.path} does not make {name}"


def test_names_are_of_one_service_each() -> None:
    names = [sourced.family.name for metrics in catalogue().values() for sourced in metrics]
    assert len(names) == len(set(names))
    assert all(name.startswith("pipelinerl_") for name in names)
