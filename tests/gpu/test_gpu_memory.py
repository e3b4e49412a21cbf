"""What torch holds on the GPU stays within gpu_mem."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpu_oracle import gpu_batch, gpu_loop, train_wrapped
from models import make_gpt
from oracle import adamw, forced_plan

from autohete import AutoHeteWrapper

BUILD = partial(make_gpt, layers=8, width=256)


@pytest.fixture(autouse=True)
def _empty_gpu():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.mark.parametrize("gpu_mem", ["64MiB", "256MiB"])
def test_the_peak_of_a_planned_run_is_within_gpu_mem(gpu_mem):
    ours = train_wrapped(6, None, build=BUILD, gpu_mem=gpu_mem)
    report = ours.extra["report"]
    assert 0 < report.device_peak_measured_bytes <= report.device_budget_bytes
    assert torch.cuda.max_memory_allocated() <= report.device_budget_bytes


def test_an_allocation_past_gpu_mem_is_out_of_memory():
    model = BUILD()
    optimizer = adamw(model)
    plan = forced_plan(model, "all+c")
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="96MiB", cpu_mem="1GiB", plan=plan, profile_path=None
    ).cuda()
    gpu_loop(wrapped, optimizer, 0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapped.unwrap("cpu")
    torch.empty(128 << 20, dtype=torch.uint8, device="cuda")  # the limit is gone with the wrapper


def test_slots_that_do_not_fit_say_what_asked_and_what_was_left():
    model = BUILD()
    plan = forced_plan(model, "all+c", window=8)
    blocker = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
    wrapped = AutoHeteWrapper(
        model, adamw(model), gpu_mem="48MiB", cpu_mem="1GiB", plan=plan, profile_path=None
    )
    with pytest.raises(torch.OutOfMemoryError, match=r"parameter slot needs \d+ bytes, but \d+"):
        wrapped.cuda()
    assert all(p.device.type == "cpu" for p in model.parameters()), "as it was"
    del blocker
    wrapped.cuda()
    wrapped(*gpu_batch(0)).backward()
    wrapped.unwrap("cpu")
