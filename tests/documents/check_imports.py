"""The imports of the product's files form no circle."""

import graphlib

import grimp


def test_no_files_import_each_other_in_a_circle_even_for_types_alone() -> None:
    graph = grimp.build_graph("pipelinerl", "services", cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises `CycleError`, which names a circle
