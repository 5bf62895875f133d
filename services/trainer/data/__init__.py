"""The way of a sequence, as the trainer sees it: its prompt is issued, it arrives, its group is complete, it is trained or not.

`tracker.py` accounts for each of them; nothing else says what is in flight.
"""
