"""Every system's order of work gives the bits of plain training; only the time differs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import make_gpt
from oracle import assert_bit_equal, forced_plan, plain_loop, train

from autohete import AutoHeteWrapper
from autohete._C import CopyDirection

SMALL = partial(make_gpt, layers=3)
STRATEGIES = {
    "autohete": "all+c",
    "zero_offload": "state",
    "patrickstar": "all",
    "stronghold": "all",
    "offload_everything": "all+c",
    "device_only": "device",
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_gives_the_bits_of_plain_training(strategy):
    plan = partial(forced_plan, kinds=STRATEGIES[strategy])
    ours = train(wrap={"plan": plan, "strategy": strategy}, build=SMALL)
    assert_bit_equal(ours, train(wrap=None, build=SMALL))


@pytest.mark.parametrize("strategy", ["zero_offload", "patrickstar", "stronghold"])
def test_systems_with_an_iteration_barrier_leave_nothing_in_flight(strategy):
    seen = []

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        engine = model.run.engine
        seen.extend(engine.unit_state(u)[1] for u in range(engine.num_units()))
        return loss

    plan = partial(forced_plan, kinds=STRATEGIES[strategy])
    train(wrap={"plan": plan, "strategy": strategy}, build=SMALL, loop=loop)
    assert set(seen) == {"idle"}


def test_a_slower_cpu_lane_changes_no_bit():
    plan = partial(forced_plan, kinds="all")
    ours = train(
        wrap={"plan": plan},
        build=SMALL,
        prepare=lambda model: model.run.engine.set_update_rate(2e6),
    )
    assert_bit_equal(ours, train(wrap=None, build=SMALL))


@pytest.mark.parametrize("priority_order", [True, False])
def test_updates_come_in_the_order_of_next_use_or_of_their_gradients(priority_order):
    model = SMALL()
    plan = forced_plan(model, "all")
    optimizer = torch.optim.AdamW(model.parameters())
    trained = AutoHeteWrapper(
        model, optimizer, gpu_mem="64MiB", plan=plan, early_updates=False, profile_path=None
    ).to("cpu")
    engine = trained.run.engine
    engine.configure(plan.units, plan.window, plan.chunk_bytes, priority_order=priority_order)
    trained(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    units = range(engine.num_units())
    while any(engine.unit_state(unit)[1] == "leaving" for unit in units):
        continue
    engine.record_timeline(True)
    optimizer.step()
    trained.synchronize()
    updated = [span[1] for span in engine.take_timeline() if span[2] == "update"]
    trained.unwrap()
    assert updated == (list(units) if priority_order else list(reversed(units)))


@pytest.mark.parametrize("aggregate", [True, False])
def test_an_upload_is_one_copy_or_without_aggregation_one_per_parameter(aggregate):
    copies, uploads = [], []

    def configure(model):
        run, plan = model.run, model.plan
        run.engine.configure(plan.units, plan.window, chunk_bytes=1 << 20, aggregate=aggregate)
        run.engine.record_timeline(True)

    def loop(model, optimizer, step):
        loss = plain_loop(model, optimizer, step)
        if isinstance(model, AutoHeteWrapper):
            model.synchronize()
            run = model.run
            copies.append(run.side.machine.num_copies_ended(CopyDirection.HOST_TO_DEVICE))
            sizes = [len(unit.parameters) for unit in run.units]
            spans = [span for span in run.engine.take_timeline() if span[2] == "upload"]
            uploads.append(sum(1 if aggregate else sizes[unit] for _, unit, *_ in spans))
        return loss

    plan = partial(forced_plan, kinds="all")
    ours = train(wrap={"plan": plan}, build=SMALL, loop=loop, prepare=configure)
    assert_bit_equal(ours, train(wrap=None, build=SMALL))
    assert copies[-1] - copies[0] == sum(uploads[1:]) > 0
