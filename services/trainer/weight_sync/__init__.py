"""The trainer's side of the weight-update protocol (docs/weight-updates.md).

`coordinator.py` and `membership.py` decide and are pure; `updater.py` performs what they decide; `sender.py` moves the bytes.
"""

from __future__ import annotations
