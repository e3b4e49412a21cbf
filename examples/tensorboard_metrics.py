"""Log a run's metrics to TensorBoard through torch's own writer.

python examples/tensorboard_metrics.py --logdir runs; tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.tensorboard import SummaryWriter  # needs: pip install tensorboard

from autohete import AutoHeteWrapper
from autohete.demo.gpt import GPT, GPTConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logdir", default="runs")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=4, width=64, context=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="8MiB", profile_path=None).to("cpu")

    with SummaryWriter(options.logdir) as writer:
        for step in range(options.steps):
            tokens = torch.randint(256, (4, 33))
            loss = trained(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.add_scalar("loss", loss.item(), step)
            for name, value in trained.metrics().items():
                writer.add_scalar(name, value, step)
    print(f"{options.steps} steps in {options.logdir}")


if __name__ == "__main__":
    main()
