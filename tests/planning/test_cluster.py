"""Devices and machines that are not here."""

from __future__ import annotations

import itertools
import math
import time

import pytest

from autohete import _C
from autohete.planning import make_plan
from autohete.planning.cluster import Cluster, format_scale, numbers_up_to, profile_of_rank, scale
from autohete.planning.library import find_machine, profile_on
from autohete.planning.named_model import describe_named

SEVEN_B = "7b"


def alone(batch: int = 4) -> _C.Profile:
    return profile_on(describe_named(SEVEN_B, batch, 1024, "bf16"), find_machine("a100-40"))


def test_a_cluster_of_one_device_is_the_profile_itself() -> None:
    profile = alone()
    plan = make_plan(profile, "36GiB", "400GB")
    (point,) = scale(profile, Cluster(1), "36GiB", "400GB")
    assert point.plan is not None
    assert point.plan.step_seconds == plan.step_seconds
    assert point.speed_up == point.efficiency == 1


def test_a_rank_has_its_rows_of_the_state_and_its_share_of_the_machine() -> None:
    profile = alone()
    rank = profile_of_rank(profile, Cluster(16, 4, devices_per_link=2))
    for whole, part in zip(profile.units, rank.units, strict=True):
        assert part.state_bytes == math.ceil(whole.state_bytes / 16)
        assert (part.param_bytes, part.grad_bytes) == (whole.param_bytes, whole.grad_bytes)
    before, after = profile.hardware, rank.hardware
    assert after.cpu_params_per_second == before.cpu_params_per_second / 4
    assert after.h2d_bytes_per_second == before.h2d_bytes_per_second / 2
    assert rank.fixed_device_bytes > profile.fixed_device_bytes


def test_a_ring_moves_what_the_slower_of_its_links_can() -> None:
    links = {"device_bytes_per_second": 20e9, "machine_bytes_per_second": 5e9}
    inside, across = Cluster(4, 1, **links).ranks(), Cluster(8, 2, **links).ranks()
    assert inside.exchange_bytes_per_second == pytest.approx(20e9 / (2 * 3 / 4))
    assert across.exchange_bytes_per_second == pytest.approx(5e9 / (2 * 7 / 8))
    assert across.device_gather_bytes_per_second == pytest.approx(5e9 / (7 / 8))
    single = Cluster(2, 2, **links).ranks()  # no two devices on a machine: the network alone
    assert single.gather_bytes_per_second == pytest.approx(5e9 / 0.5)


def test_speed_up_never_exceeds_the_devices_and_grows_with_the_link() -> None:
    profile = alone()
    by_rate = {}
    for rate in (1e9, 12.5e9, 100e9):
        cluster = Cluster(32, 8, machine_bytes_per_second=rate)
        points = scale(profile, cluster, "36GiB", "440GB", numbers=[1, 8, 32])
        assert [p.devices for p in points] == [1, 8, 32]
        by_rate[rate] = [p.speed_up for p in points]
        for p in points:
            assert p.efficiency == p.speed_up / p.devices
    for slow, fast in itertools.pairwise(by_rate.values()):
        assert all(a <= b * 1.01 for a, b in zip(slow, fast, strict=True))
    assert by_rate[1e9][-1] < 0.8 * by_rate[100e9][-1]


def test_plans_for_1_to_1024_devices_take_seconds() -> None:
    start = time.process_time()
    points = scale(alone(), Cluster(1024, 128), "36GiB", "440GB")
    print(f"{time.process_time() - start:.1f} s of CPU")
    assert [p.devices for p in points] == [2**n for n in range(11)]
    assert all(p.plan is not None for p in points)
    text = format_scale(points, Cluster(1024, 128))
    assert len(text.splitlines()) == 13
    assert "GB/s" in text.splitlines()[-1]


def test_what_one_machine_cannot_hold_more_of_them_do() -> None:
    points = scale(alone(1), Cluster(8, 8), "20GiB", "60GB")
    assert points[0].plan is None and "cpu_mem" in points[0].error
    assert points[-1].plan is not None
    text = format_scale(points, Cluster(8, 8))
    assert "does not fit" in text.splitlines()[1]


def test_numbers_are_powers_of_two_and_the_last() -> None:
    assert numbers_up_to(12) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize("bad", [(0, 1), (3, 2), (1, 2)])
def test_devices_that_do_not_divide_among_the_machines_are_refused(bad: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="devices is"):
        Cluster(*bad)


def test_a_profile_of_several_ranks_is_refused() -> None:
    profile = profile_of_rank(alone(), Cluster(2))
    with pytest.raises(ValueError, match="measured by 2 ranks"):
        profile_of_rank(profile, Cluster(4))
