"""The tables of the paper (arXiv 2503.01890) beside what this simulator gives for one machine.

One set of rates and one batch per model size serve every cell. They are fitted on the 2B and 7B
rows alone (`benchmarks/paper_fit.py`); the 13B row and the four-GPU ratios are predicted. Cells
that cannot agree are marked, with the reason, and take no part in the fit.

Of the systems it is assumed that
  - the other three recompute every layer, as their authors run them (PatrickStar's
    run_transformers.sh, StrongHold's sc22-gpt-sh.sh, DeepSpeed's tutorial of ZeRO-Offload); what
    to recompute is a decision of AutoHete alone;
  - the model is Megatron-LM's GPT, which StrongHold's code is made of: its activation is fused and
    saves its input alone (`bias_gelu_fusion` is on unless turned off, and the script does not);
  - AutoHete starts updates as gradients arrive, and their uploads as they end;
  - four GPUs are the four ranks of `autohete plan --devices 4`, with all its defaults.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from autohete import _C
from autohete.planning.cluster import Cluster, profile_of_rank
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.library import Machine, find_machine, profile_on
from autohete.planning.model_profile import ModelDescription, describe_gpt2
from autohete.planning.named_model import PRESETS
from autohete.planning.solve import solve
from autohete.planning.strategies import plan_strategy

SYSTEMS = ("zero_offload", "patrickstar", "stronghold", "autohete")
MODELS = ("2b", "7b", "13b")
FITTED_MODELS = ("2b", "7b")
SEQ = 1024
WITHIN = 1.25
"""A cell agrees when the larger of the two figures is at most this times the smaller."""

OUT_OF_MEMORY = 0.0
TFLOPS = {  # one A100-40
    "2b": {"zero_offload": 42.0, "patrickstar": 51.0, "stronghold": 58.0, "autohete": 68.0},
    "7b": {
        "zero_offload": OUT_OF_MEMORY,
        "patrickstar": 32.0,
        "stronghold": 39.0,
        "autohete": 52.0,
    },
    "13b": {"patrickstar": OUT_OF_MEMORY, "stronghold": 21.0, "autohete": 34.0},
}
FOUR_GPUS = {4: (18.0, 29.0), 16: (52.0, 89.0), 64: (134.0, 221.0)}
"""10B on four A100-40: global batch -> samples per second before, and with AutoHete."""

ONE_GPU = Cluster(1)
CLUSTER = Cluster(4)
"""The paper's four GPUs on one machine, as any four are taken here: nothing is chosen for them."""

KNOWN_MISMATCHES = {
    ("7b", "zero_offload"): "half parameters (13 GiB) and a batch of this size fit 40 GB",
    ("13b", "patrickstar"): "it keeps no more on the device than StrongHold, which passes",
}


@dataclass(frozen=True)
class Fit:
    """What the fit may choose. The rest of the machine is the library's A100-40."""

    layer_flops: float
    """Reached in every layer."""
    link_bytes_per_second: float
    """Each direction alone; both together share it as in the library."""
    cpu_params_per_second: float
    batch_2b: int
    batch_7b: int

    @property
    def batches(self) -> dict[str, int]:
        """Batch per model; the 13B has as many tokens times parameters as the 7B, rounded."""
        larger = self.batch_7b * description("7b", 1).num_parameters
        predicted = round(larger / description("13b", 1).num_parameters)
        return {"2b": self.batch_2b, "7b": self.batch_7b, "13b": max(1, predicted)}

    @property
    def machine(self) -> Machine:
        """The A100-40 with these rates."""
        return find_machine(
            "a100-40",
            wide_flops=self.layer_flops,
            narrow_flops=self.layer_flops,
            h2d_bytes_per_second=self.link_bytes_per_second,
            d2h_bytes_per_second=self.link_bytes_per_second,
            cpu_params_per_second=self.cpu_params_per_second,
        )


BOUNDS = {
    # What hardware of this kind has been seen to reach; docs/planning.md says what they decide.
    "layer_flops": (40e12, 200e12),
    "link_bytes_per_second": (11e9, 25.5e9),
    "cpu_params_per_second": (1e9, 5.8e9),
}
FITTED = Fit(73.69e12, 12.81e9, 5.8e9, batch_2b=5, batch_7b=2)


