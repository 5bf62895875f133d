"""The folder of one run: where each file is, how a new folder is made, and whether a run can continue from its contents."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from pipelinerl.audit.journal import JOURNAL, read_events
from pipelinerl.bus.protocol import check_run_name
from pipelinerl.errors import FieldError
from pipelinerl.local.credentials import Credentials

_RUN_NAME_LENGTH = 40
MOST_ACTORS = 64
"""Maximum number of actors on one machine. A larger number is probably a typing error."""
LINEAGE, CHECKPOINTS, CHANGES = "lineage.json", "checkpoints", "changes"
RUN_STATE = Path("resume", "run.json")
"""Path of the run's state within a checkpoint. A run cannot continue from a checkpoint without this file."""
ABOUT, ADAPTER = "pipelinerl.json", "adapter_config.json"
"""Files of a checkpoint: one with its policy version, and one with the configuration of a LoRA adapter."""
MODEL_IN = ("config.json", ADAPTER)
NOTHING_THERE = -1
"""Stream position in a checkpoint if no message on the streams belongs to that checkpoint. A trainer that continues from
this checkpoint empties the streams first."""
STATE_FORMAT = 3
"""Format number of a checkpoint's training state. A run cannot continue from a checkpoint in another format."""
LEAST_FREE_BYTES, RESERVE_BYTES = 256 * 1024**2, 64 * 1024**2
"""Free space that a run needs in addition to the space for the next checkpoint: at its start, and while it runs."""


