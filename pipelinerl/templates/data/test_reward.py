from reward import score  # if you write another reward, change these tests too

from services.verifier.rewards.item import RewardInput


def reward_of(completion):
    return score(RewardInput(prompt="What is 6 + 7?", completion=completion, answer=None, reference={"answer": "13"}))


def test_the_answer_alone_earns_most():
    assert reward_of("13.") == 1
    assert reward_of("The result is 13.") == 0.25
    assert reward_of("It is 130.") == reward_of("") == 0
