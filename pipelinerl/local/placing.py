"""Choose the GPUs of a local run's processes before the run starts."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.errors import FieldError
from pipelinerl.recipe.devices import find_devices, has_gpu
from pipelinerl.recipe.fields import Recipe
from pipelinerl.recipe.model_folder import hub_parameters, known_model, known_parameters
from pipelinerl.recipe.rules import value_at
from pipelinerl.rl.placement import AUTOMATIC, OPTION, Placement, numbered, pinned, place, table
from pipelinerl.run_dir import RunDir, write_json


def placed_here(recipe: Recipe, wanted: str = "") -> tuple[Recipe, Placement | None, list[str]]:
    """Return the recipe, with numbers for `auto` and, if needed, Gloo for NCCL; the placement (None without a GPU); and lines
    to print. `wanted`: the user's placement, as JSON or as a JSON file's name; "" = choose one. Raises `FieldError` if the
    placement is invalid, or if it or the recipe does not fit this machine."""
    found = find_devices()
    if not found.devices:
        if wanted:
            raise FieldError(OPTION, wanted, f"{found.problem}; leave this option out")
        if recipe.actor.colocate:
            raise FieldError("actor.colocate", True, f"needs a GPU: {found.problem}; use false here")
        return numbered(recipe), None, [f"note: the run uses the CPU: {found.problem}"] if has_gpu() else []
    parameters = known_parameters(recipe.model) or hub_parameters(recipe.model)
    devices, model = found.devices, known_model(recipe, parameters) if parameters else None
    recipe, placement = pinned(recipe, devices, _text(wanted), model) if wanted else place(recipe, devices, model)
    lines = [*table(placement, devices)]
    if model is None:
        lines.append("warning: the size of the model is unknown, so the memory that it needs was not checked")
    on_instance = any(device.is_instance for device in devices if device.uuid in placement.trainer)
    if placement.is_shared and (why := _why_not_nccl(found.nccl, on_instance)):
        if recipe.weights.backend == "nccl":
            raise FieldError("weights.backend", "nccl", f"{why}; use auto or gloo")
        if recipe.weights.backend == "log":
            return recipe, placement, lines
        lines.append(f"note: weights are sent by Gloo, since {why}")
        recipe = recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"backend": "gloo"})})
    return recipe, placement, lines


def write_placement(run_dir: RunDir, recipe: Recipe, placement: Placement | None) -> None:
    """Write the placement and the names of the `auto` fields to a file. `recipe`: the recipe before `auto` was replaced."""
    automatic = [field for field in AUTOMATIC if value_at(recipe, field) in (None, "auto")]
    run_dir.placement.unlink(missing_ok=True)
    if placement is not None or automatic:
        write_json(run_dir.placement, {**(placement.model_dump(mode="json") if placement else {}), "automatic": automatic})


def _text(wanted: str) -> str:
    """Return the user's placement as JSON text, read from the file that `wanted` may name."""
    if wanted.lstrip().startswith("{"):
        return wanted
    try:
        return Path(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError(OPTION, wanted, f"cannot be read ({error}); give JSON, or the name of a JSON file") from error


def _why_not_nccl(release: tuple[int, ...], on_instance: bool) -> str:
    """Return why NCCL cannot be used between two processes on one GPU or MIG instance, or ""."""
    if release < (2, 30):
        return "NCCL before 2.30 does not connect two processes on one GPU"
    return "NCCL has not been tried between two processes on a MIG instance" if on_instance else ""