@dataclass
class RunDir:
    """Layout of `runs/<name>/`, for a run on this machine."""

    path: Path
    name: str
    """Name of the run, with which its NATS subjects begin."""

    def __post_init__(self) -> None:
        self.recipe = self.path / "recipe.yaml"
        self.identity = self.path / "run.json"
        """`{"run": NAME, "recipe": NAME, "started": ISO time}`, by which `--resume` and `audit` identify the run."""
        self.metrics = self.path / "metrics.jsonl"
        """One JSON object for each optimizer step."""
        self.samples = self.path / "samples.jsonl"
        """Completions with their rewards and version spans, one JSON object per line."""
        self.summary = self.path / "summary.json"
        self.report = self.path / "report.html"
        self.pids = self.path / "pids.json"
        """`{"trainer": pid, "verifier": pid, "actor-0": pid, "nats": pid}` of the running processes."""
        self.scale = self.path / "scale.json"
        """`{"actors": N}`: number of actors that `pipelinerl scale` asked for."""
        self.placement = self.path / "placement.json"
        """GPUs of trainer and actors, and the fields that were `auto` in the recipe, which `--resume` sets to `auto` again."""
        self.modules = self.path / "modules"
        """Copies of the Python modules beside the recipe, if the recipe names one of them. The verifier imports the copies."""
        self.checkpoint = self.path / "checkpoint"
        """Policy and tokenizer of the last checkpoint, as Hugging Face stores them."""
        self.checkpoints = self.path / CHECKPOINTS
        """`step-<version>/` for each of the newest checkpoints."""
        self.undone = self.path / "undone"
        """`1/`, `2/` and so on: the files that each `pipelinerl rollback` set aside."""
        self.nats_store = self.path / "nats"
        """Streams and configuration of the run's nats-server."""
        self.credentials = Credentials(self.path / "secrets")
        """Files with NATS logins, a certificate and the live page's key. Each start of the run makes new ones."""

    def log(self, service: str) -> Path:
        return self.path / "logs" / f"{service}.log"

    def address(self, service: str) -> Path:
        """Return the file to which a service writes its `ServiceAddress`."""
        return self.path / "addresses" / f"{service}.json"

    def keep_modules(self, folder: Path | None) -> None:
        """Replace the copies of the user's modules by the modules and packages in `folder`; None keeps the present copies."""
        if folder is not None:
            shutil.rmtree(self.modules, ignore_errors=True)
            copy_modules(folder, self.modules)

    def checkpoint_bytes(self) -> int:
        """Return the size of the newest complete checkpoint; 0 if there is none, or the trainer is removing it."""
        found = resumable(self.path)
        return _bytes_in(found[max(found)].parent.parent) if found else 0

    def checkpoint_under_way(self) -> tuple[int, int] | None:
        """Return the version and current size of the checkpoint being written, or None."""
        for folder in self.checkpoints.glob(".step-*.partial-*"):
            version = folder.name.removeprefix(".step-").partition(".")[0]
            return int(version), _bytes_in(folder)
        return None

    def next_checkpoint_bytes(self, keep: int, first_bytes: int = 0) -> int:
        """Return the free space that the next checkpoint needs: the size of the newest checkpoint, or `first_bytes` if there is
        none. Return 0 while the trainer writes or removes a checkpoint, or is about to remove one (more than `keep` exist)."""
        is_under_way = any(self.checkpoints.glob(".*")) or len(resumable(self.path)) > keep
        return 0 if is_under_way else self.checkpoint_bytes() or first_bytes

    def check_space(self, option: str, first_checkpoint_bytes: int) -> None:
        """Raise `FieldError` if the run's disk has too little free space for a start."""
        free, needed = free_bytes(self.path), LEAST_FREE_BYTES + (self.checkpoint_bytes() or first_checkpoint_bytes)
        if free < needed:
            what = f"its disk has {free / 1e6:,.0f} MB free, but a run needs at least {needed / 1e6:,.0f} MB"
            raise FieldError(option, str(self.path), f"{what}: free some space, or use a folder on another disk")

    @contextmanager
    def locked(self, option: str = "--resume") -> Iterator[None]:
        """Lock the folder until the end of the block or of the process. Raises `FieldError` if another command uses it."""
        # Mode 600, because any user who can read the file could hold the lock.
        with open(self.path / ".running", "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fix = "another command is using it; wait until that command ends, or stop it"
                raise FieldError(option, str(self.path), fix) from None
            yield

    def open_to_others(self) -> FieldError | None:
        """Return a warning if other users can read the run's files, for example because the folder existed before."""
        state, value = self.path.stat(), str(self.path)
        if state.st_uid != os.geteuid():
            return FieldError("--run-dir", value, "belongs to another user, who can read the run's files and replace them")
        if state.st_mode & 0o077:
            fix = "other users can open it and read prompts, completions and logs; chmod 700 it to keep them out"
            return FieldError("--run-dir", value, fix)
        return None


def copy_modules(folder: Path, target: Path) -> None:
    """Copy the Python modules and packages in `folder` to another folder, which need not exist."""
    target.mkdir(exist_ok=True)
    for file in folder.glob("*.py"):
        shutil.copy(file, target)
    for package in folder.glob("*/__init__.py"):
        shutil.copytree(package.parent, target / package.parent.name, dirs_exist_ok=True)


def find_run(folder: Path, option: str) -> RunDir:
    """Return the run in `folder`. Raises `FieldError` about `option` if the folder is not a run's."""
    check_folder(folder, option)
    if missing := [name for name in ("recipe.yaml", "run.json") if not (folder / name).is_file()]:
        raise FieldError(option, str(folder), f"is not the folder of a run: it has no {' and no '.join(missing)}")
    return RunDir(folder, run_name(folder, option))


def new_place(recipe_name: str, now: datetime, name: str | None, path: Path | None, option: str = "--name") -> RunDir:
    """Return the folder of a new run: `path` if given, else `runs/<name>`. If neither is given, make a folder with the recipe's
    name and the time `now` in its name. Raises `FieldError` about `option` if the name cannot be used."""
    stamp = f"-{now:%Y%m%d-%H%M%S}"
    cut = recipe_name[: _RUN_NAME_LENGTH - len(f"{stamp}-99")].rstrip("-")
    stamped = f"{cut}{stamp}" if name is None else check_run_name(name, option)
    if path or name:
        return RunDir(path or Path("runs", stamped), stamped)
    for unused in (stamped, *(f"{stamped}-{attempt}" for attempt in range(2, 1000))):
        with suppress(FileExistsError):
            Path("runs", unused).mkdir(mode=0o700, parents=True)
            return RunDir(Path("runs", unused), unused)
    raise AssertionError("a thousand runs began within this second")


def create_run_dir(
    recipe_name: str, now: datetime, name: str | None = None, path: Path | None = None, *, first_checkpoint_bytes: int = 0
) -> RunDir:
    """Make the folder of a new run: `path` if given, else `runs/<name>`. The default name is the recipe's with the time `now`.

    Only the owner can read a new folder. Files of a run whose trainer never started are removed. Raises `FieldError` if the
    name cannot be used, the folder holds other files, or its disk is too full.
    """
    RunDir(path or Path("runs"), "").check_space("--run-dir", first_checkpoint_bytes)
    run = new_place(recipe_name, now, name, path)
    _make_empty(run, "--run-dir" if path is not None else "--name")
    for folder in (run.path / "logs", run.path / "addresses"):
        folder.mkdir()
    started = now.astimezone().isoformat(timespec="seconds")
    write_json(run.identity, {"run": run.name, "recipe": recipe_name, "started": started})
    return run


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's disk. The folder need not exist yet."""
    folder = folder.resolve()
    return shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists())).free


