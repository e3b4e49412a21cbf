"""The simulator against schedules worked out by hand, and against what no schedule can beat."""

from __future__ import annotations

import itertools
import random

import pytest

from autohete import _C
from tests.plan.reference import (
    all_counts,
    as_counts,
    layers,
    make_profile,
    random_profile,
    seconds_of,
)

FAST = 1e18 / 2  # a rate at which small work takes no time that matters


def plan_of(
    profile: _C.Profile,
    state: set[int] = frozenset(),
    parameters: set[int] = frozenset(),
    recompute: set[int] = frozenset(),
    window: int = 2,
) -> _C.Plan:
    units = []
    for i in range(len(profile.units)):
        unit = _C.UnitPlan()
        if i in state | parameters:
            unit.gradients = unit.optimizer_state = _C.Tier.HOST
        if i in parameters:
            unit.parameters = _C.Tier.HOST
        if i in recompute:
            unit.activations = _C.ActivationRule.RECOMPUTE
        units.append(unit)
    plan = _C.Plan()
    plan.units, plan.window = units, window
    return plan


def policy(**fields: object) -> _C.SimulationPolicy:
    out = _C.SimulationPolicy()
    out.gated = False
    for field, value in fields.items():
        setattr(out, field, value)
    return out


def step(profile: _C.Profile, plan: _C.Plan, **fields: object) -> float:
    return _C.simulate(profile, plan, policy(**fields)).step_seconds


def exactly(value: float) -> object:
    return pytest.approx(value, abs=1e-9, rel=0)


def trained(n: int, **fields: object) -> list[_C.UnitProfile]:
    values = {
        "num_parameters": 1,
        "param_bytes": 1,
        "grad_bytes": 1,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
    }
    return layers(n, **{**values, **fields})


def test_all_on_the_device_is_forward_backward_and_device_update() -> None:
    profile = make_profile(trained(2), device_params_per_second=4.0)
    assert step(profile, plan_of(profile)) == exactly(6 + 2 * 0.25)


def test_recomputing_adds_a_forward() -> None:
    profile = make_profile(trained(3))
    assert step(profile, plan_of(profile, recompute={0, 2})) == exactly(9 + 2)


def test_recomputing_adds_what_it_was_measured_to_take() -> None:
    profile = make_profile(trained(3, recompute_seconds=0.75))
    plan = plan_of(profile, recompute={0, 2})
    assert step(profile, plan) == exactly(9 + 2 * 0.75)
    assert _C.lane_seconds(profile, plan)["compute"] == exactly(9 + 2 * 0.75)


def test_every_tensor_of_the_gradients_pays_the_latency() -> None:
    # b1 0-2, b0 2-4; D is 1 + 3 x 0.5, H is 1 + 0.5: D1 2-4.5, U1 -5.5, H1 -7; D0 4.5-7, U0 -8,
    # H0 -9.5; f0 9.5-10.5, f1 10.5-11.5.
    profile = make_profile(trained(2, grad_tensors=3), link_latency_seconds=0.5)
    plan = plan_of(profile, state={0, 1})
    assert step(profile, plan) == exactly(11.5)
    assert _C.lane_seconds(profile, plan)["d2h"] == exactly(2 * 2.5)


def test_compute_slows_down_while_copies_run() -> None:
    # b1 0-2; D1 2-4 halves b0: 2-5; U1 4-5; H1 (2) 5-7 halves f0: 5-7; f1 7-8.
    units = trained(2, param_bytes=2, grad_bytes=2)
    profile = make_profile(units, compute_share_during_copy=0.5)
    assert step(profile, plan_of(profile, state={1})) == exactly(8)


def test_accumulation_repeats_the_walk_and_updates_once() -> None:
    profile = make_profile(trained(2), device_params_per_second=4.0, gradient_accumulation_steps=3)
    assert step(profile, plan_of(profile)) == exactly(18 + 2 * 0.25)


def test_the_step_waits_for_download_update_and_upload_of_the_first_unit() -> None:
    # b1 0-2, b0 2-4; D1 2-3, D0 4-5; U1 before U0 if ungated; U0 5-6, H0 6-7; f0 7-8, f1 8-9.
    profile = make_profile(trained(2))
    plan = plan_of(profile, state={0, 1})
    assert step(profile, plan) == exactly(9)
    # Gated: both may start at 4; unit 0 has not landed, so U1 4-5, U0 5-6: the same.
    assert step(profile, plan, gated=True) == exactly(9)


