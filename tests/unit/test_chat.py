"""`pipelinerl chat` and `pipelinerl serve` with a policy that says what a test tells it to say; tests/e2e has a real one."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from pipelinerl import policy
from pipelinerl.cli import main
from pipelinerl.commands import chat
from pipelinerl.errors import FieldError
from pipelinerl.policy import pieces
from pipelinerl.recipe.fields import TaskConfig
from pipelinerl.run_dir import Checkpoint, checkpoint_of
from tests.support.runs import write_tiny_model

SAYS = "\x1b]0;title\x07 é\x9b2J"
SHOWN = r"\x1b]0;title\x07 é\x9b2J"


@pytest.mark.parametrize(
    ("texts", "stops", "told"),
    [
        (["\ufffd", "é", "éa"], [], ["é", "a"]),
        (["a", "a\ufffd"], [], ["a", "\ufffd"]),
        (["a", "ab", "abEN", "abENT"], ["END"], ["ab", "E", "NT"]),
        (["a", "ab", "abEN", "abENDc", "abENDcd"], ["END", "ND"], ["ab"]),
    ],
)
def test_pieces_have_no_half_characters_and_no_stop_texts(texts: list[str], stops: list[str], told: list[str]) -> None:
    given = iter(texts)
    assert [piece for piece in pieces(given, stops) if piece] == told
    assert next(given, "") == ("abENDcd" if "abENDcd" in texts else ""), "nothing is generated after a stop text"


class Talker:
    """Versions 10 and 20 of a policy; each answers with `SAYS`, and is interrupted by the question `stop`."""

    asked: ClassVar[list[Any]] = []

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path, self.version = checkpoint.path, int(checkpoint.path.name.removeprefix("step-"))
        self.name, self.max_tokens, self.temperature = f"v{self.version}", 7, 0.25
        self.task = TaskConfig(prompt_style="chat", system_prompt="Be brief.")

    def prompt(self, question: str, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if question == "long":
            raise FieldError("prompt", "9 tokens", "the model's context has 8; shorten the prompt")
        return [{"role": "system", "content": self.task.system_prompt}, *messages]

    def stream(self, prompt: Any, max_tokens: int, temperature: float) -> Iterator[str]:
        self.asked.append((self.version, prompt, max_tokens, temperature))
        yield SAYS
        if prompt[-1]["content"] == "stop":
            raise KeyboardInterrupt


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "run.json").write_text('{"run": "my-run"}')
    for version in (10, 20):
        state = tmp_path / "checkpoints" / f"step-{version}" / "resume" / "run.json"
        state.parent.mkdir(parents=True)
        state.write_text("{}")
    monkeypatch.setitem(sys.modules, "pipelinerl.policy", ModuleType("pipelinerl.policy"))
    monkeypatch.setattr(sys.modules["pipelinerl.policy"], "Policy", Talker, raising=False)
    monkeypatch.setattr(Talker, "asked", [])
    return str(tmp_path)


def contents(prompt: list[dict[str, str]]) -> list[str]:
    return [one["content"] for one in prompt]


def test_one_prompt_gives_one_completion_whose_control_characters_do_not_reach_the_terminal(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", "3", "--temperature", "0", "--version", "10"]
    for system, prompt in (("", ["hi"]), ("\udcff", ["--", "-1+2="]), ("", [])):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(b"4 \xff\n")))
        assert main(["chat", run, "--system", system, *options, *prompt]) == 0
        assert capsys.readouterr() == (f"{SHOWN}\n", "")
    asked = [(10, ["", "hi"], 3, 0.0), (10, ["\ufffd", "-1+2="], 3, 0.0), (10, ["", "4 \ufffd"], 3, 0.0)]
    assert [(version, contents(prompt), *rest) for version, prompt, *rest in Talker.asked] == asked


def test_a_conversation_goes_on_over_a_stopped_answer_a_mistake_and_another_version_until_it_is_reset(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["", "stop", "long", "/version 11", "/versions", "/version 10", "again", "/reset", "new", "/what"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))
    assert main(["chat", run]) == 0
    printed, errors = capsys.readouterr()
    assert printed.splitlines()[1:3] == [f"v20> {SHOWN}", "v20> 10 20"]
    assert f"v10 of {run}/checkpoints/step-10\nv10> {SHOWN}\nv10> {SHOWN}\n/versions " in printed
    assert "prompt = '9 tokens': the model's context has 8" in errors
    assert "version = 11: has no checkpoint (checkpoint.keep limits their number); use one of 10, 20" in errors
    assert [(version, contents(prompt)[1:], *rest) for version, prompt, *rest in Talker.asked] == [
        (20, ["stop"], 7, 0.25), (10, ["stop", SAYS, "again"], 7, 0.25), (10, ["new"], 7, 0.25)
    ]  # fmt: skip


def test_vllm_is_given_the_checkpoint_or_base_and_adapter_under_the_runs_name(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.importlib.util, "find_spec", lambda _: None)
    checkpoint = Path(run) / "checkpoints" / "step-20"
    ours = ["--host", "127.0.0.1"]
    assert chat.serve_command(Checkpoint(checkpoint), ["--port", "1"]) == [
        *("vllm", "serve", str(checkpoint), "--served-model-name", "my-run", *ours, "--port", "1")
    ]
    adapter = checkpoint / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"r": 24, "base_model_name_or_path": "org/base"}))
    only_base = chat.serve_command(Checkpoint(adapter), [])
    assert only_base[2:5] == ["org/base", "--tokenizer", "org/base"], "there is no other tokenizer"
    (checkpoint / "tokenizer_config.json").touch()
    (checkpoint / "config.json").write_text('{"dtype": "float32"}')
    assert chat.serve_command(Checkpoint(adapter), []) == [
        *("vllm", "serve", "org/base", "--tokenizer", str(checkpoint), "--enable-lora", "--max-lora-rank", "32"),
        *("--lora-modules", f"my-run={adapter}", "--dtype", "float32", *ours),
    ]
    assert main(["serve", run, "--version", "10", "--print", "--", "--port", "1"]) == 0
    assert capsys.readouterr().out.endswith("step-10 --served-model-name my-run --host 127.0.0.1 --port 1\n")


def test_a_policy_streams_until_an_end_of_the_recipe_or_its_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers generates. A stop text, a stop token of the recipe and the end of a chat's answer end it earlier."""
    write_tiny_model(tmp_path / "checkpoint")
    plain = policy.Policy(Checkpoint(tmp_path / "checkpoint"))
    assert (plain.version, plain.task.prompt_style, plain.max_tokens, plain.temperature) == (None, "plain", 512, 0)
    prompt = plain.prompt("1+2=")
    with torch.inference_mode():
        whole = plain.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
    tokens = whole[0][len(prompt) :].tolist()
    text = plain.tokenizer.decode(tokens, skip_special_tokens=True)
    assert list(plain.stream(prompt, 40, 0.0)) == [*text, ""]
    assert plain.generate("1+2=", 40) == plain.generate(["1+2="], 40) == [text], "not one for each character"
    assert len("".join(plain.stream(prompt, 500, 1.0))) <= 128 - len(prompt)
    with pytest.raises(FieldError, match=r"prompt = '128 tokens': the model's context has 128"):
        next(plain.stream([3] * 128, 1, 0.0))

    def answer(**sampling: Any) -> str:
        recipe = {"name": "r", "model": {"source": "path", "name": "m"}, "task": {"prompt_style": "chat"}, "sampling": sampling}
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
        (tmp_path / "lineage.json").touch()
        trained = policy.Policy(checkpoint_of(tmp_path))
        return "".join(trained.stream(trained.prompt("1+2="), 40, 0.0))

    (tmp_path / "checkpoint" / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[-1]['content'] }}")
    assert answer() == text
    assert answer(stop=[text[3:5]]) == text[: text.index(text[3:5])]
    assert answer(stop_token_ids=[tokens[3]]) == text[: tokens.index(tokens[3])]
    monkeypatch.setattr(policy, "answer_end", lambda _: tokens[3])
    assert answer() == text[: tokens.index(tokens[3])]
    for parameter in plain.model.parameters():
        parameter.data.fill_(math.nan)
    with pytest.raises(FieldError, match=r"checkpoint': its weights give no numbers \(NaN\); use an earlier version"):
        next(plain.stream(prompt, 1, 0.0))
