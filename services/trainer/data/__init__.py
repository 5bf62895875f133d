"""The path of data through the trainer: prompts are issued, and sequences arrive and are trained on or dropped."""
