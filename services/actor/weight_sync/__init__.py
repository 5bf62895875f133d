"""Swap weights into a running vLLM engine. New weights are prepared while it decodes, and swapped in between two decode steps.

`updates.py` and `client.py` run in the actor's process; `worker.py`, `loaders.py` and `backend.py` in vLLM's workers.
"""
