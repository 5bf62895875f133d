"""`python -m services.verifier.rehearsal`: try a recipe's rewards on given completions, before a run loads any model.

Standard input is one JSON object with `recipe`, `items` and `forms`. An item has the fields of a `VerifyItem`. Its forms are
pairs of a completion and the answer that the reward must find in it ("" = any answer). A worker process scores an item's
completions in order. It stops when scoring fails, or when the reward finds the required answer.

The output is lines of JSON. Before an item is scored, a line gives its index as `calling`. If scoring stopped at a form, a
line with that form's result follows. The result's reward has only the terms for the answer, not those for format and length.
If an item times out or ends its worker, later items of its task are skipped. If no worker starts, the output is
`{"problem": "..."}`.
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
from pipelinerl.v1.verifier_pb2 import VERIFY_STATUS_OK, VERIFY_STATUS_TIMEOUT, VerifyItem
from services.verifier.metrics import VerifierMetrics
from services.verifier.pool import DIED, RewardPool
from services.verifier.rewards.compose import MESSAGE_CHARACTERS


async def rehearse(recipe: Recipe, items: list[VerifyItem], forms: list[list[tuple[str, str]]]) -> None:
    costly = set[str]()
    metrics = VerifierMetrics(RunRegistry(recipe.name), recipe.problem_sets)
    try:
        async with RewardPool(recipe, metrics, Readiness(), max_queue=1, judges={}).running(workers=1) as pool:
            for number, item in enumerate(items):
                if item.task in costly:
                    continue
                _say(calling=number)
                for completion, wanted in forms[number]:
                    item.completion_text = completion
                    (result,) = await pool.score([item])
                    if result.status != VERIFY_STATUS_OK or not wanted or result.answer == wanted[:MESSAGE_CHARACTERS]:
                        fields = {name: getattr(result, name) for name in ("seconds", "message", "answer")}
                        reward = sum(term for name, term in result.components.items() if name.partition(".")[0] == "answer")
                        _say(completion=completion, status=status_name(result.status), reward=reward, **fields)
                        break
                if result.status == VERIFY_STATUS_TIMEOUT or result.message.startswith(DIED):
                    costly.add(item.task)
    except PipelineRLError as error:
        _say(problem=str(error))


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> int:
    logging.disable()  # the printed lines say what went wrong
    asked = json.load(sys.stdin)
    recipe = Recipe.model_validate_json(json.dumps(asked["recipe"]))
    asyncio.run(rehearse(recipe, [ParseDict(item, VerifyItem()) for item in asked["items"]], asked["forms"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
