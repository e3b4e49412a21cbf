"""The matrix product of all experts at once, which mixtures of experts run on fake tensors.

torch counts no FLOPs of it, and its shape function takes bf16 alone, where the operation itself
takes fp32 and fp16 too: a model in fp32 or under autocast would not run.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_mm_flops(a: Tensor, b: Tensor, *_: object) -> int:
    """Twice the multiplications, however the rows fall on the experts."""
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 2 else 1  # each row of b meets one of them
    return 2 * a.numel() * b.shape[-1] // groups


def grouped_mm_out(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return an empty result: [rows, columns], of each group where there is a group in both."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim() == 3:
        shape.insert(0, a.shape[0])
    if a.dim() == b.dim() == 2:  # the groups are parts of the inner dimension
        assert offs is not None
        shape.insert(0, offs.shape[0])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