def test_the_gap_is_from_the_end_of_a_steps_compute_to_the_next_forward() -> None:
    profile = make_profile(trained(2), device_params_per_second=4.0)
    whole = _C.simulate(profile, plan_of(profile), policy())
    assert whole.gap_seconds == exactly(0)  # device updates are compute
    waiting = _C.simulate(profile, plan_of(profile, state={0, 1}), policy())
    assert waiting.gap_seconds == exactly(3)  # as above: b0 ends at 4, f0 begins at 7


def test_the_loop_follows_the_updates_of_the_device_once_a_step() -> None:
    profile = make_profile(
        trained(2),
        device_params_per_second=4.0,
        loop_seconds=1.5,
        gradient_accumulation_steps=3,
    )
    whole = _C.simulate(profile, plan_of(profile), policy(), True)
    assert whole.step_seconds == exactly(18 + 2 * 0.25 + 1.5)
    assert whole.compute_seconds == exactly(18 + 2 * 0.25 + 1.5)
    assert whole.gap_seconds == exactly(0)
    loops = [s for s in whole.spans if s.what == "loop"]
    assert len(loops) == 5  # the last step is over without it
    assert all(s.end_seconds - s.start_seconds == exactly(1.5) for s in loops)
    assert _C.lane_seconds(profile, plan_of(profile))["compute"] == exactly(18 + 2 * 0.25 + 1.5)


def test_updates_and_uploads_hide_behind_the_loop() -> None:
    # As above b0 ends at 4 and H0 at 7: the loop goes on from 4 meanwhile.
    for loop, expected in ((2, 9), (3, 9), (4, 10)):
        profile = make_profile(trained(2), loop_seconds=float(loop))
        assert step(profile, plan_of(profile, state={0, 1})) == exactly(expected)


def test_gated_updates_start_when_the_whole_backward_has_ended() -> None:
    # Only unit 1 is offloaded: ungated U1 3-6 hides behind b0 (2-4) and f0 (4-5) all but 1 + H1.
    profile = make_profile(trained(2), cpu_params_per_second=1 / 3)
    plan = plan_of(profile, state={1})
    assert step(profile, plan) == exactly(8)  # f1 at 7
    assert step(profile, plan, gated=True) == exactly(9)  # U1 4-7, H1 7-8, f1 8-9


def test_what_was_updated_early_goes_up_when_the_step_is_taken() -> None:
    # b1 0-4, b0 4-8; D1 4-5, U1 5-6; H1 8-13; f0 8-9, f1 13-14.
    units = trained(2, backward_seconds=4.0)
    profile = make_profile(units, h2d_bytes_per_second=0.2)
    assert step(profile, plan_of(profile, state={1})) == exactly(14)
    # From a slot of the window likewise: H1 8-13 again.
    assert step(profile, plan_of(profile, parameters={1})) == exactly(14)
    # As the paper's system does it: H1 6-11; f1 11-12.
    assert step(profile, plan_of(profile, state={1}), early_uploads=True) == exactly(12)
    assert step(profile, plan_of(profile, parameters={1}), early_uploads=True) == exactly(12)


def test_only_the_unit_that_is_late_waits() -> None:
    # Three layers, the last offloaded: f0 and f1 run while U2 runs.
    profile = make_profile(trained(3), cpu_params_per_second=1 / 5)
    plan = plan_of(profile, state={2})
    # b2 0-2, D2 2-3, U2 3-8, H2 8-9; b0 ends 6, f0 6-7, f1 7-8, f2 9-10.
    assert step(profile, plan) == exactly(10)
    # A barrier lets f0 start at 9 only: f2 ends 12.
    assert step(profile, plan, iteration_barrier=True) == exactly(12)


def test_one_slot_serialises_uploads_and_compute() -> None:
    frozen = layers(2, param_bytes=3, forward_seconds=1.0, backward_seconds=2.0)
    profile = make_profile(frozen)
    plan = plan_of(profile, parameters={0, 1}, window=1)
    assert step(profile, plan) == exactly(1 + 3 + 1 + 2 + 3 + 2)
    assert step(profile, plan_of(profile, parameters={0, 1}, window=2)) == exactly(6)


