"""Ranks under one plan: what holds on all of them, made by the first, applied by all or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autohete import _C
from autohete.distributed import Ranks
from autohete.planning import InfeasibleError, Plan
from autohete.planning.profile_file import (
    PASS_SECONDS,
    UNIT_SECONDS,
    plan_from_dict,
    plan_to_dict,
    profile_from_dict,
    profile_to_dict,
)

_LARGE_BYTES = 32 << 20


def merged_profile(ranks: Ranks | None, profile: _C.Profile) -> _C.Profile:
    """Return what holds on every rank."""
    if ranks is None:
        return profile
    return profile_from_dict(_merged(ranks.gather(profile_to_dict(profile))))


def agree_on_plan(
    ranks: Ranks | None,
    profile: _C.Profile,
    plannable: int,
    make: Callable[[_C.Profile, int], Plan],
) -> Plan:
    """Return the plan that the first rank makes, for all.

    Args:
        plannable: bytes of this rank's device that the plan may use; the least of all counts.

    Raises:
        InfeasibleError: it cannot make one; on all ranks.
    """
    if ranks is None:
        return make(profile, plannable)
    least = min(ranks.gather(plannable))
    made: dict[str, Any] | str = ""
    if ranks.rank == 0:
        try:
            made = plan_to_dict(make(profile, least))
        except InfeasibleError as error:
            made = str(error)
    made = ranks.share(made)
    if isinstance(made, str):
        raise InfeasibleError(made)
    return plan_from_dict(made)


def everywhere(ranks: Ranks | None, apply: Callable[[], None]) -> None:
    """Do something on all ranks.

    Raises:
        torch.OutOfMemoryError: some rank had no room for it; on all ranks.
    """
    failure = None
    try:
        apply()
    except torch.OutOfMemoryError as error:
        if ranks is None:
            raise
        failure = str(error)
    for rank, what in enumerate(ranks.gather(failure) if ranks else ()):
        if what is not None and ranks:
            raise torch.OutOfMemoryError(f"{what} (on {ranks.name(rank)})")


def _merged(profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """The most bytes, the seconds of the rank that computes longest, and the least rates.

    Seconds are of one rank together, and so are those of collectives: the longest of each would
    add up the noise of all ranks to a step that none of them takes.
    """
    merged: dict[str, Any] = slowest(profiles)
    longest = max(profiles, key=_compute_seconds)
    merged.update({name: longest[name] for name in PASS_SECONDS})
    for unit, of_longest in zip(merged["units"], longest["units"], strict=True):
        unit.update({name: of_longest[name] for name in UNIT_SECONDS})
    merged["ranks"] = max((profile["ranks"] for profile in profiles), key=_exchange_seconds)
    return merged


def _compute_seconds(profile: dict[str, Any]) -> float:
    inside = sum(unit[name] for unit in profile["units"] for name in UNIT_SECONDS)
    return float(inside + sum(profile[name] for name in PASS_SECONDS))


def _exchange_seconds(rates: dict[str, Any]) -> float:
    """Of a large unit, beside compute."""
    alone = rates["exchange_latency_seconds"] + _LARGE_BYTES / rates["exchange_bytes_per_second"]
    return float(alone / rates["collective_share_during_compute"])


def slowest(profiles: list[Any]) -> Any:
    """Return what holds on every rank: the most bytes and seconds, the least rates and abilities.

    Args:
        profiles: of equal structure, as profile_to_dict gives them.
    """
    first = profiles[0]
    if isinstance(first, dict):
        return {key: _slowest_of(key, [profile[key] for profile in profiles]) for key in first}
    if isinstance(first, list):
        return [slowest(list(items)) for items in zip(*profiles, strict=True)]
    return first


def _slowest_of(key: str, values: list[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values) if key.startswith("can_") else any(values)
    if isinstance(values[0], (int, float)):
        least = key.endswith("per_second") or "_share_during_" in key
        return min(values) if least else max(values)
    return slowest(values)
