"""What is issued, what comes back, and where it ends: the trainer's feeder, intake and tracker over an in-memory bus."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.small_models.supervised import character_tokenizer
from pipelinerl.errors import UserError
from pipelinerl.messages.sequences import FinishReason, PromptGroup, Sequence, VersionSpan, encode_sequence
from pipelinerl.messages.verification import item_of
from pipelinerl.prompts import answer_end
from pipelinerl.recipe.fields import OverlongConfig, RewardConfig, TaskConfig, TaskShare
from pipelinerl.rl.ledger import Outcome
from pipelinerl.tasks.source import Problem
from pipelinerl.v1 import sequence_pb2
from services.trainer.data.feeder import encode
from services.trainer.data.intake import HeldSequences, Quarantine
from services.trainer.learn.meter import BOUND_16_BIT, BOUND_FLOAT32, BOUND_QUANTIZED, bound_of
from services.verifier.rewards.compose import ComposedReward, score_item
from services.verifier.rewards.item import Score
from tests.support.memory_bus import MemoryServer
from tests.unit.builders import make_episode, make_problem, make_recipe, make_sequence
from tests.unit.trainer_fakes import TASK, Desk, desk

TRAINER = {"steps": 100, "batch_size": 4, "tokens_per_microbatch": 64}


def problem(index: int) -> PromptGroup:
    return make_problem(index, tokens=(index % 20,) * 3)


async def test_groups_of_several_tasks_have_their_own_names_limits_and_indices() -> None:
    agent = {"source": "environment", "name": "pkg.envs:Guess", "heldout_problems": 2}
    tasks = [{"weight": 3, "task": TASK}, {"name": "guess", "max_tokens": 9, "task": agent}]
    async with desk("feeder", task=None, tasks=tasks) as one:
        groups = await one.take_issued()
    assert [(g.task, g.problem_index, g.sampling.max_tokens, g.episodic) for g in groups] == [
        ("chain_sum", 0, 16, False), ("chain_sum", 1, 16, False), ("guess", 0, 9, True), ("chain_sum", 2, 16, False),
    ]  # fmt: skip


async def test_issues_what_the_bound_allows_and_more_with_each_version() -> None:
    async with desk() as one:
        # B = 4, n = 2, max_lag = 1: (0 + 1 + 1) * 2 = 4 groups at version 0, 2 more at version 1.
        assert [group.problem_index for group in await one.take_issued()] == [0, 1, 2, 3]
        one.serve(1)
        assert [group.problem_index for group in await one.take_issued()] == [4, 5]


async def test_what_is_in_flight_follows_actors_arrivals_and_steps() -> None:
    # K = 2 groups a step, n = 2, H = 6: A * (6 + 2) + 4 samples in flight.
    unbounded = {"algorithm": {"max_lag": None}, "actor": {"sequences_in_progress": 6}, "trainer": TRAINER}
    async with desk(**unbounded) as one:
        first, second, *_ = groups = await one.take_issued()
        assert len(groups) == 12 // 2
        one.serve(0, num_actors=8)
        assert len(await one.take_issued()) == 68 // 2 - 6
        for group in (first, second):  # two that wait for others of their groups make room for one more group
            await one.publish(make_sequence(group, 0))
        await one.until(lambda: one.tracker.num_waiting == 2)
        assert len(await one.take_issued()) == 1
        for group in (first, second):  # as complete groups they count again
            await one.publish(make_sequence(group, 1))
        await one.until(lambda: len(one.intake.ready) == 2)
        assert (one.feeder.room.in_flight, one.feeder.room.allowance) == (70, 0)
        assert len(await one.intake.take_batch(version=0)) == 2
        one.feeder.begin_step(wait_share=1.0, for_max_lag=False)
        assert one.feeder.room.in_flight == 66
        assert len(await one.take_issued()) == 1
        assert one.tracker.issued_groups == 36


async def test_a_batch_is_complete_groups_with_their_advantages() -> None:
    async with desk() as one:
        groups = await one.take_issued()
        await one.answer(groups[1], (1.0, 0.0))
        await one.answer(groups[0], (0.0, 0.0))
        batch = await one.intake.take_batch(version=0)
        assert [group.sequences[0].group_id for group in batch] == [groups[1].group_id, groups[0].group_id]
        assert batch[0].advantages.tolist() == [1.0, -1.0]
        assert batch[1].advantages.tolist() == [0.0, 0.0]


async def test_a_cut_sequence_is_in_the_baseline_and_teaches_nothing_where_the_recipe_masks_it() -> None:
    for truncated, advantages in (("mask", [0.0, 1.0]), ("score", [-1.0, 1.0])):
        async with desk(reward={"truncated": truncated}) as one:
            for group in (await one.take_issued())[:2]:
                await one.publish(replace(make_sequence(group, 0, reward=0.0), finish_reason=FinishReason.LENGTH))
                await one.publish(make_sequence(group, 1))
            assert [group.advantages.tolist() for group in await one.intake.take_batch(version=0)] == [advantages] * 2


async def test_stale_sequences_are_dropped_and_their_group_is_issued_again() -> None:
    async with desk() as one:
        groups = await one.take_issued()
        one.serve(2)
        for group in groups[:3]:
            await one.answer(group, version=0 if group is groups[0] else 2)
        batch = await one.intake.take_batch(version=2)
        assert len(batch) == 2
        counts = one.tracker.ledger.counts
        assert (counts["dropped_stale"], counts["failed"]) == (2, 0)
        assert one.tracker.ledger.reasons(Outcome.DROPPED_STALE) == {"lag above max_lag": 2}
        assert (one.tracker.take_ended_by_length(), one.tracker.take_ended_by_length()) == ({"16": [0, 2]}, {})
        assert (one.tracker.longest_tokens, one.tracker.mean_tokens) == (2, 2.0)
        assert one.tracker.lost_groups == 1
        # (2 + 1 + 1) * 2 = 8 groups and one replacement, of which 4 were issued before.
        assert len(await one.take_issued()) == 5


async def test_failed_sequences_are_counted_by_reason_and_their_siblings_train() -> None:
    async with desk(sampling={"group_size": 4, "max_tokens": 16}) as one:
        group = (await one.take_issued())[0]
        await one.answer(group, (0.0, 1.0))
        await one.publish(make_sequence(group, 0), "again")  # a repeated one is trained once
        await one.publish(make_sequence(group, 2, completion=(4, 20)))
        await one.publish(make_sequence(group, 3, completion=(), spans=(), failure="reward_timeout: 5 s"))
        batch = await one.intake.take_batch(version=0)
        assert [s.sample_index for s in batch[0].sequences] == [0, 1]
        assert one.failed() == {"reward_timeout": 1, "token outside the vocabulary": 1}


async def test_an_episode_ends_once_as_all_its_branches_are() -> None:
    """Those of 5 and 1 tokens, of which 4 are sampled. One stale token, one branch too long or one odd token is enough."""
    async with desk(sampling={"group_size": 4, "max_tokens": 16}) as one:
        group = (await one.take_issued())[0]
        one.serve(2)
        await one.publish(make_episode(group, 0, version=2))
        await one.publish(make_episode(group, 1, version=2, reward=0.0, spans=(VersionSpan(0, 0, 1),)))
        await one.publish(make_episode(group, 2, version=2, prompt_token_ids=np.ones(64, np.int32)))
        await one.publish(make_episode(group, 3, version=2, completion_token_ids=np.array([20], np.int32)))
        batch = await one.intake.take_batch(version=2)
        assert [(s.sample_index, len(s.branches)) for s in batch[0].sequences] == [(0, 1)]
        assert batch[0].advantages.tolist() == [1.0], "the stale one's reward is in the baseline"
        assert one.failed() == {"longer than the context": 1, "token outside the vocabulary": 1}
        assert one.tracker.ledger.reasons(Outcome.DROPPED_STALE) == {"lag above max_lag": 1}
        assert one.tracker.tokens == {"trained": 0, "dropped_stale": 4, "dropped_filtered": 0, "failed": 8}
        assert (one.intake.tokens_arrived, one.tracker.mean_tokens) == (16, 4.0)


async def test_a_completion_cut_by_the_context_gets_the_whole_overlong_penalty() -> None:
    """Of 16 tokens at most, a prompt of 3 leaves 14 in a context of 17."""
    async with desk(model={"source": "path", "name": "nowhere", "max_context": 17}) as one:
        group = (await one.take_issued())[0]
    cut = replace(make_sequence(group, 0, completion=(4,) * 14), reference_json=group.reference_json)
    item = item_of(cut, group.sampling.max_tokens)
    config = RewardConfig(overlong=OverlongConfig(buffer_tokens=8, penalty=0.5))
    reward = ComposedReward(config, lambda item: Score(1.0))
    assert score_item(reward, item).components == {"answer": 1.0, "overlong": -0.5}


async def test_groups_of_equally_right_answers_are_filtered_when_asked_for() -> None:
    async with desk(algorithm={"max_lag": 1, "filter_equal_rewards": True}) as one:
        groups = await one.take_issued()
        await one.answer(groups[0], (1.0, 1.0))
        for index, overlong in enumerate((0.0, -0.25)):  # both right, and one too long
            sample = make_sequence(groups[1], index, reward=1.0 + overlong)
            await one.publish(replace(sample, reward_components={"answer": 1.0, "overlong": overlong}))
        for index, terms in enumerate(({"answer.a": 1.0, "overlong": -1.0}, {"answer.a": 0.0, "overlong": 0.0})):
            sample = make_sequence(groups[2], index, reward=0.0)  # one right, and the penalty hides it
            await one.publish(replace(sample, reward_components=terms))
        await one.answer(groups[3], (1.0, 0.0))
        batch = await one.intake.take_batch(version=0)
        assert [group.sequences[0].group_id for group in batch] == [groups[2].group_id, groups[3].group_id]
        assert one.tracker.ledger.reasons(Outcome.DROPPED_FILTERED) == {"equal rewards": 4}
        assert len(await one.take_issued()) == 2


# --- actors whose log-probabilities are another policy's


def test_an_actor_is_judged_by_enough_tokens_of_lag_0_and_by_the_share_that_is_off() -> None:
    bounds = {
        dtype: bound_of(make_recipe(model={"name": "m", "source": "hub", "dtype": dtype, "max_context": 64}))
        for dtype in ("float32", "bfloat16")
    }
    assert bounds == {"float32": BOUND_FLOAT32, "bfloat16": BOUND_16_BIT}
    assert bound_of(make_recipe(actor={"engine": {"quantization": "fp8"}})) == BOUND_QUANTIZED
    quarantine = Quarantine(0.1)
    quarantine.judge({"good": (200, 20), "bad": (200, 200), "late": (8, 8)})
    assert quarantine.actors == set()
    quarantine.judge({"good": (56, 0), "bad": (56, 0), "late": (8, 0)})
    assert quarantine.actors == {"bad"}
    quarantine.judge({"good": (256, 30), "bad": (256, 256), "late": (240, 240)})
    assert quarantine.actors == {"bad", "good", "late"}
    off = Quarantine(0.0)
    off.judge({"bad": (256, 256)})
    assert not off.actors


async def test_nothing_of_an_actor_in_quarantine_is_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    async with desk(weights={"verify_logprobs": 0.1}, algorithm={"max_lag": 1, "advantage": "group_mean"}) as one:
        first, second, third, _ = await one.take_issued()
        await one.publish(replace(make_sequence(first, 0), actor="bad"))
        await one.publish(replace(make_sequence(first, 1, reward=0.0), actor="good"))
        await one.until(lambda: len(one.intake.ready) == 1)
        one.intake.quarantine.judge({"bad": (256, 256), "good": (256, 0)})
        assert "actor 'bad' is quarantined: 100% of its tokens of lag 0" in caplog.text
        await one.publish(replace(make_sequence(second, 0), actor="bad"))
        await one.publish(replace(make_sequence(second, 1, failure="engine: gone", completion=(), spans=()), actor="bad"))
        await one.answer(third)
        batch = await one.intake.take_batch(version=0)
        assert [[s.sequence_id for s in group.sequences] for group in batch] == [
            [first.sequence_id(1)], [third.sequence_id(0), third.sequence_id(1)],
        ]  # fmt: skip
        assert batch[0].advantages.tolist() == [0.0], "its reward is in no baseline"
        assert one.failed() == {"actor_quarantined": 2, "engine": 1}
        assert one.tracker.ledger.discrepancy == 0


# --- messages that cannot be read, or contradict what was issued


def with_short_logprobs(sequence: Sequence) -> bytes:
    message = sequence_pb2.Sequence.FromString(encode_sequence(sequence))
    message.behaviour_logprobs = message.behaviour_logprobs[:4]
    return message.SerializeToString()


async def test_what_does_not_parse_is_known_by_its_id_or_the_message_s_and_the_good_ones_train() -> None:
    async with desk() as one:
        groups = await one.take_issued()
        await one.bus.publish_sequence(b"\xff\x00 not protobuf", "stranger")
        await one.bus.publish_sequence(b"\xff\x00 not protobuf", groups[0].sequence_id(0))
        await one.bus.publish_sequence(with_short_logprobs(make_sequence(groups[3], 0)), "")
        await one.bus.publish_sequence(with_short_logprobs(make_sequence(replace(groups[1], run="other"), 0)), "")
        for strange_id in ("g00000001.٣", "g00000001.01", "g00000001." + "9" * 5000, "g00000001.-1", ".", "g00000001"):
            await one.bus.publish_sequence(b"\xff", strange_id)
        for group in (groups[0], groups[3]):
            await one.publish(make_sequence(group, 1))
        await one.answer(groups[1])
        await one.answer(groups[2])
        batch = await one.intake.take_batch(version=0)
        assert [group.sequences[0].group_id for group in batch] == [groups[1].group_id, groups[2].group_id]
        assert one.failed() == {"unreadable": 2, "group incomplete": 2}
        assert one.intake.bad_messages == 10


async def test_a_sequence_that_contradicts_its_group_ends_as_failed_and_strands_nobody() -> None:
    async with desk() as one:
        groups = await one.take_issued()
        await one.publish(replace(make_sequence(groups[0], 0), group_size=3))
        await one.publish(replace(make_sequence(groups[0], 0), group_size=4))
        await one.publish(make_sequence(replace(groups[0], num_samples=9), 8))
        await one.publish(make_sequence(groups[0], 1))
        await one.until_lost()
        assert one.failed() == {"contradicts its group": 1, "group incomplete": 1}
        assert one.intake.bad_messages == 2  # the second message has the id of the first


# --- prompts that cannot be issued

TOO_LARGE = make_problem(1, reference_json="x" * 5000)
TOO_LONG = make_problem(1, tokens=(1,) * 64)
EMPTY = make_problem(1, tokens=())


@pytest.mark.parametrize(
    ("odd", "reason"),
    [(TOO_LARGE, "prompt group too large"), (EMPTY, "prompt group invalid"), (TOO_LONG, "prompt too long")],
    ids=["large", "empty", "long"],
)
async def test_a_group_that_cannot_be_sent_out_fails_and_another_takes_its_place(odd: PromptGroup, reason: str) -> None:
    server = MemoryServer(max_payload_bytes=2000)
    async with desk("feeder", server=server, problems=lambda index: odd if index == 1 else problem(index)) as one:
        assert [group.problem_index for group in await one.take_issued()] == [0, 2, 3, 4]
        assert one.failed() == {reason: 2}
        ((told, first),) = one.feeder.refused.items()
        assert (told, first.startswith(f"{reason}: problem 1 of chain_sum: ")) == (reason, True)
        assert one.tracker.lost_groups == 1
        assert one.tracker.ledger.counts["in_flight"] == 8


@pytest.mark.parametrize(
    ("every", "told"),
    [
        (TOO_LONG, r"model.max_context = 64: the last 1000 prompts did not fit"),
        (TOO_LARGE, r"task 'chain_sum': the last 1000 .* raise max_payload"),
    ],
    ids=["long", "large"],
)
async def test_a_task_whose_every_prompt_cannot_be_used_ends_the_run(every: PromptGroup, told: str) -> None:
    server = MemoryServer(max_payload_bytes=2000)
    async with desk("intake", server=server, problems=lambda index: every) as one:
        with pytest.raises(UserError, match=told):
            await one.feeder.run()
        assert (one.tracker.ledger.counts["failed"], one.tracker.ledger.counts["in_flight"]) == (2000, 0)


async def test_the_feeder_goes_on_after_an_outage() -> None:
    server = MemoryServer()
    async with desk("feeder", server=server) as one:
        server.set_reachable(False)
        await asyncio.sleep(0.02)
        server.set_reachable(True)
        assert [group.problem_index for group in await one.take_issued()] == [0, 1, 2, 3]


# --- groups lost without end


async def answer_until_it_ends(one: Desk, rewards: tuple[float, ...], failure: str = "") -> None:
    """Answers every group that is issued, all in the same way, until the intake has had enough."""
    taking = asyncio.create_task(one.intake.run())
    while not taking.done():
        for group in await one.take_issued():
            for index, reward in enumerate(rewards):
                await one.publish(make_sequence(group, index, reward=reward, failure=failure))
        await asyncio.sleep(0)
    await taking


FILTERED = {"filter_equal_rewards": True, "max_lag": 1}


@pytest.mark.parametrize(
    ("sections", "failure", "told", "num_lost"),
    [
        (
            {},
            "reward_crashed: KeyError: 'unit' at my_rewards.py:4",
            r"""reward_crashed \(400 of 400\), the first: "KeyError: 'unit' at my_rewards.py:4".* reward.scorer""",
            200,
        ),
        ({"algorithm": FILTERED}, "", r"equal rewards \(200 of 200\).*filter_equal_rewards off", 200),
        (
            {},
            "reward_timeout: the reward took more than 5 s (reward.timeout_s) and was killed",
            r"^reward\.timeout_s = 5\.0: the first 18 calls of 'task' for chain_sum took longer; make it faster, or raise this",
            8,
        ),
    ],
    ids=["reward raises", "always equal", "reward times out"],
)
async def test_too_many_lost_groups_end_the_run(sections: dict[str, object], failure: str, told: str, num_lost: int) -> None:
    async with desk("feeder", **sections) as one:
        with pytest.raises(UserError, match=told):
            await answer_until_it_ends(one, (0.0, 0.0), failure)
        assert one.tracker.lost_groups == num_lost
        assert list(one.intake.failures.values()) == ([failure] if failure else [])


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_reward_that_timed_out_only_for_a_while_ends_no_run_early(resumed: bool) -> None:
    """Its first answer came in time, or the run goes on from a checkpoint, perhaps during an outage."""
    async with desk("feeder", trainer={**TRAINER, "give_up_after_groups": 12}) as one:
        late = "reward_timeout: the reward took more than 5 s"
        if resumed:
            one.intake.restore(HeldSequences(), 0)
        else:
            first, *others = await one.take_issued()
            await one.answer(first)
            for group in others:
                for index in range(2):
                    await one.publish(make_sequence(group, index, failure=late))
        with pytest.raises(UserError, match="the last 12 prompt groups were all lost"):
            await answer_until_it_ends(one, (0.0, 0.0), late)


async def test_a_good_group_between_lost_ones_and_stale_ones_keep_the_run_alive() -> None:
    trainer = {**TRAINER, "steps": 40, "give_up_after_groups": 3}
    async with desk(trainer=trainer, algorithm=FILTERED) as one:
        answered = 0
        while answered < 12:  # two lost, one good, and so on, until the bound's 4 groups are good ones
            for group in await one.take_issued():
                answered += 1
                await one.answer(group, (1.0, 0.0) if answered % 3 == 0 else (0.0, 0.0))
            await asyncio.sleep(0)
        taking = asyncio.create_task(one.intake.take_batch(version=9))  # all that is ready is stale by then
        while one.tracker.ledger.counts["dropped_stale"] < 8:
            await asyncio.sleep(0)
        one.serve(9)
        while not taking.done():
            for group in await one.take_issued():
                await one.answer(group, version=9)
            await asyncio.sleep(0)
        assert len(await taking) == 2


# --- conventional mode, and seeds

PHASES = {"mode": "conventional", "algorithm": {"max_lag": None, "conventional_g": 2}}


async def trained_phase(one: Desk, version: int) -> tuple[list[int], list[PromptGroup]]:
    """The phase that begins at `version`, answered in order of issue: its groups in order of training, by their place in that
    order; and its groups as issued."""
    one.serve(version)
    groups = await one.take_issued()
    for group in groups:
        await one.answer(group, version=version)
    first = await one.intake.take_batch(version)
    one.serve(version + 1)
    second = await one.intake.take_batch(version + 1)
    assert (len(first), len(second), one.feeder.room.allowance) == (2, 2, 0)
    issued = [group.group_id for group in groups]
    return [issued.index(group.sequences[0].group_id) for group in first + second], groups


async def test_conventional_mode_issues_whole_phases_and_shuffles_each_and_the_seed_decides() -> None:
    async def phases(seed: int) -> tuple[list[list[int]], list[str]]:
        sampling = {"group_size": 2, "max_tokens": 16, "seeded": True}
        async with desk(**PHASES, seed=seed, trainer=TRAINER, sampling=sampling) as one:
            orders, issued = zip(*[await trained_phase(one, version) for version in (0, 2, 4)], strict=True)
        groups = [group for of_phase in issued for group in of_phase]
        assert len({group.seed for group in groups}) == len(groups) == 12
        return [*orders], [repr(replace(group, prompt_token_ids=group.prompt_token_ids.tolist())) for group in groups]

    orders, prompts = await phases(seed=1)
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3]] * 3
    assert [0, 1, 2, 3] not in orders, "shuffled"
    assert len({tuple(order) for order in orders}) == 3, "each anew"
    assert await phases(seed=1) == (orders, prompts)
    others, other_prompts = await phases(seed=2)
    assert (orders != others, prompts != other_prompts) == (True, True)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ((), "system: S|user: q!|"),
        (({"role": "user", "content": "u"},), "system: S|user: u!|"),
        (
            ({"role": "system", "content": "T"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}),
            "system: T|assistant: a|user: u!|",
        ),
    ],
)
def test_prompts_are_texts_or_messages(messages: tuple[dict[str, str], ...], prompt: str) -> None:
    tokenizer = character_tokenizer(64)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | replace('\n', '') }}|{% endfor %}"
        "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    )
    config = TaskConfig(prompt_style="chat", system_prompt="S", instruction="!")
    share = TaskShare(task=config)
    assert encode(make_recipe(), share, 0, Problem("q", messages=messages), tokenizer).prompt_text == prompt
    with pytest.raises(UserError, match=r"chat template refuses .*no tools"):
        encode(make_recipe(), share, 0, Problem("q", messages=({"role": "tool", "content": "4"},)), tokenizer)


CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSES = "{{ raise_exception('users only') }}"


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHAT, "<|im_end|>"), (CHAT.replace("<|im_end|>", "</s>"), None), (PLAIN, None), (REFUSES, None)],
    ids=["chatml", "eos", "plain", "refuses"],
)
def test_an_answer_ends_where_the_chat_template_ends_it(template: str, end: str | None) -> None:
    """Base models name another end token; a template that ends answers by the tokenizer's own, or by none, adds nothing."""
    tokenizer = character_tokenizer(64, "abcdefghijklmnopqrstuvwxyzAQ:7\n ")
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    expected = () if end is None else (tokenizer.convert_tokens_to_ids(end),)
    assert (answer_end(tokenizer),) == (expected or (None,))
    if template in (CHAT, PLAIN):
        styles = TaskConfig(prompt_style="chat"), TaskConfig(source="agent"), TaskConfig()
        recipe = make_recipe(sampling={"group_size": 2, "max_tokens": 16, "stop_token_ids": [3]})
        asked = [encode(recipe, TaskShare(task=task), 0, Problem("what"), tokenizer) for task in styles]
        assert [one.sampling.stop_token_ids for one in asked] == [(3, *expected), (3, *expected), (3,)]
        assert [one.sampling.max_tokens for one in asked] == [64 - len(one.prompt_token_ids) for one in asked]
