"""The imports of the product's files form no circle."""

import grimp


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of modules that import each other, directly or over others."""

    def reached(module: str) -> set[str]:
        found, todo = set[str](), [module]
        while todo:
            new = imports[todo.pop()] - found
            found |= new
            todo += new
        return found

    reach = {module: reached(module) for module in imports}
    on_circles = [module for module in imports if module in reach[module]]
    return {frozenset(other for other in reach[module] if module in reach[other]) for module in on_circles}


def test_circles_are_found_over_several_modules() -> None:
    imports: dict[str, set[str]] = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e", "a"}}
    assert circles(imports) == {frozenset("abc"), frozenset("ef")}


def test_no_files_import_each_other_in_a_circle_even_for_types_alone() -> None:
    graph = grimp.build_graph("pipelinerl", "services", cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert [sorted(circle) for circle in circles(imports)] == []
