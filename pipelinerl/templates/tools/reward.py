"""The reward function gets one completion at a time and returns a number; higher is better."""

import re


def score(item):
    """Return 1 if the last number of the completion is the reference answer, else 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", item.completion.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(item.reference["answer"]))
