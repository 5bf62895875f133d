"""Weights swapped into a running vLLM engine: received and prepared beside it, exchanged between two decode steps.

`update.py` runs in the actor's process; `engine.py` and what it uses run in vLLM's worker processes, reached by a Unix
socket (`wire.py`) for everything that must not wait for a decode step, and by vLLM's own calls for the swap.
"""
