"""Which actors are members, and how a policy version reaches each of them: the trainer's side of the weight-update protocol.

`coordinator.py` and `joining.py` decide and are pure, `lane.py` performs what one coordinator decides, `updater.py` owns the
lanes. How the bytes move is `services/trainer/weight_sync`.

The trainer's end of the weight transfer.
"""

from __future__ import annotations
