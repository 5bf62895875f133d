"""The first rank of a further node: it answers for its node's pod, from before its model is loaded to rank 0's last order."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.recipe.loading import load_recipe, recipe_yaml
from pipelinerl.service.logs import LogContext
from pipelinerl.service.settings import RankSettings, TrainerSettings
from services.trainer import worker as rank
from services.trainer.learn.batch import TrainingGroup
from services.trainer.loading import load_learner
from services.trainer.world import END, HEARTBEAT, leave_ranks
from tests.support.exposition import get
from tests.support.learner import model_of
from tests.support.machine import free_port, wait_until
from tests.unit.builders import make_group, make_recipe, make_sequence
from tests.unit.ranks import on_ranks

WAIT_S = 60.0


def settings(folder: str, port: int) -> TrainerSettings:
    where = {"recipe": Path(folder) / "recipe.yaml", "run_dir": Path(folder), "http_port": port}
    return TrainerSettings(run="r", instance="trainer-1", nodes=2, node=1, **where)


def play(folder: str, port: int) -> Any:
    return rank_0(folder, port) if os.environ["RANK"] == "0" else rank_1(folder, port)


def rank_0(folder: str, port: int) -> tuple[int, str]:
    lead = load_learner(load_recipe(settings(folder, port).recipe), folder, RankSettings(rank=0, world_size=2))
    wait_until(lambda: get(port, "/readyz") == (200, "ready\n"))
    lead.order(HEARTBEAT)
    lead.order(HEARTBEAT)
    wait_until(lambda: 'pipelinerl_trainer_rank_orders_total{kind="beat",run="r"} 2.0' in get(port, "/metrics")[1])
    healthy = get(port, "/healthz")
    group = make_group()
    batch = TrainingGroup((make_sequence(group, 0), make_sequence(group, 1)), np.array([0.5, -0.5]))
    lead.step(lead.prepare([batch], version=5))
    lead.order(END)
    leave_ranks()
    return healthy


def rank_1(folder: str, port: int) -> tuple[tuple[int, str], str, int | None]:
    asked, load, answers = threading.Event(), rank.load_learner, []

    def load_when_asked(*arguments: Any, **options: Any) -> Any:
        asked.wait(WAIT_S)
        return load(*arguments, **options)

    def ask() -> None:
        wait_until(lambda: get(port, "/readyz")[0] != 0)
        answers.append(get(port, "/readyz"))
        asked.set()

    rank.load_learner = load_when_asked
    asking, context = threading.Thread(target=ask), LogContext("r", "trainer", "trainer-1")
    asking.start()
    asyncio.run(rank.serve_rank(settings(folder, port), RankSettings(rank=1, world_size=2, local_rank=0), context))
    asking.join()
    return answers[0], context.instance, context.policy_version


def test_the_pod_of_another_node_answers(tmp_path: Path) -> None:
    model_of("llama-tied", max_position_embeddings=64).save_pretrained(tmp_path)
    recipe = make_recipe(model={"source": "path", "name": str(tmp_path), "max_context": 64})
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    first, second = on_ranks(2, play, str(tmp_path), free_port())
    assert first == (200, "ok\n")
    assert second == ((503, "the model is loading\n"), "trainer-1-rank1", 6)
