"""Known machines: a GPU, its link and a typical host, to plan for what one has not got.

Each number carries its source: [R] read in the vendor's or a measurement's own publication,
[S] read in a summary, [I] computed here, [M] recalled and to be verified. All can be overridden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from autohete import _C
from autohete.planning.model_profile import (
    ModelDescription,
    UnitDescription,
    describe_model,
)
from autohete.units import Layers

GB = 10**9


@dataclass(frozen=True)
class Machine:
    """One GPU and its host. Rates per second."""

    name: str
    memory_bytes: int
    peak_flops: float
    """Dense half-precision tensor-core peak, for MFU."""
    wide_flops: float
    """Reached in transformer layers of width 4096 and more, attention included."""
    narrow_flops: float
    """The same at width 2560 and less."""
    memory_bytes_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    device_params_per_second: float
    """AdamW on the GPU."""
    host_bytes: int = 256 * GB
    cpu_params_per_second: float = 1.5e9
    """CPU AdamW; the default is what DeepSpeed's kernel reaches on two-socket hosts [R]."""
    h2d_share_during_d2h: float = 1.0
    d2h_share_during_h2d: float = 1.0
    link_latency_seconds: float = 9e-6
    """Per chunk: a pinned copy takes 8-10 us plus its bytes [I]."""
    context_bytes: int = 800 * 10**6
    """CUDA context and cuBLAS workspaces [M]."""
    slack: float = 0.05
    """Share of the memory left to the allocator's fragmentation; 5 % at least is advised [S]."""
    sources: str = ""

    @property
    def usable_bytes(self) -> int:
        """What a plan may use: memory without context and slack."""
        return int(self.memory_bytes * (1 - self.slack)) - self.context_bytes


_PCIE = {
    # One direction and, for 4, both at once: nvbandwidth's README and its issues 11 and 53 [R];
    # 3: about 12 GB/s on a V100 [R]; 5: 55 GB/s by copy engine [M].
    3: {"h2d_bytes_per_second": 12e9, "d2h_bytes_per_second": 12e9},
    4: {
        "h2d_bytes_per_second": 25.5e9,
        "d2h_bytes_per_second": 25.5e9,
        "h2d_share_during_d2h": 0.6,
        "d2h_share_during_h2d": 0.95,
    },
    5: {
        "h2d_bytes_per_second": 55e9,
        "d2h_bytes_per_second": 55e9,
        "h2d_share_during_d2h": 0.8,
        "d2h_share_during_h2d": 0.95,
    },
}


def _machine(
    name: str,
    memory_gb: float,
    peak: float,
    wide: float,
    narrow: float,
    hbm: float,
    pcie: int,
    host_gb: int,
    cpu: float,
    sources: str,
) -> Machine:
    # AdamW on an A100 runs at 50e9 parameters a second [R, Elixir]; it is bound by memory, so
    # others scale with bandwidth [I].
    return Machine(
        name=name,
        memory_bytes=int(memory_gb * 2**30),
        peak_flops=peak * 1e12,
        wide_flops=wide * 1e12,
        narrow_flops=narrow * 1e12,
        memory_bytes_per_second=hbm * 1e9,
        device_params_per_second=50e9 * hbm / 1555,
        host_bytes=host_gb * GB,
        cpu_params_per_second=cpu,
        sources=sources,
        **_PCIE[pcie],  # type: ignore[arg-type]
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _machine(
            "a100-40",
            40,
            312,
            189,
            153,
            1555,
            4,
            440,
            1.5e9,
            "peak: data sheet [R]; reached: 0.9 of llm-foundry's 210 and 170 TFLOPS [R]; HBM "
            "[M]; host: EPYC 7713, 440 GB as in arXiv 2503.01890 [R]",
        ),
        _machine(
            "a100-80",
            80,
            312,
            195,
            165,
            2000,
            4,
            512,
            1.5e9,
            "peak [R]; reached: ml_dataflow's 193-195 at 8B [R]; HBM [M]",
        ),
        _machine(
            "h100",
            80,
            989,
            550,
            400,
            3350,
            5,
            1024,
            3e9,
            "peak, HBM: data sheet [R]; reached: llm-foundry 552-556 hardware TFLOPS at "
            "13B-30B and 401 at 1B [R]",
        ),
        _machine(
            "h200",
            141,
            989,
            550,
            400,
            4800,
            5,
            1536,
            3e9,
            "the H100's die with 141 GB at 4.8 TB/s [R]",
        ),
        _machine(
            "v100-32",
            32,
            125,
            50,
            45,
            900,
            3,
            256,
            1.5e9,
            "peak, HBM [M]; reached: 40-50 with offload, ZeRO-Offload's abstract [R]",
        ),
        _machine(
            "rtx3090",
            24,
            71,
            60,
            50,
            936,
            4,
            128,
            1.5e9,
            "peak with fp32 accumulation [R]; HBM [M]; reached: ml_dataflow 8B 60 [R]",
        ),
        _machine(
            "rtx4090",
            24,
            165,
            150,
            120,
            1008,
            4,
            128,
            1.5e9,
            "peak, HBM [M]; reached: Fuyou 156, RoundPipe 151 [R]",
        ),
        _machine(
            "rtx5090",
            32,
            209.5,
            165,
            140,
            1792,
            5,
            128,
            2.4e9,
            "peak [R]; HBM [R]; reached: ml_dataflow 15B 159-165 [R]; CPU: DDR5 roofline [I]",
        ),
    )
}


