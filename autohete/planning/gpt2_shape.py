"""GPT-2 as it is computed by Hugging Face transformers, for its shapes alone: on the meta device.

Planning a preset this way needs neither transformers nor torch's fake tensors, whose imports take
longer than all the planning (seconds against tens of milliseconds). Every operation is the one that
transformers' GPT-2 runs, so bytes and FLOPs are equal; a test compares the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_VOCABULARY = 50257
_DROPOUT = 0.1


@dataclass(frozen=True)
class GPT2Shape:
    """Layers, width, heads and the longest sequence.

    Args:
        fused_gelu: the activation is one operation that saves its input alone, as in Megatron-LM
            (`bias_gelu_fusion`) and in configurations with "gelu_pytorch_tanh"; else the six
            operations of transformers' default.
    """

    num_layers: int
    width: int
    num_heads: int
    positions: int
    fused_gelu: bool = False

    def build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model on the meta device: nothing is allocated."""
        with torch.device("meta"):
            return Head(self).to(dtype).train()


class Conv1D(nn.Module):
    """A linear layer whose weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Embedding(nn.Module):
    """Not torch's: that one draws its numbers, which on the meta device imports a compiler."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Unembedding(nn.Module):
    """The head: the embedding's weight once more."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.c_attn = Conv1D(shape.width, 3 * shape.width)
        self.c_proj = Conv1D(shape.width, shape.width)
        self.resid_dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        query, key, value = (
            part.view(batch, time, self.num_heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        # Meta tensors would be given the unfused kernel; this is the fused one, as on a GPU.
        mixed, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True
        )
        out: Tensor = self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return self.resid_dropout(out)  # type: ignore[no-any-return]


def _gelu(x: Tensor) -> Tensor:
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def _fused_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class Mlp(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.c_fc = Conv1D(shape.width, 4 * shape.width)
        self.c_proj = Conv1D(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.gelu = _fused_gelu if shape.fused_gelu else _gelu

    def forward(self, x: Tensor) -> Tensor:
        x = self.gelu(self.c_fc(x))
        return self.dropout(self.c_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.ln_1(x)) + x
        x = x + self.mlp(self.ln_2(x))
        return x


class Transformer(nn.Module):
    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.wte = Embedding(_VOCABULARY, shape.width)
        self.wpe = Embedding(shape.positions, shape.width)
        self.drop = nn.Dropout(_DROPOUT)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.ln_f = nn.LayerNorm(shape.width)

    def forward(self, ids: Tensor) -> Tensor:
        positions = ids.new_empty(1, ids.shape[1])  # arange() would import the compiler
        x = self.drop(self.wte(ids) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class Head(nn.Module):
    """The model with its loss; the head shares the embedding's weight."""

    def __init__(self, shape: GPT2Shape) -> None:
        super().__init__()
        self.transformer = Transformer(shape)
        self.lm_head = Unembedding(self.transformer.wte)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.lm_head(self.transformer(input_ids))
        wide = logits.float()
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return {"loss": F.cross_entropy(wide.view(-1, _VOCABULARY), shifted)}
