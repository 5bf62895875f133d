"""Rewards, one file per kind: functions of one completion and its reference, without the processes that run them."""
