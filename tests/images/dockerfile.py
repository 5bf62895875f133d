"""Reads Dockerfiles as far as this project uses them. It knows no heredocs and no escape directive."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = {path.parent.name: path for path in sorted(ROOT.glob("services/*/Dockerfile"))}


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]

    def exec_form(self, instruction: str) -> list[str]:
        return list(json.loads(self.last(instruction)))

    def pairs(self, instruction: str) -> dict[str, str]:
        """`KEY=VALUE` words of ENV or LABEL."""
        words = (word for value in self.all(instruction) for word in shlex.split(value))
        return dict(word.split("=", 1) for word in words)


@dataclass
class Dockerfile:
    arguments: dict[str, str]
    """ARG before the first stage."""
    stages: list[Stage]

    @property
    def final(self) -> Stage:
        return self.stages[-1]

    def instruction(self, name: str) -> list[str]:
        return [value for stage in self.stages for value in stage.all(name)]


def read_dockerfile(path: Path) -> Dockerfile:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    file = Dockerfile({}, [])
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if not line.strip():
            continue
        name, value = line.split(None, 1)
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            file.stages.append(Stage(base, stage))
        elif file.stages:
            file.stages[-1].instructions.append((name, value.strip()))
        else:
            key, _, default = value.partition("=")
            file.arguments[key] = default
    return file
