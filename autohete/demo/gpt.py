"""A small GPT in plain PyTorch. Nothing here knows of autohete."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model. `context` is the longest sequence, in bytes of text."""

    num_layers: int = 8
    width: int = 256
    num_heads: int = 4
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.1
    tie_head: bool = False

    def __post_init__(self) -> None:
        if self.width % self.num_heads != 0:
            raise ValueError(
                f"GPTConfig: width is {self.width}, expected a multiple of the "
                f"{self.num_heads} heads"
            )


class SelfAttention(nn.Module):
    """Causal multi-head attention, [batch, time, width] to the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width of a head]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """One transformer layer, pre-norm: the unit that autohete plans and moves."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = SelfAttention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """Tokens [batch, time] to logits, or to the loss where targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(self._initialise)
        if config.tie_head:
            self.head.weight = self.token.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, num_bytes: int, context: int, generator: torch.Generator
) -> bytes:
    """Continue `prompt` by sampling; `model` may be wrapped. Runs on the generator's device."""
    text = list(prompt)
    for _ in range(num_bytes):
        window = torch.tensor([text[-context:]], device=generator.device)
        probabilities = (model(window)[0, -1].float() / 0.8).softmax(-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