def test_two_slots_upload_the_next_unit_while_one_computes() -> None:
    # f0 0-1, f1 1-2 with H2 1-3, f2 3-4 with H3 3-5, f3 5-6, b3 6-7, b2 7-8 with H1 7-9,
    # b1 9-10 with H0 9-11, b0 11-12.
    frozen = layers(4, param_bytes=2, forward_seconds=1.0, backward_seconds=1.0)
    profile = make_profile(frozen)
    assert step(profile, plan_of(profile, parameters={0, 1, 2, 3})) == exactly(12)


def test_a_large_unit_waits_for_the_slot_that_it_fits_in() -> None:
    # Slots of 3 and 1. H0 0-1 into the small one, H1 1-2 into the large one; f0 1-2, f1 2-3; H2 3-6
    # when the large one is free, H1 6-7 where unit 0 was; f2 6-7, b2 7-9, b1 9-11 with H0 9-10,
    # b0 11-13. Slots of 3 and 3 would have H2 2-5, b2 6-8 and b0 10-12.
    small = trained(2, num_parameters=0)
    large = trained(1, kind="large", num_parameters=0, param_bytes=3, grad_bytes=3)
    profile = make_profile(small + large, d2h_bytes_per_second=FAST)
    assert step(profile, plan_of(profile, parameters={0, 1, 2}), gated=True) == exactly(13)


def leaving_profile() -> _C.Profile:
    units = layers(6, param_bytes=3, grad_bytes=3, forward_seconds=1.0, backward_seconds=1.0)
    return make_profile(units, h2d_bytes_per_second=FAST)


def test_backward_waits_for_a_gradient_buffer_and_small_units_leave_first() -> None:
    # b5 0-1, b4 1-2, b3 2-3; D5 1-4, D3 4-7, D2 7-10, D1 10-13, D0 13-16, D4 16-19;
    # b2 4-5, b1 7-8, b0 10-11; f0 16-17 .. f3 19-20, f4 20-21, f5 21-22.
    profile = leaving_profile()
    plan = plan_of(profile, state=set(range(6)))
    assert step(profile, plan) == exactly(22)


def test_a_backward_on_the_device_waits_for_the_gradients_before_it() -> None:
    # b5 0-1, b4 1-2, b3 2-3; D5 1-4, so b2 (of a unit that the device updates) 4-5, b1 5-6, b0 6-7;
    # D3 4-7, D4 7-10; f0 7-8, f1 8-9, f2 9-10, f3 10-11, f4 11-12, f5 12-13.
    profile = leaving_profile()
    plan = plan_of(profile, state={3, 4, 5})
    simulation = _C.simulate(profile, plan, policy())
    assert simulation.step_seconds == exactly(13)
    assert max(simulation.leaving_bytes) == 6


def test_a_tensor_of_what_has_just_left_counts_as_leaving() -> None:
    # b2 0-1, D2 1-1.75; b1 1-2; when b0 begins at 2, unit 1 leaves and unit 2 has left 0.25 ago,
    # less than half of its copy. With D2 1-1.6 it was 0.4 ago, more than half.
    units = layers(3, param_bytes=3, grad_bytes=3, forward_seconds=1.0, backward_seconds=1.0)
    for unit in units:
        unit.largest_grad_tensor_bytes = 2
    for rate, leaving in ((4.0, [5, 3, 0]), (5.0, [3, 3, 0])):
        profile = make_profile(units, h2d_bytes_per_second=FAST, d2h_bytes_per_second=rate)
        plan = plan_of(profile, state={0, 1, 2})
        assert _C.simulate(profile, plan, policy()).leaving_bytes == leaving


def test_a_backward_waits_until_its_unit_gradients_of_the_micro_batch_before_have_left() -> None:
    # f 0-1, b 1-3, D 3-13; f 3-4, b 4-6 waits, D 13-23; f 13-14, b 14-16 waits, D 23-33; U 33-34.
    profile = make_profile(
        trained(1),
        h2d_bytes_per_second=FAST,
        d2h_bytes_per_second=0.1,
        gradient_accumulation_steps=3,
    )
    assert step(profile, plan_of(profile, state={0})) == exactly(34)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_seen_leaving_is_within_the_bound(seed: int) -> None:
    profile, plan, order = random_case(seed)
    units = profile.units
    for unit in units:
        unit.largest_grad_tensor_bytes = unit.grad_bytes
    profile.units = units
    hardware = profile.hardware
    hardware.d2h_bytes_per_second /= 10 ** (seed % 3)
    profile.hardware = hardware
    leaving = _C.simulate(profile, plan, order).leaving_bytes
    steps = profile.gradient_accumulation_steps
    for i, seen in enumerate(leaving):
        others = [j for j in range(len(leaving)) if j > i or (steps > 1 and j != i)]
        sizes = [units[j].grad_bytes for j in others if plan.units[j].gradients == _C.Tier.HOST]
        assert seen <= sum(sorted(sizes)[-2:])


