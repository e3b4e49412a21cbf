"""Walk every state the engine can reach and check what must never be."""

from __future__ import annotations

import itertools

import pytest

from autohete._native import C

EVENTS = C.UNIT_EVENTS
START = {"host": ("host", "idle"), "device": ("resident", "idle")}


def step(state: tuple[str, str], event: str) -> tuple[str, str] | None:
    return C.next_unit_state(*state, event)


def reachable(start: tuple[str, str]) -> set[tuple[str, str]]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for event in EVENTS:
            after = step(state, event)
            if after is not None and after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


ALL = reachable(START["host"]) | reachable(START["device"])
WRITTEN = ("committed", "updating")


def test_an_update_never_meets_a_device_copy_or_a_computation():
    for residency, progress in ALL:
        if progress in WRITTEN:
            assert residency == "host"


def test_nothing_uploads_or_computes_with_parameters_that_are_being_written():
    for state, event in itertools.product(ALL, ("upload_started", "acquired")):
        if state[1] in WRITTEN:
            assert step(state, event) is None


def test_every_reachable_state_can_get_back_to_rest():
    for state in ALL:
        assert ("host", "idle") in reachable(state), state


def test_gradients_are_sent_only_when_the_last_ones_are_used_up_or_kept():
    for state in ALL:
        allowed = step(state, "gradients_ready") is not None
        assert allowed == (state[1] in ("idle", "landed"))


def test_a_unit_in_use_cannot_be_dropped_or_committed():
    for progress in ("idle", "leaving", "landed"):
        assert step(("computing", progress), "dropped") is None
        assert step(("computing", progress), "commit") is None


@pytest.mark.parametrize("progress", ["idle", "leaving", "landed"])
def test_commit_waits_for_gradients_that_are_still_leaving(progress):
    after = step(("host", progress), "commit")
    assert after == ("host", "committed" if progress == "leaving" else "updating")


def test_all_combinations_but_the_written_ones_are_reached():
    expected = {
        (r, p)
        for r in ("host", "uploading", "resident", "computing")
        for p in ("idle", "leaving", "landed")
    } | {("host", p) for p in WRITTEN}
    assert expected == ALL
