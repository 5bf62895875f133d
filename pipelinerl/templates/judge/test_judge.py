from judge import mark  # if you write another judge, change these tests too


def test_short_answers_earn_more_and_empty_ones_nothing():
    assert mark("Answer to mark: honey\nMark it") == 10
    assert mark("Answer to mark: bees make honey\nMark it") == 8
    assert mark("Answer to mark: \nMark it") == 0
