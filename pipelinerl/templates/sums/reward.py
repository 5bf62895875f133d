"""The reward function gets one completion at a time and returns a number; higher is better."""


def score(item):
    """Return 1 if the text after the last `#` is the right answer, 0.1 if it is another number, else 0.

    `item.prompt` is the question, `item.completion` the text of the model, `item.reference["answer"]` the answer in the file.
    """
    answer = item.completion.rpartition("#")[2].strip()
    if answer == item.reference["answer"].strip():
        return 1.0
    return 0.1 if answer.lstrip("-").isdecimal() else 0.0