def test_first_in_first_out_holds_up_the_next_forward() -> None:
    # D5 1-4, D4 4-7, D3 7-10, D2 10-13, D1 13-16, D0 16-19; f0 19-20 .. f5 24-25.
    profile = leaving_profile()
    plan = plan_of(profile, state=set(range(6)))
    assert step(profile, plan, priority_order=False) == exactly(25)


def test_overtaking_between_chunks_starves_the_gradient_buffers() -> None:
    """Why the D2H lane lets a unit's gradients finish: with few buffers overtaking serialises."""
    profile = leaving_profile()
    profile.chunk_bytes = 1
    plan = plan_of(profile, state=set(range(6)))
    assert step(profile, plan, preempt_downloads=True) > step(profile, plan)


def test_compute_slows_down_while_the_cpu_updates() -> None:
    # b1 0-2; U1 2-4 halves b0: 2-5; f0 5-6, f1 6-7.
    profile = make_profile(
        trained(2),
        cpu_params_per_second=0.5,
        h2d_bytes_per_second=FAST,
        d2h_bytes_per_second=FAST,
        compute_share_during_cpu=0.5,
    )
    assert step(profile, plan_of(profile, state={1})) == exactly(7)


def test_the_cpu_slows_down_while_the_device_computes() -> None:
    # U1 from 2: 1.5 of its 2 done by 5, when f0 has ended; f1 5.5-6.5.
    profile = make_profile(
        trained(2),
        cpu_params_per_second=0.5,
        h2d_bytes_per_second=FAST,
        d2h_bytes_per_second=FAST,
        cpu_share_during_compute=0.5,
    )
    assert step(profile, plan_of(profile, state={1})) == exactly(6.5)


def test_links_share_bandwidth_when_both_are_busy() -> None:
    # b1 0-2, b0 2-4, D1 2-6 (gradients of 4). U is nothing. H1 (4 bytes) 6-10 while D0 6-10 runs:
    # H1 at half rate has 2 left at 10, D0 full. Then H0 overtakes H1? One chunk each: H1 10-12,
    # H0 12-16; f0 16-17, f1 17-18.
    units = trained(2, num_parameters=0, param_bytes=4, grad_bytes=4)
    profile = make_profile(units, h2d_share_during_d2h=0.5)
    assert step(profile, plan_of(profile, state={0, 1})) == exactly(18)


def test_a_more_urgent_upload_overtakes_between_chunks() -> None:
    # As above with chunks of 1: at 10, H1 has 2 left on a chunk's edge; H0 10-14, f0 14-15;
    # H1 14-16, f1 16-17.
    units = trained(2, num_parameters=0, param_bytes=4, grad_bytes=4)
    profile = make_profile(units, h2d_share_during_d2h=0.5, chunk_bytes=1)
    assert step(profile, plan_of(profile, state={0, 1})) == exactly(17)


def test_synchronous_moves_never_overlap_compute() -> None:
    # b1 0-2, D1 2-3, b0 3-5, then with compute idle D0 5-6 beside H1, H0 6-7; f0 7-8, f1 8-9.
    profile = make_profile(trained(2), cpu_params_per_second=FAST)
    plan = plan_of(profile, state={0, 1})
    simulated = _C.simulate(
        profile,
        plan,
        policy(synchronous_moves=True, iteration_barrier=True, priority_order=False, gated=True),
        True,
    )
    assert simulated.step_seconds == exactly(9)
    compute, moves = lane_spans(simulated, 0), lane_spans(simulated, 1) + lane_spans(simulated, 2)
    for a, b in itertools.product(compute, moves):
        assert a.end_seconds <= b.start_seconds + 1e-12 or b.end_seconds <= a.start_seconds + 1e-12


