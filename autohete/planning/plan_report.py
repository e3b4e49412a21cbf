"""plan_for(): does this model fit that GPU, what leaves it, how fast is it, what would help."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from autohete import _C
from autohete.planning.cluster import Cluster, ScalePoint, scale
from autohete.planning.library import Machine, find_machine, profile_on
from autohete.planning.make_plan import Size, make_plan, minimum_gpu_mem
from autohete.planning.model_profile import ModelDescription
from autohete.planning.named_model import built_once, describe, name_of
from autohete.planning.profile_file import plan_to_dict
from autohete.planning.sizes import format_bytes, parse_bytes
from autohete.planning.table import PlanRow, format_plan, plan_rows


@dataclass(frozen=True)
class PlanReport:
    """A plan with what a person asks next."""

    model: str
    description: ModelDescription
    machine: Machine
    profile: _C.Profile
    plan: _C.Plan
    gpu_mem: int
    cpu_mem: int
    strategy: str = "autohete"
    gated: bool = True
    help: dict[str, float] = field(default_factory=dict)
    """What would help -> tokens per second then."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one optimizer step over its time."""
        repeats = self.profile.gradient_accumulation_steps
        return float(repeats * self.description.tokens / self.plan.step_seconds)

    @property
    def model_flops_per_second(self) -> float:
        """FLOPs of forward and backward, recomputation not counted, over the step's time."""
        repeats = self.profile.gradient_accumulation_steps
        return float(repeats * self.description.model_flops / self.plan.step_seconds)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the dense half-precision peak."""
        return self.model_flops_per_second / self.machine.peak_flops

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        return {
            "model": self.model,
            "gpu": self.machine.name,
            "num_parameters": self.description.num_parameters,
            "batch": self.description.batch,
            "seq": self.description.seq,
            "precision": self.description.precision,
            "gpu_mem": self.gpu_mem,
            "cpu_mem": self.cpu_mem,
            "minimum_gpu_mem": minimum_gpu_mem(self.profile, self.cpu_mem),
            "tokens_per_second": self.tokens_per_second,
            "model_tflops": self.model_flops_per_second / 1e12,
            "mfu": self.mfu,
            "lane_seconds": _C.lane_seconds(self.profile, self.plan),
            "would_help": dict(self.help),
            "plan": plan_to_dict(self.plan),
        }

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def _repr_html_(self) -> str:
        from autohete.report.notebook import plan_report_html

        return plan_report_html(self)

    def __str__(self) -> str:
        plan = self.plan
        lines = [
            f"{self.model} ({self.description.num_parameters / 1e9:.2f}B parameters) on "
            f"{self.machine.name}, batch {self.description.batch} x {self.description.seq}, "
            f"{self.description.precision}",
            "",
            format_plan(plan, self.profile),
            "",
            *(reason_of(row, self.profile) for row in plan_rows(plan, self.profile)),
            "",
            f"device memory {format_bytes(plan.device_peak_bytes)} of {format_bytes(self.gpu_mem)}"
            f", host memory {format_bytes(plan.host_bytes)} of {format_bytes(self.cpu_mem)}",
            f"{plan.step_seconds:.3f} s a step, {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.model_flops_per_second / 1e12:.1f} TFLOPS, MFU {self.mfu:.1%}; "
            f"the {plan.binding_lane} lane binds",
        ]
        lines += [
            f"{what}: {rate:,.0f} tokens/s ({rate / self.tokens_per_second - 1:+.0%})"
            for what, rate in self.help.items()
        ]
        return "\n".join(lines)


def reason_of(row: PlanRow, profile: _C.Profile) -> str:
    """Say why a run of units is placed as it is."""
    unit = profile.units[row.first]
    count = row.count
    parts = []
    if row.checkpointed:
        freed = count * (unit.activation_bytes - unit.checkpoint_bytes)
        cost = count * unit.forward_seconds
        parts.append(f"recomputing frees {format_bytes(freed)} for {cost * 1e3:.1f} ms")
    if row.optimizer == "host":
        freed = count * (unit.state_bytes + unit.grad_bytes)
        parts.append(f"optimizer state on the host frees {format_bytes(freed)}")
    if row.parameters == "host":
        parts.append(f"parameters on the host free {format_bytes(count * unit.param_bytes)}")
    return f"{row.names}: " + ("; ".join(parts) or "stays whole on the device, there is room")


def plan_for(
    model: str | Any,
    gpu: str | Machine,
    batch: int,
    seq: int,
    precision: str = "bf16",
    *,
    gpu_mem: Size | None = None,
    cpu_mem: Size | None = None,
    strategy: str = "autohete",
    gated: bool = True,
    gradient_accumulation_steps: int = 1,
    suggest: bool = True,
    **overrides: Any,
) -> PlanReport:
    """Plan a model for a machine one need not have.

    Args:
        model: a name of `PRESETS`, the path of a config.json, a configuration or a module; or one
            of these through built_once(), to ask several times.
        gpu: a name of `MACHINES`, or a Machine.
        gpu_mem: device bytes to use; None for all but context and slack.
        suggest: also plan with more of each resource, to say what would help.
        overrides: fields of Machine, and `pcie`.

    Raises:
        InfeasibleError: it does not fit; with `suggest` it names a batch that would.
    """
    machine = find_machine(gpu, **overrides) if isinstance(gpu, str) else gpu
    model = built_once(model)
    description = describe(model, batch, seq, precision)
    profile = profile_on(description, machine, gradient_accumulation_steps)
    device = machine.usable_bytes if gpu_mem is None else parse_bytes(gpu_mem, "gpu_mem")
    host = machine.host_bytes if cpu_mem is None else parse_bytes(cpu_mem, "cpu_mem")
    wanted = PlanReport(
        name_of(model), description, machine, profile, _C.Plan(), device, host, strategy, gated
    )
    try:
        report = plan_report(wanted)
    except _C.InfeasibleError as error:
        if suggest:
            raise _with_batch_that_fits(error, wanted, model) from None
        raise
    return replace(report, help=_what_helps(report, model)) if suggest else report


def scale_for(
    model: str | Any,
    gpu: str | Machine,
    batch: int,
    seq: int,
    cluster: Cluster,
    precision: str = "bf16",
    *,
    gpu_mem: Size | None = None,
    cpu_mem: Size | None = None,
    strategy: str = "autohete",
    gated: bool = True,
    **overrides: Any,
) -> list[ScalePoint]:
    """Plan a model for many devices that one need not have; see plan_for() and cluster.scale().

    Args:
        batch: of each device.
        gpu: each device and its machine's host; what of the host is per device, they share.
    """
    machine = find_machine(gpu, **overrides) if isinstance(gpu, str) else gpu
    profile = profile_on(describe(model, batch, seq, precision), machine)
    device = machine.usable_bytes if gpu_mem is None else gpu_mem
    host = machine.host_bytes if cpu_mem is None else cpu_mem
    return scale(profile, cluster, device, host, strategy=strategy, gated=gated)


def plan_report(wanted: PlanReport) -> PlanReport:
    """Return the report with the plan that its other fields ask for."""
    plan = make_plan(
        wanted.profile, wanted.gpu_mem, wanted.cpu_mem, wanted.strategy, gated=wanted.gated
    )
    return replace(wanted, plan=plan, help={})


def _what_helps(report: PlanReport, model: str | Any) -> dict[str, float]:
    """Tokens per second with more of one resource or another batch, where 2 % better or more."""
    profile = report.profile
    faster_cpu, faster_link = (
        _C.HardwareProfile(profile.hardware),
        _C.HardwareProfile(profile.hardware),
    )
    faster_cpu.cpu_params_per_second *= 2
    faster_link.h2d_bytes_per_second *= 2
    faster_link.d2h_bytes_per_second *= 2
    trials = {
        "a quarter more device memory": replace(report, gpu_mem=report.gpu_mem * 5 // 4),
        "twice the host memory": replace(report, cpu_mem=report.cpu_mem * 2),
        "a CPU AdamW twice as fast": replace(report, profile=_with_hardware(profile, faster_cpu)),
        "a link twice as fast": replace(report, profile=_with_hardware(profile, faster_link)),
    }
    batch = report.description.batch
    for other in {max(1, batch // 2), 2 * batch} - {batch}:
        trials[f"batch {other}"] = _with_batch(report, model, other)
    rates = {}
    for what, trial in trials.items():
        try:
            rates[what] = plan_report(trial).tokens_per_second
        except _C.InfeasibleError:
            continue  # a larger batch
    return {what: rate for what, rate in rates.items() if rate > 1.02 * report.tokens_per_second}


def _with_batch(report: PlanReport, model: str | Any, batch: int) -> PlanReport:
    description = describe(model, batch, report.description.seq, report.description.precision)
    repeats = report.profile.gradient_accumulation_steps
    profile = profile_on(description, report.machine, repeats)
    return replace(report, description=description, profile=profile)


def _with_batch_that_fits(
    error: _C.InfeasibleError, wanted: PlanReport, model: str | Any
) -> _C.InfeasibleError:
    """The same error, with the largest batch that fits in its message (powers of two)."""
    batch = wanted.description.batch // 2
    while batch >= 1:
        try:
            plan_report(_with_batch(wanted, model, batch))
        except _C.InfeasibleError:
            batch //= 2
            continue
        text = f"{error} (batch {batch} fits)"
        break
    else:
        text = f"{error} (not even batch 1 fits)"
    found = _C.InfeasibleError(text)
    vars(found).update(vars(error))
    return found


def _with_hardware(profile: _C.Profile, hardware: _C.HardwareProfile) -> _C.Profile:
    out = _C.Profile(profile)
    out.hardware = hardware
    return out
