"""Wrapping: its memory, its log line, and models on the meta device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import batch, make_gpt
from oracle import adamw
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW


def layers() -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.BatchNorm1d(16))

    return nn.ModuleDict(
        {"tokens": nn.Embedding(9, 16), "layers": nn.Sequential(layer(), layer(), layer())}
    )


def test_meta_parameters_are_initialised_by_their_modules():
    with torch.device("meta"):
        model = layers()
    optimizer = CPUAdamW(model.parameters(), lr=1e-3)
    reference = layers().to_empty(device="cpu")
    torch.manual_seed(3)
    for module in reference.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    torch.manual_seed(3)
    kept = list(model.parameters())
    trained = AutoHeteWrapper(model, optimizer, gpu_mem="8MiB", profile_path=None).to("cpu")
    assert all(p is q for p, q in zip(model.parameters(), kept, strict=True))
    ours, expected = trained.state_dict(), reference.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], expected[key]) for key in expected)
    model["layers"](torch.ones(4, 16)).sum().backward()
    optimizer.step()
    trained.unwrap()


def test_a_meta_module_that_cannot_initialise_itself_is_refused():
    with torch.device("meta"):
        model = make_gpt()  # its positions belong to no module that could
    optimizer = adamw(model)
    with pytest.raises(ValueError, match="TinyGPT in unit .* no reset_parameters"):
        AutoHeteWrapper(model, optimizer, gpu_mem="8MiB").to("cpu")
    assert "step" not in vars(optimizer)


def test_wrapping_says_how_long_it_took_and_what_it_pinned(caplog):
    model = make_gpt()
    with caplog.at_level(logging.INFO, logger="autohete"):
        trained = AutoHeteWrapper(model, adamw(model), gpu_mem="8MiB").to("cpu")
    assert any("wrapped in" in m and " s (" in m and "pinned" in m for m in caplog.messages)
    trained(*batch(0))
    trained.unwrap()


PEAK = """
import os, resource, sys, tempfile
import torch
from autohete import AutoHeteWrapper, CPUAdamW
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def warm():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    AutoHeteWrapper(model, CPUAdamW(model.parameters()), gpu_mem="8MiB").to("cpu").unwrap()

warm()
base = peak()
if sys.argv[1] == "meta":
    with torch.device("meta"):
        model = build()
else:
    model = build()
wrapped = AutoHeteWrapper(model, CPUAdamW(model.parameters()), gpu_mem="64MiB").to("cpu")
print(peak() - base)
"""


@pytest.mark.parametrize("source", ["cpu", "meta"])
def test_wrapping_needs_at_most_the_state_and_one_unit_of_host_memory(source):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, source], capture_output=True, text=True, check=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    unit = 1024 * 1024 * 4
    state = 24 * unit * 4  # parameters, gradients, two moments
    slots, noise = 2 * unit, 2 * unit  # the host device's own memory; the interpreter's
    assert int(done.stdout) <= state + unit + slots + noise