LANES = (_C.SimulatedLane.COMPUTE, _C.SimulatedLane.H2D, _C.SimulatedLane.D2H, _C.SimulatedLane.CPU)


def lane_spans(simulation: _C.Simulation, lane: int) -> list[_C.SimulatedSpan]:
    return [span for span in simulation.spans if span.lane == LANES[lane]]


def random_case(seed: int) -> tuple[_C.Profile, _C.Plan, _C.SimulationPolicy]:
    rng = random.Random(seed)
    profile = random_profile(rng, max_segments=3, max_count=4)
    plan = _C.decode_plan(
        profile,
        as_counts(rng.choice(all_counts(profile))),
        rng.choice([1, 2, 3]),
        spread=rng.random() < 0.5,
    )
    return (
        profile,
        plan,
        policy(
            gated=rng.random() < 0.5,
            priority_order=rng.random() < 0.7,
            iteration_barrier=rng.random() < 0.2,
            steps=8,
            preempt_downloads=rng.random() < 0.3,
            synchronous_moves=rng.random() < 0.2,
        ),
    )


@pytest.mark.parametrize("seed", range(500))
def test_a_schedule_keeps_the_lanes_and_the_lower_bounds(seed: int) -> None:
    profile, plan, order = random_case(seed)
    simulation = _C.simulate(profile, plan, order, True)
    check_no_lane_does_two_things(simulation)
    check_lower_bounds(profile, plan, order, simulation)
    check_dependencies(profile, plan, order, simulation)


def check_no_lane_does_two_things(simulation: _C.Simulation) -> None:
    for lane in range(4):
        spans = sorted(lane_spans(simulation, lane), key=lambda s: (s.start_seconds, s.end_seconds))
        for before, after in itertools.pairwise(spans):
            assert before.end_seconds <= after.start_seconds + 1e-12


def check_lower_bounds(
    profile: _C.Profile, plan: _C.Plan, order: _C.SimulationPolicy, simulation: _C.Simulation
) -> None:
    step_seconds = simulation.step_seconds
    lanes = _C.lane_seconds(profile, plan)
    for lane in ("compute", "cpu", "d2h", "h2d"):
        assert step_seconds >= lanes[lane] * (1 - 1e-9) - 1e-12, lane
    repeats = profile.gradient_accumulation_steps
    for unit, placed in zip(profile.units, plan.units, strict=False):
        if placed.optimizer_state != _C.Tier.HOST or unit.grad_bytes == 0:
            continue
        t = seconds_of(profile, unit)
        upload = t.H if placed.parameters == _C.Tier.HOST else t.Hu
        assert step_seconds >= repeats * (t.f + t.b) + t.D + t.U + upload - 1e-9


def check_dependencies(
    profile: _C.Profile, plan: _C.Plan, order: _C.SimulationPolicy, simulation: _C.Simulation
) -> None:
    repeats = profile.gradient_accumulation_steps
    for k, (unit, placed) in enumerate(zip(profile.units, plan.units, strict=False)):
        if placed.optimizer_state != _C.Tier.HOST or unit.grad_bytes == 0:
            continue
        mine = [span for span in simulation.spans if span.unit == k]
        forwards = [span for span in mine if span.what == "forward"]
        backwards = [span for span in mine if span.what == "backward"]
        updates = [span for span in mine if span.what == "update"]
        uploads = [span for span in mine if span.what == "upload"]
        for s, update in enumerate(updates):
            last_backward = backwards[s * repeats + repeats - 1]
            assert update.start_seconds >= last_backward.end_seconds - 1e-12
            next_forward = (s + 1) * repeats
            if next_forward < len(forwards):
                start = forwards[next_forward].start_seconds
                assert start >= update.end_seconds - 1e-12
                between = [
                    u
                    for u in uploads
                    if update.end_seconds - 1e-12 <= u.start_seconds < start + 1e-12
                ]
                assert between, "the forward ran on old parameters"


def test_two_runs_are_equal() -> None:
    profile, plan, order = random_case(7)
    first, second = (_C.simulate(profile, plan, order, True) for _ in range(2))
    assert first.step_seconds == second.step_seconds
    assert [(s.unit, s.what, s.start_seconds) for s in first.spans] == [
        (s.unit, s.what, s.start_seconds) for s in second.spans
    ]
