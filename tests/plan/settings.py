"""Settings of the size people train: GPTs in half precision on one GPU with a host."""

from __future__ import annotations

import random

from autohete import _C
from tests.plan.reference import make_profile, make_unit, runs


def random_gpt(rng: random.Random) -> _C.Profile:
    """Layers, width, batch, GEMM rate, link and CPU drawn from the ranges of facts known."""
    layers, width = rng.choice([12, 24, 32, 40, 48]), rng.choice([1024, 2048, 2560, 4096, 5120])
    batch, seq, vocabulary = rng.choice([1, 2, 4, 8]), 1024, 50257
    tokens, rate, link = batch * seq, 10 ** rng.uniform(13.4, 14.4), rng.uniform(10e9, 55e9)

    def unit(
        name: str, kind: str, parameters: int, kept: int, extra: int, flops: float, **fields: object
    ) -> _C.UnitProfile:
        return make_unit(
            name,
            kind,
            num_parameters=parameters,
            param_bytes=2 * parameters,
            grad_bytes=2 * parameters,
            state_bytes=12 * parameters,
            activation_bytes=kept,
            checkpoint_bytes=2 * tokens * width,
            temporary_bytes=extra,
            forward_seconds=flops / rate,
            backward_seconds=2 * flops / rate,
            **fields,
        )

    hidden = tokens * width
    layer_flops = 24 * hidden * width + 4 * hidden * seq
    units = [
        unit(
            "embedding",
            "embedding",
            (vocabulary + seq) * width,
            2 * hidden,
            0,
            10 * hidden,
            can_recompute=False,
        )
    ]
    units += [
        unit(f"h.{i}", "layer", 12 * width * width, 34 * hidden, 8 * hidden, layer_flops)
        for i in range(layers)
    ]
    units += [
        unit(
            "head",
            "head",
            2 * width,
            2 * hidden,
            6 * tokens * vocabulary,
            2 * hidden * vocabulary,
            can_recompute=False,
        )
    ]
    return make_profile(
        units,
        h2d_bytes_per_second=link,
        d2h_bytes_per_second=link * rng.uniform(0.8, 1.1),
        link_latency_seconds=1e-5,
        chunk_bytes=4 << 20,
        cpu_params_per_second=10 ** rng.uniform(8.8, 9.9),
        device_params_per_second=5e10,
        fixed_device_bytes=10**9,
    )


def random_point(profile: _C.Profile, rng: random.Random) -> list[tuple[int, int, int]]:
    """Counts (c, p, o) per run, whatever memory they need."""
    point = []
    for run in runs(profile):
        state = rng.randint(0, len(run))
        parameters = rng.randint(0, state) if rng.random() < 0.6 else 0
        recompute = rng.randint(0, len(run)) if run[0].can_recompute else 0
        point.append((recompute, parameters, state))
    return point
