"""What the pictures show, as rows of plain values. Nothing here needs a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autohete import _C
from autohete.planning import ActivationRule, Plan, Profile, Tier, device_visits
from autohete.planning.sizes import format_bytes

LANES = (
    "device compute",
    "host to device",
    "device to host",
    "CPU updates",
    "exchange of gradients",
    "gather of parameters",
)
Row = dict[str, Any]
_SIMULATED_LANES = {
    _C.SimulatedLane.COMPUTE: 0,
    _C.SimulatedLane.H2D: 1,
    _C.SimulatedLane.D2H: 2,
    _C.SimulatedLane.CPU: 3,
    _C.SimulatedLane.EXCHANGE: 4,
    _C.SimulatedLane.GATHER: 5,
}
_MOST_SPANS = 600  # drawn one by one; more are joined with their neighbours


@dataclass(frozen=True)
class Span:
    """Work on a lane, in seconds; `last` differs from `unit` where pieces are joined."""

    lane: int
    unit: int
    what: str
    begin: float
    end: float
    last: int = -1


# ---------------------------------------------------------------- what lives where


def placement_rows(plan: Plan, profile: Profile | None = None) -> list[Row]:
    """Return one row per unit and kind of bytes: where they are, and how many."""
    rows: list[Row] = []
    for index, unit in enumerate(plan.units):
        described = profile.units[index] if profile is not None else None
        name = described.name if described is not None else str(index)
        for kind, place, num_bytes in _places(unit, described):
            size = "" if num_bytes is None else format_bytes(num_bytes)
            place = "nothing" if num_bytes == 0 else place
            rows.append(
                {
                    "unit": index,
                    "end": index + 1,
                    "name": name,
                    "bytes of": kind,
                    "where": place,
                    "size": size,
                }
            )
    return rows


def _places(
    unit: _C.UnitPlan, described: _C.UnitProfile | None
) -> list[tuple[str, str, int | None]]:
    def tier(where: Tier) -> str:
        return "host" if where == Tier.HOST else "device"

    recomputed = unit.activations == ActivationRule.RECOMPUTE
    sizes: tuple[int | None, ...] = (None,) * 4
    if described is not None:
        sizes = (
            described.param_bytes,
            described.grad_bytes,
            described.state_bytes,
            described.activation_bytes,
        )
    places = (
        ("parameters", tier(unit.parameters)),
        ("gradients", tier(unit.gradients)),
        ("optimizer state", tier(unit.optimizer_state)),
        ("activations", "recomputed" if recomputed else "device"),
    )
    return [(kind, place, size) for (kind, place), size in zip(places, sizes, strict=True)]


# ---------------------------------------------------------------- what runs when


def simulated_spans(simulation: _C.Simulation) -> list[Span]:
    """Return the simulated work of all steps."""
    return [
        Span(_SIMULATED_LANES[s.lane], s.unit, s.what, s.start_seconds, s.end_seconds)
        for s in simulation.spans
    ]


def step_starts(spans: Sequence[Span], passes: int = 1) -> list[float]:
    """Return when each step begins: at every `passes`-th forward of its first unit."""
    forwards = [s for s in spans if s.lane == 0 and s.what == "forward"]
    first = min((s.unit for s in forwards), default=0)
    begins = sorted(s.begin for s in forwards if s.unit == first)
    return begins[::passes]


def last_steps(spans: Sequence[Span], passes: int = 1, count: int = 2) -> tuple[float, float]:
    """Return begin and end of the last `count` whole steps; fewer where there are fewer."""
    starts = step_starts(spans, passes)
    if len(starts) < 2:
        return (min((s.begin for s in spans), default=0), max((s.end for s in spans), default=0))
    return starts[max(0, len(starts) - 1 - count)], starts[-1]


def timeline_rows(
    spans: Sequence[Span], names: Sequence[str], which: str, window: tuple[float, float]
) -> list[Row]:
    """Return the work within the window, in milliseconds from its begin, cut at its borders."""
    begin, end = window
    inside = [
        replace(s, begin=max(s.begin, begin) - begin, end=min(s.end, end) - begin)
        for s in spans
        if s.end > begin and s.begin < end
    ]
    if len(inside) > _MOST_SPANS:
        inside = joined(inside, (end - begin) / 1000)
    return [
        {
            "lane": LANES[s.lane],
            "which": which,
            "work": _kind(s.what),
            "units": _unit_names(s, names),
            "begin": round(s.begin * 1e3, 4),
            "end": round(s.end * 1e3, 4),
            "took": f"{(s.end - s.begin) * 1e3:.3g} ms",
        }
        for s in inside
    ]


def joined(spans: Sequence[Span], gap: float) -> list[Span]:
    """Join neighbours of one kind on one lane that are less than `gap` seconds apart."""
    out: list[Span] = []
    open_at: dict[int, int] = {}  # lane -> where its last span stands in `out`
    for span in sorted(spans, key=lambda s: s.begin):
        at = open_at.get(span.lane)
        if at is not None and out[at].what == span.what and span.begin - out[at].end < gap:
            out[at] = replace(out[at], end=max(span.end, out[at].end), last=span.unit)
        else:
            open_at[span.lane] = len(out)
            out.append(span)
    return out


def _kind(what: str) -> str:
    """The engine's words for work, in those of the pictures."""
    word = what.split(" ")[0]  # "update ahead" is an update
    return {"gradients": "download", "take": "exchange"}.get(word, word)


def _unit_names(span: Span, names: Sequence[str]) -> str:
    def name(unit: int) -> str:
        return names[unit] if 0 <= unit < len(names) else "-"

    if span.last in (-1, span.unit):
        return name(span.unit)
    return f"{name(span.unit)} .. {name(span.last)}"


# ---------------------------------------------------------------- memory over a step


def predicted_memory(profile: Profile, plan: Plan, simulation: _C.Simulation) -> list[Row]:
    """Return the device's bytes at every visit of one simulated step; the host's do not change."""
    visits_ = device_visits(profile, plan, simulation.leaving_bytes)
    held = {(unit, back): num_bytes for unit, back, num_bytes in visits_}
    spans = simulated_spans(simulation)
    begin, end = last_steps(spans, profile.gradient_accumulation_steps, count=1)
    visits = [
        (s.begin, s.end, held[s.unit, s.what == "backward"])
        for s in spans
        if s.lane == 0 and s.what in ("forward", "backward") and begin <= s.begin < end
    ]
    rows = [_memory_row("predicted", start - begin, size) for start, _, size in sorted(visits)]
    if rows:
        rows.append(rows[-1] | {"ms": round((max(v[1] for v in visits) - begin) * 1e3, 4)})
    return rows


def measured_memory(
    samples: Sequence[tuple[float, int, int]], window: tuple[float, float], host: bool = False
) -> list[Row]:
    """Return the samples (seconds, device bytes, host bytes) within the window."""
    begin, end = window
    return [
        _memory_row("measured", when - begin, on_host if host else on_device)
        for when, on_device, on_host in samples
        if begin <= when <= end
    ]


def constant_memory(which: str, num_bytes: int, milliseconds: float) -> list[Row]:
    """Return a level that does not change over the step."""
    return [_memory_row(which, 0.0, num_bytes), _memory_row(which, milliseconds / 1e3, num_bytes)]


def _memory_row(which: str, seconds: float, num_bytes: int) -> Row:
    return {
        "which": which,
        "ms": round(seconds * 1e3, 4),
        "bytes": num_bytes,
        "size": format_bytes(num_bytes),
    }