def known_name(name: str) -> str:
    """Return the name of a machine in `MACHINES`, however it is written.

    >>> known_name("A100-40"), known_name("RTX 4090"), known_name("v100_32")
    ('a100-40', 'rtx4090', 'v100-32')

    Raises:
        ValueError: it is not known.
    """
    plain = str(name).lower().replace(" ", "").replace("_", "-")
    if plain not in MACHINES:
        raise ValueError(f"gpu is {name!r}, expected one of {', '.join(MACHINES)}")
    return plain


def find_machine(name: str, *, pcie: int | None = None, **overrides: float) -> Machine:
    """Return a known machine, with fields replaced.

    Args:
        pcie: 3, 4 or 5: the link of that generation instead of the machine's.
        overrides: fields of Machine.

    >>> find_machine("a100-40", cpu_params_per_second=2.5e9).cpu_params_per_second
    2500000000.0
    """
    name = known_name(name)
    known = {f.name for f in fields(Machine)} - {"name", "sources"}
    unknown = set(overrides) - known
    if unknown:
        raise ValueError(
            f"machine has no {sorted(unknown)}, expected of {', '.join(sorted(known))}"
        )
    if pcie is not None and pcie not in _PCIE:
        raise ValueError(f"pcie is {pcie!r}, expected 3, 4 or 5")
    link = {} if pcie is None else _PCIE[pcie]
    return replace(MACHINES[name], **{**link, **overrides})  # type: ignore[arg-type]


def profile_on(
    description: ModelDescription, machine: Machine, gradient_accumulation_steps: int = 1
) -> _C.Profile:
    """Return the profile of a described model on a machine, times computed from its rates."""
    profile = _C.Profile()
    profile.units = [_unit_on(unit, description, machine) for unit in description.units]
    hardware = _C.HardwareProfile()
    for field in (
        "h2d_bytes_per_second",
        "d2h_bytes_per_second",
        "link_latency_seconds",
        "cpu_params_per_second",
        "device_params_per_second",
        "h2d_share_during_d2h",
        "d2h_share_during_h2d",
    ):
        setattr(hardware, field, getattr(machine, field))
    profile.hardware = hardware
    profile.fixed_device_bytes = description.fixed_device_bytes
    profile.gradient_accumulation_steps = gradient_accumulation_steps
    _C.validate_profile(profile)
    return profile


def profile_model(
    model: Any,
    batch: int,
    seq: int,
    precision: str = "bf16",
    *,
    gpu: str | Machine = "a100-40",
    gradient_accumulation_steps: int = 1,
    layers: Layers = None,
) -> _C.Profile:
    """Return the profile of a model or Hugging Face configuration on a known machine.

    Nothing is allocated and nothing measured; see describe_model() for the arguments.
    """
    machine = find_machine(gpu) if isinstance(gpu, str) else gpu
    description = describe_model(model, batch, seq, precision, layers=layers)
    return profile_on(description, machine, gradient_accumulation_steps)


def _unit_on(
    unit: UnitDescription, description: ModelDescription, machine: Machine
) -> _C.UnitProfile:
    out = _C.UnitProfile()
    for field in (
        "name",
        "kind",
        "num_parameters",
        "param_bytes",
        "grad_bytes",
        "grad_tensors",
        "largest_grad_tensor_bytes",
        "state_bytes",
        "master_bytes",
        "activation_bytes",
        "checkpoint_bytes",
        "temporary_bytes",
    ):
        setattr(out, field, getattr(unit, field))
    out.can_recompute, out.can_offload_parameters = unit.is_layer, not unit.is_container
    flops = _reached_flops(unit, description, machine)
    bandwidth = machine.memory_bytes_per_second
    # The slower of arithmetic and memory traffic (the roofline of one unit as a whole).
    out.forward_seconds = max(unit.forward_flops / flops, unit.forward_traffic_bytes / bandwidth)
    out.backward_seconds = max(unit.backward_flops / flops, unit.backward_traffic_bytes / bandwidth)
    return out


def _reached_flops(unit: UnitDescription, description: ModelDescription, machine: Machine) -> float:
    """Between the narrow and the wide rate, by the width of the unit's input."""
    item = 4 if description.precision in ("fp32", "autocast") else 2
    inputs = unit.checkpoint_bytes - unit.half_copy_bytes
    width = inputs / (description.tokens * item)
    share = min(1.0, max(0.0, (width - 2560) / (4096 - 2560)))
    reached = machine.narrow_flops + share * (machine.wide_flops - machine.narrow_flops)
    # Without half precision tensor cores run at half the rate (tf32) [I].
    return reached / (2 if description.precision == "fp32" else 1)
