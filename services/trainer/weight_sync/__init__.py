"""The trainer's side of the weight-update protocol (docs/weight-updates.md).

`coordinator.py` and `membership.py` decide and are pure; `session.py` performs what one coordinator decides; `updater.py` owns
the sessions; `sender.py` moves the bytes.
"""

from __future__ import annotations