def _bytes_in(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except FileNotFoundError:
        return 0


NAMED_IN = ("run.json", "lineage.json")
"""Files that contain the name of a run. The local runner writes the first, and the trainer the second."""


def check_folder(folder: Path, option: str = "RUN_DIR") -> None:
    """Raise `FieldError` unless the folder exists."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is no such folder"
        store = "is in an object store; copy it to this machine, and give the folder of the copy"
        raise FieldError(option, str(folder), store if ":/" in str(folder) else f"{what}; give the folder of a run")


def run_name(folder: Path, option: str = "RUN_DIR") -> str:
    """Return the name of the run in this folder: from a file of `NAMED_IN`, or else the folder's name. Raises `FieldError` if
    the folder does not exist, or if the file or the name is invalid."""
    check_folder(folder, option)
    name = folder.resolve().name
    for file in NAMED_IN:
        try:
            name = json.loads((folder / file).read_bytes())["run"]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise FieldError(option, str(folder), f"its {file} does not name the run: {error!r}; restore that file") from error
        break
    return check_run_name(str(name), option)


_UNSTARTED = {
    *("run.json", "recipe.yaml", "pids.json", "scale.json", "summary.json", "report.html"),
    *(".running", "addresses", "logs", "models", "modules", "nats", "secrets"),
}
"""Entries that a run's folder may have before its trainer starts. No run could continue from them."""


def _make_empty(run: RunDir, option: str) -> None:
    """Make the folder, or empty it if its run's trainer never started. Raises `FieldError` if neither is possible."""
    path, value = run.path, str(run.path)
    if path.exists() and not path.is_dir():
        raise FieldError(option, value, "is a file; give a folder that is new or empty")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise FieldError(option, value, f"cannot be made: {error.strerror}; give another folder") from error
    if set(held) <= _UNSTARTED and read_json(run.identity).keys() >= {"run", "recipe", "started"}:  # made by a run
        with run.locked(option):
            for entry in path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    elif run.recipe.name in held:
        fix = "resume it (pipelinerl run --resume), give a new folder or --name, or remove this one"
        raise FieldError(option, value, f"holds another run; {fix}")
    elif held:
        some = ", ".join([*held[:3], *(["..."] if held[3:] else [])])
        raise FieldError(option, value, f"holds other files ({some}) and no run; give a new or empty folder")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, with None for NaN and infinities; empty if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    write_whole(path, json.dumps(data, indent=2) + "\n")


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666, durably: bool = False) -> None:
    """Replace a file atomically, so that a reader never sees half of it. `mode`: file mode before the umask. `durably`:
    wait for the disk, so that the old or the new file is there after a crash of the machine."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        if durably:
            sync_path(beside)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    if durably:
        sync_path(path.parent)


def sync_path(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resumable(run_dir: Path) -> dict[int, Path]:
    """Return the path of `RUN_STATE` in each checkpoint that a run can continue from, by version, the newest last."""
    found = (run_dir / CHECKPOINTS).glob(f"step-*/{RUN_STATE}")
    names = {path.parent.parent.name.removeprefix("step-"): path for path in found}
    return dict(sorted((int(name), path) for name, path in names.items() if name.isdecimal()))


def newest_checkpoint(run_dir: Path) -> int | None:
    """Return the version of the newest checkpoint that a trainer can continue from; None if there is none."""
    return max(resumable(run_dir), default=None)


class Checkpoint:
    """A policy on disk: whole weights or an adapter."""

    def __init__(self, path: Path) -> None:
        self.path, self.run, self.adapter = path, _run_of(path), read_json(path / ADAPTER)
        """Its folder; the folder of its run, or `path` if it has none; the adapter's configuration, or empty."""
        found = (one for one in (path, path.parent) if (one / "tokenizer_config.json").is_file())
        self.tokenizer = next(found, Path(self.adapter.get("base_model_name_or_path") or path))
        """Folder with the tokenizer, the parent one for a run's adapter; else an adapter's base model, a folder or hub name."""
        version = read_json(self.tokenizer / ABOUT).get("policy_version")
        self.version: int | None = version if isinstance(version, int) else None
        """Policy version; None if no file states it."""


