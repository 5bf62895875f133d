from reward import score  # if you write another reward, change these tests too

from services.verifier.rewards.item import RewardInput


def reward_of(completion):
    return score(RewardInput(prompt="What is 6 * 7?", completion=completion, answer=None, reference={"answer": "42"}))


def test_the_last_number_counts():
    assert reward_of("6 times 7 makes 42.") == 1
    assert reward_of("42 or 43") == reward_of("forty-two") == reward_of("") == 0
