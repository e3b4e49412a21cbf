"""Small models for the tests, written in plain torch: dropout on, nothing of autohete."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-2, -1)) / (width // self.heads) ** 0.5
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(attended), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    def __init__(
        self,
        layers: int = 4,
        width: int = 32,
        vocab: int = 50,
        length: int = 16,
        dropout: float = 0.1,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width, 4, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(step: int, vocab: int = 50, length: int = 16, rows: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one step, the same for the same step."""
    generator = torch.Generator().manual_seed(1000 + step)
    data = torch.randint(0, vocab, (rows, length + 1), generator=generator)
    return data[:, :-1], data[:, 1:]


def make_gpt(seed: int = 0, **kwargs: object) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT(**kwargs)  # type: ignore[arg-type]
