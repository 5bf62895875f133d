"""What is brought to the device for a micro-batch, and what only when somebody asks for it."""

from __future__ import annotations

import numpy as np
import torch

from services.trainer.learn.attention import on_device, packed_layout


def test_an_array_keeps_its_values_and_dtype() -> None:
    values = np.arange(6, dtype=np.int32).reshape(2, 3).T
    tensor = on_device(values, "cpu")
    assert (tensor.dtype, tensor.tolist()) == (torch.int32, [[0, 3], [1, 4], [2, 5]])


def test_rows_of_a_layout_are_made_once_and_only_when_asked_for() -> None:
    layout = packed_layout(np.array([5, 4, 1]))
    assert layout.longest == 5
    assert "blocks" not in vars(layout)
    assert layout.blocks is layout.blocks
