"""The environment. Each episode gets its own object, in its own process."""

import re

from pipelinerl.episodes import Done


class GuessNumber:
    """The model guesses `row["number"]` in at most `max_guesses` turns; only a correct guess earns a reward."""

    def __init__(self, max_guesses=4):
        self.left, self.max_guesses = max_guesses, max_guesses

    def start(self, row, seed):
        """Return the first message. `row` is a line of problems.jsonl."""
        self.number, limit = row["number"], row["limit"]
        return f"Guess my number from 1 to {limit}. Answer with a number only."

    def reply(self, turn):
        """Return the answer to `turn.text`, or `Done` with the reward."""
        self.left -= 1
        numbers = re.findall(r"\d+", turn.text)
        if numbers and int(numbers[-1]) == self.number:
            return Done(1.0, correct=True, metrics={"guesses": self.max_guesses - self.left})
        if not numbers or not self.left:
            return Done(0.0)
        return "Higher." if int(numbers[-1]) < self.number else "Lower."
