"""Rewards: functions of one completion and its reference. They run in the worker and episode processes of the verifier."""
