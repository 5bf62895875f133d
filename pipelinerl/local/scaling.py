"""How many actors a running local run should have: a file in its run directory, written by `pipelinerl scale`.

The file is the wish, `pids.json` and the actors' own answers are what there is; like the replicas of a Deployment.
"""

from __future__ import annotations

import json

from pipelinerl.errors import FieldError
from pipelinerl.local.living import lives, read_pids
from pipelinerl.local.run_dir import RunDir, write_json

MOST_ACTORS = 64
"""On one machine; more is a slip of the finger."""


def check_count(count: int) -> int:
    """Raises `FieldError`."""
    if not 0 <= count <= MOST_ACTORS:
        raise FieldError("N", count, f"a run on one machine has 0 to {MOST_ACTORS} actors")
    return count


def write_wish(run_dir: RunDir, count: int) -> None:
    write_json(run_dir.scale, {"actors": check_count(count)})


def read_wish(run_dir: RunDir) -> int | None:
    """None when nobody has asked, or what is there is not ours."""
    try:
        count = json.loads(run_dir.scale.read_bytes())["actors"]
        return check_count(count) if isinstance(count, int) else None
    except (OSError, ValueError, LookupError, TypeError, FieldError):
        return None


def running_pids(run_dir: RunDir) -> dict[str, int]:
    """Name and pid of the run's processes. Raises `FieldError` when no run is going on there."""
    where = str(run_dir.path)
    try:
        pids = read_pids(run_dir)
    except FileNotFoundError:
        raise FieldError("--run-dir", where, "is not the folder of a run: it has no pids.json") from None
    except (OSError, ValueError) as error:
        raise FieldError("--run-dir", where, f"its pids.json cannot be read: {error}") from error
    if not any(lives(pid, run_dir.path) for pid in pids.values()):
        raise FieldError("--run-dir", where, "the run has ended; start it again, or name one that goes on")
    return pids
