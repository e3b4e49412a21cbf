"""Oracles for planning, written straight from the formulas, slowly and plainly."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch  # noqa: F401

from autohete import _C


def make_unit(name: str, kind: str, **fields: object) -> _C.UnitProfile:
    unit = _C.UnitProfile()
    unit.name, unit.kind = name, kind
    for field, value in fields.items():
        setattr(unit, field, value)
    return unit


def make_profile(units: list[_C.UnitProfile], **fields: object) -> _C.Profile:
    """A profile with rates of 1 unless given: seconds are then bytes or parameters."""
    profile, hardware = _C.Profile(), _C.HardwareProfile()
    rates = {
        "h2d_bytes_per_second": 1.0,
        "d2h_bytes_per_second": 1.0,
        "cpu_params_per_second": 1.0,
        "device_params_per_second": 1e15,
    }
    profile.chunk_bytes = 1 << 40
    for field, value in {**rates, **fields}.items():
        setattr(hardware if hasattr(hardware, field) else profile, field, value)
    profile.units, profile.hardware = units, hardware
    return profile


def layers(n: int, kind: str = "layer", **fields: object) -> list[_C.UnitProfile]:
    return [make_unit(f"{kind}.{i}", kind, **fields) for i in range(n)]


def random_profile(rng: random.Random, max_segments: int = 3, max_count: int = 5) -> _C.Profile:
    units: list[_C.UnitProfile] = []
    for g in range(rng.randint(1, max_segments)):
        parameters = rng.randint(1, 60) * 1000
        kept = rng.randint(1, 400) * 1000
        units += layers(
            rng.choice([1, rng.randint(1, max_count)]),
            f"kind{g}",
            num_parameters=parameters,
            param_bytes=4 * parameters,
            grad_bytes=rng.choice([4, 4, 4, 2, 0]) * parameters,
            state_bytes=8 * parameters,
            master_bytes=rng.choice([0, 4]) * parameters,
            activation_bytes=kept,
            checkpoint_bytes=rng.choice([kept // 10, kept // 3, kept]),
            temporary_bytes=rng.randint(0, 100) * 1000,
            forward_seconds=rng.uniform(0.001, 0.1),
            backward_seconds=rng.uniform(0.002, 0.2),
            can_offload_parameters=rng.random() < 0.8,
            can_recompute=rng.random() < 0.8,
            grad_tensors=1 + parameters // 1000 % 13,
            recompute_seconds=(parameters // 1000 % 3) * 0.02,
        )
    return make_profile(
        units,
        h2d_bytes_per_second=10 ** rng.uniform(6, 7.5),
        d2h_bytes_per_second=10 ** rng.uniform(6, 7.5),
        link_latency_seconds=rng.choice([0.0, 1e-4]),
        chunk_bytes=65536,
        cpu_params_per_second=10 ** rng.uniform(5, 6.5),
        device_params_per_second=10 ** rng.uniform(6, 8),
        fixed_device_bytes=rng.randint(0, 10**5),
        fixed_host_bytes=rng.randint(0, 10**5),
        outside_seconds=rng.choice([0.0, rng.uniform(0, 0.1)]),
        loop_seconds=rng.choice([0.0, rng.uniform(0, 0.1)]),
        gradients_persist=rng.random() < 0.5,
        gradient_accumulation_steps=rng.choice([1, 1, 1, 3]),
    )


@dataclass
class Seconds:
    f: float
    b: float
    H: float
    Hu: float
    D: float
    U: float
    A: float


def seconds_of(profile: _C.Profile, unit: _C.UnitProfile) -> Seconds:
    hardware = profile.hardware

    def copy(size: int, rate: float, tensors: int = 1) -> float:
        copies = max(-(-size // profile.chunk_bytes), tensors) if size else 0
        return size / rate + copies * hardware.link_latency_seconds

    trained = unit.num_parameters * unit.grad_bytes / unit.param_bytes if unit.param_bytes else 0
    return Seconds(
        f=unit.forward_seconds,
        b=unit.backward_seconds,
        H=copy(unit.param_bytes, hardware.h2d_bytes_per_second),
        Hu=copy(unit.grad_bytes, hardware.h2d_bytes_per_second),
        D=copy(unit.grad_bytes, hardware.d2h_bytes_per_second, unit.grad_tensors),
        U=trained / hardware.cpu_params_per_second,
        A=trained / hardware.device_params_per_second,
    )


def runs(profile: _C.Profile) -> list[list[_C.UnitProfile]]:
    return [list(run) for _, run in itertools.groupby(profile.units, key=lambda unit: unit.kind)]


def walk_peak(profile: _C.Profile, plan: _C.Plan) -> int:
    """The device's peak, unit by unit."""
    always, visits = profile.fixed_device_bytes, []
    pairs = list(zip(profile.units, plan.units, strict=False))
    on_host = _C.Tier.HOST
    always += sum(u.param_bytes for u, p in pairs if p.parameters != on_host)
    always += sum(u.state_bytes for u, p in pairs if p.optimizer_state != on_host)
    offloaded = sorted(u.param_bytes for u, p in pairs if p.parameters == on_host)
    always += sum(offloaded[-plan.window :])

    def saved(u: _C.UnitProfile, p: _C.UnitPlan) -> int:
        again = p.activations == _C.ActivationRule.RECOMPUTE
        return u.checkpoint_bytes if again else u.activation_bytes

    for i, (unit, placed) in enumerate(pairs):
        now = sum(saved(*pair) for pair in pairs[: i + 1]) + unit.temporary_bytes
        if placed.activations == _C.ActivationRule.RECOMPUTE:
            now += max(unit.activation_bytes - unit.checkpoint_bytes, 0)
        alive = pairs if profile.gradients_persist else pairs[i:]
        now += sum(u.grad_bytes for u, p in alive if p.gradients != on_host)
        # Those of the micro-batch before may still leave while any unit runs.
        before = pairs[:i] if profile.gradient_accumulation_steps > 1 else []
        others = sorted(u.grad_bytes for u, p in before + pairs[i + 1 :] if p.gradients == on_host)
        now += sum(others[-2:]) + (unit.grad_bytes if placed.gradients == on_host else 0)
        visits.append(now)
    return always + max(visits)


