"""The trainer's side of the weight-update protocol (docs/weight-updates.md).

`coordinator.py` and `membership.py` decide, and are pure. `updater.py` performs their actions. `sender.py` sends the bytes.
"""

from __future__ import annotations
