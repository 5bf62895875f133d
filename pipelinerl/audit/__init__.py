"""Derive a run's ledger again from its journal, checkpoints and streams, and report every contradiction.

The audit only reads, and trusts no figure that the trainer states about itself.
"""