Segments = list[tuple[list[_C.UnitProfile], int]]  # (the layers of one period, repeats)


def plain_segments(profile: _C.Profile) -> Segments:
    return [([run[0]], len(run)) for run in runs(profile)]


def _sum(times: list[Seconds], share: float = 1) -> Seconds:
    names = Seconds.__dataclass_fields__
    return Seconds(**{name: share * sum(getattr(t, name) for t in times) for name in names})


def _recompute_seconds(unit: _C.UnitProfile) -> float:
    return unit.recompute_seconds or unit.forward_seconds


def _pays(unit: _C.UnitProfile) -> bool:
    return unit.can_recompute and unit.checkpoint_bytes < unit.activation_bytes


def formula_seconds(
    profile: _C.Profile,
    counts: list[tuple[int, int, int]],
    *,
    window: int = 2,
    gated: bool = True,
    segments: Segments | None = None,
) -> float:
    """T of the formulation for counts (c, p, o) per run of identical units."""
    segments = plain_segments(profile) if segments is None else segments
    every = range(len(segments))
    times = [[seconds_of(profile, unit) for unit in period] for period, _ in segments]
    s = [_sum(t) for t in times]  # of a super-layer
    one = [_sum(t, 1 / len(t)) for t in times]  # of a layer in it
    again = [sum(_recompute_seconds(u) for u in period if _pays(u)) for period, _ in segments]
    n = [count for _, count in segments]
    m = profile.gradient_accumulation_steps
    F, B = [], []
    for g in every:
        c, p, o = counts[g]
        stream = p * s[g].H - window * one[g].H
        F.append(max(0, n[g] * s[g].f, stream, (n[g] - o) * s[g].f + stream))
        loss = profile.outside_seconds if g == len(segments) - 1 else 0
        run = n[g] * s[g].b + loss
        B.append(max(0, run + c * again[g], stream, run - o * s[g].b + stream))
        if s[g].b < s[g].D:
            leaving = (n[g] - o) * s[g].b + o * s[g].D + one[g].b - 2 * one[g].D
            leaving += loss
            B[g] = max(B[g], leaving, leaving + (c - o) * again[g])
    bounds = [
        m * (sum(F) + sum(B))
        + sum((n[g] - counts[g][2]) * s[g].A for g in every)
        + profile.loop_seconds,
        sum(counts[g][2] * s[g].U for g in every),
        m * sum(counts[g][2] * s[g].D for g in every),
        sum(
            (counts[g][2] - counts[g][1]) * s[g].Hu
            + 2 * m * counts[g][1] * s[g].H
            - (window * one[g].H if counts[g][1] else 0)
            for g in every
        ),
    ]
    extra = (m - 1) * (sum(F) + sum(B))
    for g in every:
        c, p, o = counts[g]
        t, k = s[g], one[g]
        if t.U == 0:
            continue
        later = sum(F[h] + B[h] for h in every if h > g)
        later_forward = sum(F[h] for h in every if h > g)
        x = max(0, c + o - n[g])
        y = 1 if o else 0

        def queue(what: str, upto: int) -> float:
            return sum(counts[h][2] * getattr(s[h], what) for h in range(upto))

        if gated:
            start = extra + sum(B) + later_forward
            for what, other in (("U", k.Hu), ("Hu", k.U)):
                bounds.append(start + o * t.f + queue(what, g) + y * (k.U + k.Hu))
                bounds.append(start + y * k.f + queue(what, g + 1) + y * other)
            bounds.append(extra + later + o * (t.f + t.b) + y * (k.D + k.U + k.Hu))
            for h in every:
                alone = n[0] * len(times[0]) == 1
                if g == 0 and alone and h > 0 and one[h].U > t.D:
                    both = one[h].U * (y + (1 if counts[h][2] else 0) - 1)
                    bounds.append(start + o * t.f + y * (t.U + t.Hu) + both)
            bounds.append(extra + later + y * (k.f + k.b) + queue("D", g + 1) + y * (k.U + k.Hu))
        else:
            start = extra + later
            loop = y * (k.D + k.U + k.Hu)
            for what, other in (("U", k.Hu), ("Hu", k.U)):
                bounds.append(start + o * (t.f + t.b) + x * again[g] + queue(what, g) + loop)
                bounds.append(start + y * (k.f + k.b) + queue(what, g + 1) + y * (k.D + other))
            taken = extra + sum(B) + later_forward
            bounds.append(taken + o * t.f + queue("Hu", g) + y * k.Hu)
            bounds.append(taken + y * k.f + queue("Hu", g + 1))
            bounds.append(start + 2 * (p * t.H - window * k.H) + queue("U", g) + loop)
    return max(0, *bounds)


def all_counts(profile: _C.Profile) -> list[list[tuple[int, int, int]]]:
    """Every choice of counts that the units allow."""
    choices = []
    for run in runs(profile):
        n, unit = len(run), run[0]
        cs = n if unit.can_recompute and unit.checkpoint_bytes < unit.activation_bytes else 0
        ps = n if unit.can_offload_parameters else 0
        choices.append(
            [(c, p, o) for c in range(cs + 1) for o in range(n + 1) for p in range(min(o, ps) + 1)]
        )
    return [list(point) for point in itertools.product(*choices)]


def as_counts(point: list[tuple[int, int, int]]) -> list[_C.SegmentCounts]:
    return [_C.SegmentCounts(*counts) for counts in point]
