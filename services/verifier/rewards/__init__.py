"""Rewards, one file per kind: functions of one completion and its reference. The processes around them are not here."""
