from reward import score  # if you write another reward, change these tests too

from services.verifier.rewards.item import RewardInput


def reward_of(completion):
    return score(RewardInput(prompt="3+5+2+7=", completion=completion, answer=None, reference={"answer": "17"}))


def test_only_the_right_answer_earns_the_full_reward():
    assert reward_of("8+2+7=10+7=#17") == 1
    assert reward_of("#18") == 0.1
    assert reward_of("8+2+7=10+7") == reward_of("#") == reward_of("") == 0
