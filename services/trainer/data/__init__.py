"""The path of a sequence through the trainer: its prompt is issued, it arrives, and it is trained on or dropped."""
