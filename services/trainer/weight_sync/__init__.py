"""The trainer's side of the weight-update protocol (docs/weight-updates.md)."""
