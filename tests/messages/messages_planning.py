"""Every message of planning, profiles, sizes, reports and files, with its trigger.

Over 350 lines: one list.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from message_case import Case
from transformers import GPT2Config, ViTConfig

from autohete import planning
from autohete.planning import InfeasibleError, make_plan, plan_for
from autohete.planning.cluster import Cluster
from autohete.planning.gpt2_shape import GPT2Shape
from autohete.planning.hardware import available_host_bytes
from autohete.planning.library import find_machine
from autohete.planning.model_profile import describe_gpt2, describe_model
from autohete.planning.named_model import load_model_config
from autohete.report.content import content_of_sweep
from autohete.report.live import Live
from autohete.report.pictures import save_picture
from autohete.run_file import load_run


def planned() -> Any:
    return plan_for("gpt2", "a100-40", 1, 64, suggest=False)


def profile() -> Any:
    return planned().profile


def profile_file(folder: Path, change: Any = lambda document: None, text: str | None = None) -> Any:
    """Load a saved profile after its document was changed, or another text in its place."""
    path = folder / "autohete_profile.json"
    report = planned()
    planning.save_profile(path, report.profile, report.plan)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document) if text is None else text)
    return planning.load_profile(path)


def run_file(folder: Path, text: str) -> Any:
    path = folder / "autohete_run.json"
    path.write_text(text)
    return load_run(path)


def config_of(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path


def config_file(folder: Path, text: str) -> Any:
    path = folder / "config.json"
    path.write_text(text)
    return plan_for(str(path), "a100-40", 1, 64)


class BranchesOnValues(torch.nn.Module):
    """Cannot run without values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](ids.float()) if ids.sum().item() > 3 else ids


def unit(**fields: Any) -> Any:
    """make_plan() on a profile whose second unit has other fields."""
    changed = profile()
    units = changed.units
    for name, value in fields.items():
        setattr(units[1], name, value)
    changed.units = units
    return make_plan(changed, "4GiB")


def rate(**fields: float) -> Any:
    changed = profile()
    hardware = changed.hardware
    for name, value in fields.items():
        setattr(hardware, name, value)
    changed.hardware = hardware
    return make_plan(changed, "4GiB")


def of_profile(**fields: Any) -> Any:
    changed = profile()
    for name, value in fields.items():
        setattr(changed, name, value)
    return make_plan(changed, "4GiB")


def of_plan(**fields: Any) -> Any:
    report = planned()
    for name, value in fields.items():
        setattr(report.plan, name, value)
    return planning.simulate(report.profile, report.plan)


def placed(index: int, **tiers: Any) -> Any:
    report = planned()
    units = report.plan.units
    for name, value in tiers.items():
        setattr(units[index], name, value)
    report.plan.units = units
    return planning.simulate(report.profile, report.plan)


HOST = planning.Tier.HOST
DEVICE = planning.Tier.DEVICE
RECOMPUTE = planning.ActivationRule.RECOMPUTE
PARSE = planning.parse_bytes

