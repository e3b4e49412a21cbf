"""Wrapping: its memory, its log line, and models on the meta device."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import Block, batch, make_gpt
from oracle import adamw, forced_plan
from torch import nn

from autohete import AutoHeteWrapper, CPUAdamW
from autohete.units import find_units


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
from autohete.units import find_units
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


PRESENT = """
import sys
import torch
from autohete import AutoHeteWrapper, CPUAdamW
from torch import nn

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

def wrapped(width, num_layers):
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num_layers)])
    optimizer = CPUAdamW(model.parameters())
    before = resident()
    return AutoHeteWrapper(model, optimizer, gpu_mem="64MiB", profile_path=None).to("cpu"), before

wrapped(8, 2)[0].unwrap()
trained, before = wrapped(1024, 24)
print(resident() - before)
"""


def test_gradients_have_their_host_memory_before_the_first_step_copies_them():
    """As on a GPU, whose host memory is pinned: plans are made by what the first copies took."""
    done = subprocess.run(
        [sys.executable, "-c", PRESENT], capture_output=True, text=True, check=True,
        timeout=60, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    unit, noise = 1024 * 1024 * 4, 8 << 20  # parameters move from torch's memory into ours
    assert int(done.stdout) >= 24 * unit - noise


MAPPED = """
import sys
import torch
from autohete import AutoHeteWrapper, CPUAdamW
from autohete.units import find_units
from torch import nn

source, path, num_layers = sys.argv[1], sys.argv[2], 12

def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def build(width):
    if source == "torch.load":
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(num_layers)])
    import transformers
    config = transformers.GPT2Config(
        n_layer=num_layers, n_embd=width // 2, n_head=4, vocab_size=500, n_positions=64,
        bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)

def save():
    model = build(1024)
    if source == "torch.load":
        torch.save(model.state_dict(), path)
    else:
        model.save_pretrained(path)

def load():
    if source == "torch.load":
        with torch.device("meta"):
            model = build(1024)
        model.load_state_dict(torch.load(path, mmap=True), assign=True)
        return model
    import transformers
    return transformers.GPT2LMHeadModel.from_pretrained(path)

def wrap(model):
    optimizer = CPUAdamW(model.parameters())
    return AutoHeteWrapper(model, optimizer, gpu_mem="64MiB", profile_path=None).to("cpu")

if len(sys.argv) > 3:
    save()
    sys.exit()
wrap(build(64)).unwrap()  # what the first call loads is not the model's
model = load()
parameters = sum(p.nbytes for p in model.parameters())
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak is counted from here
wrapped = wrap(model)
print(status("VmHWM") - before, parameters, status("VmRSS") - before)
"""


@pytest.mark.parametrize("source", ["torch.load", "from_pretrained"])
def test_a_model_mapped_from_a_file_is_wrapped_without_a_second_copy(source, tmp_path):
    if source == "from_pretrained":
        pytest.importorskip("transformers", reason="transformers is not installed")
    command = [sys.executable, "-c", MAPPED, source, str(tmp_path / "weights")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([*command, "save"], check=True, timeout=90, env=environment)
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=90, env=environment
    )
    peak, parameters, _ = map(int, done.stdout.split()[-3:])
    unit, slots, noise = parameters // 10, 2 * parameters // 10, 8 << 20
    gradients = parameters  # have their memory when they are wrapped
    assert parameters >= 48 << 20
    assert peak <= parameters + gradients + unit + slots + noise


@pytest.mark.parametrize("layers", [["Block"], "Block", [Block], "modules"])
def test_layers_are_named_by_class_name_or_module_also_in_a_list(layers):
    """Lists of class names are what other libraries for this take."""
    model = make_gpt()
    units = find_units(model, list(model.blocks) if layers == "modules" else layers)
    assert [unit.name for unit in units if unit.is_layer] == [f"blocks.{i}" for i in range(4)]


def test_a_plan_that_needs_more_than_gpu_mem_is_a_warning_at_wrapping(caplog):
    model = make_gpt()
    plan = forced_plan(model, "all")
    plan.device_peak_bytes = 64 << 20
    options = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, "plan": plan}
    with caplog.at_level(logging.WARNING, logger="autohete"):
        trained = AutoHeteWrapper(model, adamw(model), **options).to("cpu")
    trained.unwrap()
    (warning,) = [r.getMessage() for r in caplog.records if "device peak" in r.getMessage()]
    assert "its device peak is 64.0 MiB (gpu_mem=67108864)" in warning
    assert "within gpu_mem of 16.0 MiB" in warning
