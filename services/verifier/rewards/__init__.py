"""Rewards: functions of one completion and its reference. Other modules of `services.verifier` run them in processes."""
