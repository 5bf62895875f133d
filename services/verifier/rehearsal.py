"""Rewards of a recipe on completions that it is given: `python -m services.verifier.rehearsal`, before a run loads any model.

Reads one JSON object from standard input: `recipe`, and `items` with the fields of a `VerifyItem`. Scores them one after the
other in a worker process, as the verifier does, and prints a line of JSON before each (`calling`: its number) and after it
(`status`, `reward`, `seconds`, `message`): who reads knows what ended it. A start that fails is `{"problem": "..."}`. A task
whose reward cost its worker gets no further item: each would cost seconds. Serves nothing and logs nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from google.protobuf.json_format import ParseDict

from pipelinerl.errors import PipelineRLError
from pipelinerl.messages.verification import status_name
from pipelinerl.recipe.fields import Recipe
from pipelinerl.service.lifecycle import Readiness
from pipelinerl.telemetry.metrics import RunRegistry
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_TIMEOUT, VerifyItem
from services.verifier.metrics import VerifierMetrics
from services.verifier.pool import DIED, run_pool


async def rehearse(recipe: Recipe, items: list[VerifyItem]) -> None:
    costly = set[str]()
    metrics = VerifierMetrics(RunRegistry(recipe.name), recipe.problem_sets)
    try:
        async with run_pool(recipe, metrics, Readiness(), workers=1, max_queue=1) as pool:
            for number, item in enumerate(items):
                if item.task in costly:
                    continue
                _say(calling=number)
                (result,) = await pool.score([item], lambda _: None)
                status, reward = status_name(result.status), result.reward
                _say(status=status, reward=reward, seconds=result.seconds, message=result.message)
                if result.status == VERIFY_STATUS_TIMEOUT or result.message.startswith(DIED):
                    costly.add(item.task)
    except PipelineRLError as error:
        _say(problem=str(error))


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    logging.disable()  # what went wrong is in the results
    asked = json.load(sys.stdin)
    recipe = Recipe.model_validate_json(json.dumps(asked["recipe"]))
    asyncio.run(rehearse(recipe, [ParseDict(item, VerifyItem()) for item in asked["items"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
