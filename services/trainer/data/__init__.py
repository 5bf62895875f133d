"""The way of a sequence, as the trainer sees it: its prompt is issued, it arrives, it is trained on or not."""
