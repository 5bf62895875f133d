"""Derives a run's ledger again, from its journal, its checkpoints and its streams, and says what does not add up.

Reads only, trusts nothing that the trainer says about itself, and changes nothing.
"""