def _run_of(folder: Path) -> Path:
    near = (folder, *Path(os.path.abspath(folder)).parents[:3])
    return next((one for one in near if any((one / file).is_file() for file in NAMED_IN)), folder)


def policies_of(folder: Path) -> dict[int, Checkpoint]:
    """Return the checkpoints of a run by version, the newest last. `folder`: the run's, or a checkpoint in it."""
    run = _run_of(folder)
    found = {number: Checkpoint(path.parents[1]) for number, path in resumable(run).items()}
    for one in (run / "checkpoint", run):  # outside a run, `run` is `folder`, which may hold a model
        if any((one / file).is_file() for file in MODEL_IN):
            last = Checkpoint(one)
            found[last.version or max(found, default=0)] = last
    return dict(sorted(found.items()))


def checkpoint_of(folder: Path, version: int | None = None) -> Checkpoint:
    """Return the policy of `version`. Without a version, return the policy in `folder` if that is a checkpoint or an adapter,
    else the run's newest. Raises `FieldError` if there is no such checkpoint."""
    if version is None and any((folder / file).is_file() for file in MODEL_IN):
        return Checkpoint(folder)
    check_folder(folder, "RUN")
    if not (found := policies_of(folder)):
        fix = "has no checkpoint yet; give a run that has one (checkpoint.every_steps), or the folder of a checkpoint"
        raise FieldError("RUN", str(folder), fix)
    if version is not None and version not in found:
        fix = f"has no checkpoint (checkpoint.keep limits their number); use one of {', '.join(map(str, found))}"
        raise FieldError("version", version, fix)
    return found[max(found) if version is None else version]


def trainer_starts(run_dir: Path) -> list[int]:
    """Return the policy version at which each of the run's trainers began; empty if lineage.json cannot be read."""
    starts = read_json(run_dir / LINEAGE).get("starts")
    return [start for start in starts if isinstance(start, int)] if isinstance(starts, list) else []


def recipe_changes_of(run_dir: Path) -> list[str]:
    """Return the changes of the recipe at each start of the run's trainer, as `version 20: trainer.steps: 100 → 200`."""
    changes = read_json(run_dir / LINEAGE).get(CHANGES)
    lists = changes.items() if isinstance(changes, dict) else ()
    return [f"version {version}: {change}" for version, made in lists if isinstance(made, list) for change in made]


def newest_state(run_dir: Path, option: str) -> Mapping[str, Any] | None:
    """Return the content of the newest checkpoint's run.json; None if the run starts again from version 0. Raises `FieldError`
    about `option`, or `UserError`, if the run cannot continue, because files are missing or damaged, or have another format."""
    found, journal, why = resumable(run_dir), run_dir / JOURNAL, ""
    try:
        state: Any = json.loads(found[max(found)].read_text(encoding="utf-8")) if found else None
        if found:
            itemgetter("format", "policy_version", "recipe", "journal_bytes")(state)  # raises an error if one is missing
    except (OSError, LookupError, TypeError, ValueError) as error:
        fix = "restore its resume/run.json, or remove that checkpoint"
        raise FieldError(option, str(run_dir), f"its newest checkpoint cannot be read: {error!r}; {fix}") from error
    versions = (event.get("version") for _, event in read_events(journal) if event["event"] == "checkpoint")
    written = [one for one in versions if isinstance(one, int)]
    size = journal.stat().st_size if journal.is_file() else 0
    if not (run_dir / LINEAGE).is_file():
        if state or size:
            why = f"{LINEAGE} is missing: restore it from a copy, or start a new run in another folder"
    elif state is None:
        if written:
            why = (
                f"a checkpoint of version {max(written)} was written, but {CHECKPOINTS}/ holds none to continue from: restore "
                "that checkpoint, or start a new run from the final policy in checkpoint/ (model.source: path)"
            )
    elif state["format"] != STATE_FORMAT:
        why = (
            f"the checkpoint of policy version {state['policy_version']} has format {state['format']}, and this release of "
            f"pipelinerl reads {STATE_FORMAT}: finish the run with the release that wrote it, or start a new run from the "
            "policy in checkpoint/ (model.source: path)"
        )
    elif state["journal_bytes"] > size:
        why = (
            f"{JOURNAL} has {size:,} bytes, but it had {state['journal_bytes']:,} when the checkpoint of version "
            f"{state['policy_version']} was written: restore the file, since nothing else records which sequences are in flight"
        )
    if why:
        raise FieldError(option, str(run_dir), why)
    return state
