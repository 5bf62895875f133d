"""Weights swapped into a running vLLM engine: received and prepared beside it, exchanged between two decode steps.

`updates.py` and `client.py` run in the actor's process; `worker.py`, `loaders.py` and `backend.py` in vLLM's workers.
"""
