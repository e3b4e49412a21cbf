"""autohete_profile.json: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from autohete import planning
from autohete.planning import profile_file
from tests.plan.reference import layers, make_profile, random_profile


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    profile = random_profile(random.Random(1))
    plan = planning.make_plan(profile, 2**40)
    path = tmp_path / "autohete_profile.json"
    planning.save_profile(path, profile, plan)
    return path


@pytest.mark.parametrize("seed", range(10))
def test_profile_and_plan_come_back_equal(tmp_path: Path, seed: int) -> None:
    profile = random_profile(random.Random(seed))
    least = planning.minimum_gpu_mem(profile)
    plan = planning.make_plan(profile, int(least * 1.2))
    planning.save_profile(tmp_path / "p.json", profile, plan)
    profile_again, plan_again = planning.load_profile(tmp_path / "p.json")
    assert profile_file.profile_to_dict(profile_again) == profile_file.profile_to_dict(profile)
    assert plan_again is not None
    assert profile_file.plan_to_dict(plan_again) == profile_file.plan_to_dict(plan)
    assert plan_again.units == plan.units


def test_a_profile_without_plan_is_allowed(tmp_path: Path) -> None:
    planning.save_profile(tmp_path / "p.json", random_profile(random.Random(1)))
    assert planning.load_profile(tmp_path / "p.json")[1] is None


def test_a_failed_write_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        planning.save_profile(saved, random_profile(random.Random(2)))
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_every_cut_of_the_file_is_refused(saved: Path) -> None:
    raw = saved.read_bytes()
    for end in range(0, len(raw) - 2, max(1, len(raw) // 60)):
        saved.write_bytes(raw[:end])
        with pytest.raises(ValueError, match="damaged"):
            planning.load_profile(saved)


def change(path: Path, *keys: str | int, value: object) -> None:
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("format",), "other", "not an autohete profile"),
        (("version",), 999, "version 999"),
        (("profile", "units"), {}, "expected a list"),
        (("profile", "units"), [], "units is empty"),
        (("profile", "units", 0, "param_bytes"), "7", "param_bytes is '7'"),
        (("profile", "units", 0, "param_bytes"), -7, "param_bytes is -7"),
        (("profile", "units", 0, "forward_seconds"), -1.0, "forward_seconds is -1"),
        (("profile", "hardware", "h2d_bytes_per_second"), 0, "h2d_bytes_per_second is 0"),
        (("profile", "surprise"), 1, "unknown"),
        (("plan", "units", 0, "parameters"), "moon", "expected one of device, host"),
        (("plan", "units", 0, "parameters"), [], "expected one of device, host"),
        (("plan", "step_seconds"), -1.0, "step_seconds is -1"),
        (("plan", "units", 0, "first"), 3, "starts at 0"),
        (("plan", "units", 0, "last"), 10**9, "starts at 0"),
        (("plan", "units"), [], "0 units"),
        (("plan", "window"), 0, "window is 0"),
    ],
)
def test_damage_is_named(
    saved: Path, keys: tuple[str | int, ...], value: object, message: str
) -> None:
    change(saved, *keys, value=value)
    with pytest.raises(ValueError, match=message):
        planning.load_profile(saved)


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", "3", '{"format": NaN}', "\x00\xff", "[" * 100000]
)
def test_foreign_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "autohete_profile.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"autohete_profile\.json"):
        planning.load_profile(path)


def test_a_file_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="more than"):
        planning.load_profile("/dev/zero")


def test_nothing_is_written_for_a_profile_that_is_not_valid(tmp_path: Path) -> None:
    profile = make_profile(layers(2, forward_seconds=float("nan")))
    with pytest.raises(ValueError, match="forward_seconds is nan"):
        planning.save_profile(tmp_path / "p.json", profile)
    assert list(tmp_path.iterdir()) == []


def test_a_file_from_before_speculation_was_known_is_read(saved: Path) -> None:
    document = json.loads(saved.read_text())
    assert document["profile"].pop("speculates") is False
    saved.write_text(json.dumps(document))
    assert planning.load_profile(saved)[0].speculates is False


def test_a_file_from_before_later_fields_were_known_is_read(saved: Path) -> None:
    document = json.loads(saved.read_text())
    del document["profile"]["hardware"]["compute_share_during_copy"]
    for unit in document["profile"]["units"]:
        del unit["recompute_seconds"], unit["grad_tensors"]
    saved.write_text(json.dumps(document))
    profile = planning.load_profile(saved)[0]
    assert profile.hardware.compute_share_during_copy == 1
    assert {(u.recompute_seconds, u.grad_tensors) for u in profile.units} == {(0, 1)}
