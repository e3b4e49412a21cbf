"""simulate(): what each lane does when, under a plan and an order of work."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autohete import _C
from autohete.planning.make_plan import require_profile
from autohete.planning.profile_file import write_atomically

ABLATIONS = ("fifo", "barrier", "aggregation")
_SINGLE_COPY_BYTES = 512 << 10  # without aggregation: a third of the bandwidth goes to latency
_LANE_NAMES = {
    _C.SimulatedLane.COMPUTE: "device compute",
    _C.SimulatedLane.H2D: "host to device",
    _C.SimulatedLane.D2H: "device to host",
    _C.SimulatedLane.CPU: "CPU updates",
    _C.SimulatedLane.EXCHANGE: "exchange of gradients",
    _C.SimulatedLane.GATHER: "gather of parameters",
}


def simulate(
    profile: _C.Profile,
    plan: _C.Plan,
    *,
    gated: bool | None = None,
    early_uploads: bool = False,
    without: tuple[str, ...] = (),
    keep_spans: bool = True,
) -> _C.Simulation:
    """Return the simulated steps of a plan, ordered as its strategy orders its work.

    Args:
        gated: updates wait for the end of the whole backward; None for the strategy's own way.
        early_uploads: see make_plan().
        without: what to leave out, of `ABLATIONS`: "fifo" gives up the priorities, "barrier" lets
            no forward start before all updates have ended, "aggregation" copies in pieces of
            512 KiB, each with the link's latency, instead of a unit's bytes in large chunks.
        keep_spans: record every span (see write_trace()).
    """
    require_profile("simulate", profile)
    if not isinstance(plan, _C.Plan):
        raise ValueError(
            f"simulate: plan is a {type(plan).__name__}, expected a Plan; make_plan() makes one"
        )
    unknown = set(without) - set(ABLATIONS)
    if unknown:
        raise ValueError(f"without is {sorted(unknown)}, expected of {', '.join(ABLATIONS)}")
    policy = _C.policy_of(plan.strategy)
    if gated is not None:
        policy.gated = gated
    policy.early_uploads = early_uploads
    policy.priority_order = policy.priority_order and "fifo" not in without
    policy.iteration_barrier = policy.iteration_barrier or "barrier" in without
    if "aggregation" in without:
        profile = _C.Profile(profile)
        profile.chunk_bytes = min(profile.chunk_bytes, _SINGLE_COPY_BYTES)
    return _C.simulate(profile, plan, policy, keep_spans)


def write_trace(
    path: str | os.PathLike[str], profile: _C.Profile, simulation: _C.Simulation
) -> None:
    """Write the spans as a Chrome/Perfetto trace (microseconds)."""
    names = [unit.name for unit in profile.units]
    lanes = list(_LANE_NAMES)
    alone = profile.ranks.num_ranks == 1
    shown = lanes[:4] if alone else lanes  # without the lanes of several ranks
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "pid": 0,
            "tid": lanes.index(lane),
            "name": "thread_name",
            "args": {"name": name},
        }
        for lane, name in _LANE_NAMES.items()
        if lane in shown
    ]
    events.extend(
        {
            "ph": "X",
            "pid": 0,
            "tid": lanes.index(span.lane),
            "name": span.what if span.what == "loop" else f"{span.what} {names[span.unit]}",
            "cat": span.what,
            "ts": span.start_seconds * 1e6,
            "dur": (span.end_seconds - span.start_seconds) * 1e6,
        }
        for span in simulation.spans
    )
    write_atomically(Path(path), json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