@dataclass(frozen=True)
class Cell:
    """One figure of the paper and ours; OUT_OF_MEMORY where it does not fit."""

    row: str
    column: str
    paper: float
    simulated: float
    fitted: bool

    @property
    def is_number(self) -> bool:
        """Both are numbers, so that they can be compared."""
        return self.paper > 0 and self.simulated > 0

    @property
    def factor(self) -> float:
        """Simulated over the paper's."""
        return self.simulated / self.paper

    @property
    def agrees(self) -> bool:
        """Both out of memory, or within a factor of `WITHIN`."""
        if not self.is_number:
            return self.paper == self.simulated
        return max(self.factor, 1 / self.factor) <= WITHIN


def single_gpu_cells(fit: Fit = FITTED, models: tuple[str, ...] = MODELS) -> list[Cell]:
    """Return the single-GPU table's cells, in TFLOPS of forward and backward (no recompute)."""
    cells = []
    for model in models:
        batch = fit.batches[model]
        for system, paper in TFLOPS[model].items():
            rate = samples_per_second(model, batch, system, fit)
            simulated = rate * description(model, batch).model_flops / batch / 1e12
            cells.append(Cell(model, system, paper, simulated, model in FITTED_MODELS))
    return cells


def samples_per_second(
    model: str,
    batch: int,
    system: str,
    fit: Fit = FITTED,
    *,
    gpu_mem: int | None = None,
    cluster: Cluster = ONE_GPU,
) -> float:
    """Return the simulated rate of all devices at a global batch; OUT_OF_MEMORY if nothing fits."""
    machine = fit.machine
    alone = profile_on(description(model, batch // cluster.devices), machine)
    budgets = _C.Budgets(
        machine.usable_bytes if gpu_mem is None else gpu_mem,
        machine.host_bytes // cluster.devices_per_machine,
    )
    seconds = step_seconds(profile_of_rank(alone, cluster), system, budgets)
    return batch / seconds if math.isfinite(seconds) else OUT_OF_MEMORY


def step_seconds(
    profile: _C.Profile,
    system: str,
    budgets: _C.Budgets,
    *,
    recompute: tuple[bool, ...] = (True,),
) -> float:
    """Return the seconds of a system's step; inf where nothing fits.

    Args:
        recompute: of the other systems, see plan_strategy().
    """
    # Clipping by the global norm, or a step() that may not come, would not allow either.
    options = _C.PlannerOptions(gated=False, early_uploads=True)
    try:
        if system == "autohete":
            return solve(profile, budgets, options).step_seconds
        return plan_strategy(system, profile, budgets, options, recompute=recompute).step_seconds
    except _C.InfeasibleError:
        return math.inf


def four_gpu_cells(fit: Fit = FITTED) -> list[Cell]:
    """Return the four-GPU ratios: AutoHete over PatrickStar at each global batch.

    The paper does not name what it starts from. Its three ratios average 1.66; PatrickStar is the
    only system whose stated mean on four GPUs (1.65) is that.
    """
    cells = []
    for batch, (before, after) in FOUR_GPUS.items():
        ours, other = (
            samples_per_second("10b", batch, system, fit, cluster=CLUSTER)
            for system in ("autohete", "patrickstar")
        )
        ratio = ours / other if other > 0 else OUT_OF_MEMORY
        cells.append(Cell(f"batch {batch}", "ratio", after / before, ratio, fitted=False))
    return cells


def rms_error(cells: list[Cell]) -> float:
    """Root mean square of the relative errors (logarithms) of the cells that are numbers."""
    errors = [math.log(cell.factor) for cell in cells if cell.is_number]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


@cache
def description(model: str, batch: int) -> ModelDescription:
    """The paper's GPT of this size."""
    layers, width, heads = PRESETS[model]
    shape = GPT2Shape(2, width, heads, SEQ, fused_gelu=True)
    return describe_gpt2(shape, batch, SEQ, "bf16").with_layers(layers)
