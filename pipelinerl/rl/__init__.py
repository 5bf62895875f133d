"""Calculations and bookkeeping of asynchronous reinforcement learning, without torch, clock, socket or logger."""
