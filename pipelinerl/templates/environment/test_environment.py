from types import SimpleNamespace

from environment import GuessNumber  # if you write another environment, change these tests too


def said(text):
    return SimpleNamespace(text=text)


def test_hints_lead_to_the_number_and_only_a_hit_earns_a_reward():
    game = GuessNumber(max_guesses=2)
    assert "from 1 to 9" in game.start({"number": 3, "limit": 9}, seed=0)
    assert game.reply(said("Is it 5?")) == "Lower."
    assert game.reply(said("3")).reward == 1
    assert game.start({"number": 3, "limit": 9}, seed=0)
    assert game.reply(said("no idea")).reward == 0
