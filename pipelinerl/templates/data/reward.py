"""The reward function gets one completion at a time and returns a number; higher is better."""


def score(item):
    """Return which share of the completion's words is the answer: 1 for the answer alone, 0 for a completion without it.

    `item.prompt` is the question, `item.completion` the text of the model, `item.reference["answer"]` the answer in the file.
    """
    said, answer = (words(text) for text in (item.completion, item.reference["answer"]))
    if not answer or f" {' '.join(answer)} " not in f" {' '.join(said)} ":
        return 0.0
    return len(answer) / len(said)


def words(text):
    """Return the words of a text in lower case, without punctuation around them."""
    return [word.strip(".,:;!?\"'()*") for word in text.lower().split()]