CASES = {
    "devices that machines do not divide": Case(
        lambda f: Cluster(devices=3, machines=2),
        "devices is 3 on 2 machines",
        "the same number on each",
        "give a multiple of the machines",
    ),
    # ---- sizes
    "a size that is no size": Case(
        lambda f: PARSE([1], "gpu_mem"), "[1]", "bytes or a string", "'24GiB'"
    ),
    "a size that is not finite": Case(
        lambda f: PARSE(float("inf"), "gpu_mem"), "inf", "finite number of bytes", "finite number"
    ),
    "a size below nothing": Case(
        lambda f: PARSE(-1, "gpu_mem"), "-1", "between 0 and 2**53", "between 0"
    ),
    "a size without its unit": Case(
        lambda f: PARSE(1.5, "gpu_mem"), "1.5", "expected whole bytes", "'1.5GiB'"
    ),
    "words for a size": Case(
        lambda f: PARSE("plenty", "gpu_mem"), "'plenty'", "a size such as", "'40GB'"
    ),
    "an unknown unit": Case(
        lambda f: PARSE("3 parsec", "gpu_mem"), "'parsec'", "expected one of", "GiB"
    ),
    # ---- plans
    "an unknown strategy": Case(
        lambda f: make_plan(profile(), "4GiB", strategy="x"),
        "'x'",
        "expected one of",
        "zero_offload",
    ),
    "an unknown solver": Case(
        lambda f: make_plan(profile(), "4GiB", solver="x"),
        "'x'",
        "expected 'auto'",
        "'enumeration'",
    ),
    "no time to solve": Case(
        lambda f: make_plan(profile(), "4GiB", seconds=0),
        "seconds is 0",
        "above 0",
        "at most 86400",
    ),
    "a window of none": Case(
        lambda f: make_plan(profile(), "4GiB", window=0),
        "window is 0",
        "a whole number from 1 to 1024",
        "from 1 to 1024",
    ),
    "a plan for no profile": Case(
        lambda f: make_plan((profile(), None), "4GiB"),
        "profile is a tuple",
        "expected a Profile",
        "load_profile() returns one",
    ),
    "a simulation of no plan": Case(
        lambda f: planning.simulate(profile(), None),
        "plan is a NoneType",
        "expected a Plan",
        "make_plan() makes one",
    ),
    "a profile without end": Case(
        lambda f: planning.load_profile("/dev/zero"),
        "/dev/zero has more than",
        "expected an autohete profile",
        "make one with make_plan()",
    ),
    "no plan fits the device": Case(
        lambda f: make_plan(profile(), "1MiB"),
        "gpu_mem is 1.00 MiB",
        "the smallest gpu_mem that fits",
        "raise it",
        InfeasibleError,
    ),
    "no plan fits the host": Case(
        lambda f: make_plan(profile(), "800MiB", "1MiB"),
        "cpu_mem is 1.00 MiB",
        "the smallest cpu_mem that fits",
        "raise it",
        InfeasibleError,
    ),
    "no plan fits, and a smaller batch would": Case(
        lambda f: plan_for("gpt2", "a100-40", 64, 512, gpu_mem="4GiB"),
        "gpu_mem",
        "smallest gpu_mem",
        "fits)",
        InfeasibleError,
    ),
    "a part left out that is none": Case(
        lambda f: planning.simulate(profile(), planned().plan, without=("x",)),
        "'x'",
        "expected of",
        "fifo",
    ),
    # ---- descriptions
    "an unknown GPU": Case(lambda f: find_machine("a100"), "'a100'", "expected one of", "a100-40"),
    "an unknown field of a machine": Case(
        lambda f: find_machine("a100-40", ram=1), "'ram'", "expected of", "host_bytes"
    ),
    "an unknown link": Case(
        lambda f: find_machine("a100-40", pcie=7), "7", "expected 3, 4 or 5", "3, 4 or 5"
    ),
    "an unknown model": Case(
        lambda f: plan_for("9b", "a100-40", 1, 64), "'9b'", "a config.json", "gpt2"
    ),
    "a config.json without a type": Case(
        lambda f: config_file(f, "{}"), "config.json", "model_type", "give one"
    ),
    "an unknown precision": Case(
        lambda f: describe_model(BranchesOnValues(), 1, 8, "int8"),
        "'int8'",
        "expected one of",
        "bf16",
    ),
    "a batch of none": Case(
        lambda f: describe_model(BranchesOnValues(), 0, 8),
        "batch is 0",
        "from 1 to 16777216",
        "whole number",
    ),
    "a model that looks at values": Case(
        lambda f: describe_model(BranchesOnValues(), 1, 8),
        "BranchesOnValues",
        "run on fake tensors",
        "profile it on a device",
    ),
    "a config.json of a kind that there is not": Case(
        lambda f: load_model_config(config_of(f, model_type="zorglub")),
        "'zorglub'",
        "expected one that the installed transformers knows",
        "upgrade transformers",
    ),
    "a config.json with a word for a number": Case(
        lambda f: load_model_config(config_of(f, model_type="gpt2", n_layer="two")),
        "n_layer",
        "expected values that make a gpt2",
        "correct them",
    ),
    "a config.json with fewer layers than none": Case(
        lambda f: load_model_config(config_of(f, model_type="gpt2", n_layer=-3)),
        "with -3 layers",
        "expected at least 0 and at most",
        "10000",
    ),
    "a configuration of a vision model": Case(
        lambda f: describe_model(ViTConfig(), 1, 8),
        "a ViTConfig",
        "the configuration of a language model",
        "give the module itself",
    ),
    "a configuration whose numbers do not fit": Case(
        lambda f: describe_model(GPT2Config(n_layer=1, n_embd=65, n_head=4), 1, 8),
        "GPT2Config",
        "numbers that fit each other",
        "correct them",
    ),
    "autocast on the meta device": Case(
        lambda f: describe_gpt2(GPT2Shape(2, 64, 2, 8), 1, 8, "autocast"),
        "'autocast'",
        "fp32, bf16 or fp16",
        "describe_model()",
    ),
    "no layers to repeat": Case(
        lambda f: describe_gpt2(GPT2Shape(2, 64, 2, 8), 1, 8, "bf16").with_layers(0),
        "count is 0",
        "expected",
        "one kind",
    ),
    "all memory as headroom": Case(
        lambda f: available_host_bytes(1.5), "1.5", "at least 0 and below 1", "below 1"
    ),
    # ---- profiles by hand
    "a unit with negative seconds": Case(
        lambda f: unit(forward_seconds=-1.0),
        "forward_seconds is -1",
        "finite seconds >= 0",
        "profile the model again",
    ),
    "a unit with too many bytes": Case(
        lambda f: unit(activation_bytes=2**60),
        "activation_bytes is",
        "at most 2^53",
        "at most 2^53",
    ),
    "gradients larger than parameters": Case(
        lambda f: unit(grad_bytes=2**50),
        "grad_bytes is",
        "at most param_bytes",
        "one dtype for both",
    ),
    "a rate of nothing": Case(
        lambda f: rate(h2d_bytes_per_second=0.0),
        "h2d_bytes_per_second is 0",
        "a finite rate > 0",
        "measure the machine",
    ),
    "a share above all": Case(
        lambda f: rate(h2d_share_during_d2h=2.0), "is 2", "above 0 and at most 1", "at most 1"
    ),
    "a profile without units": Case(
        lambda f: of_profile(units=[]), "units is empty", "at least one unit", "at least one"
    ),
    "chunks of nothing": Case(
        lambda f: of_profile(chunk_bytes=0), "chunk_bytes is 0", "at least 1", "at least 1"
    ),
    "no passes": Case(
        lambda f: of_profile(gradient_accumulation_steps=0), "is 0", "expected 1 ..", "1 .."
    ),
    "a plan of another model": Case(
        lambda f: of_plan(units=[]), "it has 0 units", "as in the profile", "plan again"
    ),
    "a plan with a window of none": Case(
        lambda f: of_plan(window=0), "window is 0", "1 .. 1024", "1 .. 1024"
    ),
    "a plan with chunks of nothing": Case(
        lambda f: of_plan(chunk_bytes=0), "chunk_bytes is 0", "at least 1", "at least 1"
    ),
    "gradients apart from state": Case(
        lambda f: placed(2, gradients=HOST, optimizer_state=DEVICE),
        "differ",
        "expected the same tier",
        "same tier",
    ),
    "parameters away, state not": Case(
        lambda f: placed(2, parameters=HOST, gradients=DEVICE, optimizer_state=DEVICE),
        "parameters are on the host",
        "expected optimizer_state there too",
        "there too",
    ),
    "recomputing what cannot be": Case(
        lambda f: placed(0, activations=RECOMPUTE),
        "transformer.wte",
        "cannot be recomputed",
        "cannot be recomputed",
    ),
    # ---- files
    "a file that is no profile": Case(
        lambda f: profile_file(f, text="{}"),
        "autohete_profile.json is not",
        "format 'autohete-profile'",
        "make one with make_plan()",
    ),
    "a profile of another version": Case(
        lambda f: profile_file(f, lambda d: d.update(version=99)),
        "version 99",
        "expected 1",
        "make the profile again",
    ),
    "a damaged profile": Case(
        lambda f: profile_file(f, text="{"),
        "autohete_profile.json is damaged",
        "damaged",
        "make the profile again",
    ),
    "a profile with NaN in it": Case(
        lambda f: profile_file(f, text='{"a": NaN}'),
        "NaN",
        "finite number",
        "make the profile again",
    ),
    "a profile that lacks something": Case(
        lambda f: profile_file(f, lambda d: d.pop("plan")),
        "lacks ['plan']",
        "lacks",
        "make the profile again",
    ),
    "a profile with a field of another type": Case(
        lambda f: profile_file(f, lambda d: d["profile"].update(chunk_bytes="x")),
        "'x'",
        "expected int",
        "expected int",
    ),
    "a profile with a number out of range": Case(
        lambda f: profile_file(f, lambda d: d["profile"].update(chunk_bytes=-1)),
        "-1",
        "out of range",
        "out of range",
    ),
    "a profile whose hardware is a list": Case(
        lambda f: profile_file(f, lambda d: d["profile"].update(hardware=[])),
        "is list",
        "expected an object",
        "an object",
    ),
    "a profile whose units are no list": Case(
        lambda f: profile_file(f, lambda d: d["profile"].update(units={})),
        "is dict",
        "expected a list",
        "a list",
    ),
    "a plan with a gap": Case(
        lambda f: profile_file(f, lambda d: d["plan"]["units"][0].update(first=5)),
        "covers units 5",
        "starts at 0",
        "starts at 0",
    ),
    "a plan with an unknown place": Case(
        lambda f: profile_file(f, lambda d: d["plan"]["units"][0].update(parameters="moon")),
        "'moon'",
        "expected one of",
        "host",
    ),
    "a file that is no run": Case(
        lambda f: run_file(f, "{}"),
        "is no autohete run",
        "format 'autohete-run'",
        "model.report().save()",
    ),
    "a damaged run": Case(
        lambda f: run_file(f, "{"), "is damaged", "expected a run", "model.report().save()"
    ),
    "a run of another version": Case(
        lambda f: run_file(f, '{"format": "autohete-run", "version": 7}'),
        "version 7",
        "expected 1",
        "write it again",
    ),
    "a run that lacks something": Case(
        lambda f: run_file(f, '{"format": "autohete-run", "version": 1}'),
        "KeyError",
        "what version 1 holds",
        "write it again",
    ),
    # ---- reports
    "a picture in an unknown format": Case(
        lambda f: save_picture(f / "x.bmp", {}),
        "'x.bmp'",
        "a name that ends in",
        "the ending chooses",
    ),
    "a sweep of which nothing fits": Case(
        lambda f: content_of_sweep("batch", []), "no point", "at least one", "give more memory"
    ),
    "progress over no steps": Case(
        lambda f: Live(total=0), "total is 0", "the number of steps", "1 or more"
    ),
}
