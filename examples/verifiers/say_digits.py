"""An environment of the package verifiers in the form of its v1: a taskset, a loop of several turns, and an agent's program."""

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["DigitsEnv", "DigitsHarness", "DigitsTaskset"]


def num_digits(text: str) -> int:
    return sum(character.isdigit() for character in text)


class DigitsData(vf.TaskData):
    turns: int


class DigitsTask(vf.Task[DigitsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.25)
    async def digits(self, trace: vf.Trace) -> float:
        said = [str(node.message.content or "") for node in trace.nodes if node.sampled]
        return float(num_digits("".join(said)))

    @vf.metric
    async def asked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class DigitsConfig(vf.TasksetConfig):
    size: int = 40
    turns: int = 3


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for number in range(self.config.size):
            yield DigitsTask(DigitsData(prompt=f"{number}=", turns=self.config.turns), self.config.task)


class DigitsEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class DigitsEnv(vf.Env[DigitsEnvConfig]):
    """So many turns; after each, the policy is told how many digits it has said so far."""

    async def run(self, task: DigitsTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            said = (await interaction.turn()).last_reply
            for _ in range(1, task.data.turns):
                segment = await interaction.turn(f"+{num_digits(said)}=")
                if segment.terminated:
                    break
                said += segment.last_reply


class DigitsHarness(vf.Harness[vf.HarnessConfig]):
    """One request, with the conversation so far."""

    SUPPORTS_RESUME, NEEDS_CONTAINER, EXECUTES_CODE = True, False, False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        prompt = data.prompt
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(one) for one in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=said)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
