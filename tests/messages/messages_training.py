"""Every message of wrapping, training, checkpoints and the Trainer, with its trigger.

Over 350 lines: one list.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from message_case import Case
from models import batch, make_gpt
from oracle import adamw, forced_plan, plain_loop
from torch import nn

from autohete import CPUSGD, AutoHeteWrapper, CPUAdamW, InfeasibleError, _native
from autohete.demo.gpt import GPTConfig
from autohete.demo.training import DemoOptions
from autohete.integrations.transformers import AutoHeteCallback
from autohete.planning import plan_for, save_profile


def wrap(model: Any = None, optimizer: Any = None, **options: Any) -> AutoHeteWrapper:
    """Attach to the host device; a small model where none is given."""
    model = make_gpt() if model is None else model
    optimizer = adamw(model) if optimizer is None else optimizer
    options = {"gpu_mem": "16MiB", "cpu_mem": "64MiB", "profile_path": None, **options}
    return AutoHeteWrapper(model, optimizer, **options).to("cpu")


def attached() -> AutoHeteWrapper:
    return wrap()


def unattached() -> AutoHeteWrapper:
    model = make_gpt()
    return AutoHeteWrapper(model, adamw(model), gpu_mem="16MiB")


def wrapped_inside() -> Any:
    return wrap(nn.Sequential(make_gpt(), nn.Sequential(unattached())))


def wrapped_twice() -> Any:
    model = make_gpt()
    first = wrap(model)
    try:
        return wrap(model)
    finally:
        first.unwrap()


def promise_broken() -> Any:
    """Losses one after the other where backward was promised to be followed by step()."""
    model = make_gpt()
    optimizer = adamw(model)
    wrapped = AutoHeteWrapper(
        model, optimizer, gpu_mem="1GiB", plan=forced_plan(model, "all"), profile_path=None,
        early_updates="in_place",
    )  # fmt: skip
    for step in range(3):
        plain_loop(wrapped, optimizer, step)
    try:
        for step in range(1000):  # until an update has begun before the next forward takes it back
            tokens, targets = batch(step)
            wrapped(tokens, targets).backward()
    finally:
        wrapped.unwrap()


def parts_of_two() -> Any:
    """A second wrapper over a parameter that the first one has."""
    model, other = make_gpt(), make_gpt(seed=1)
    first = wrap(model)
    other.head.weight = model.head.weight
    try:
        return wrap(other)
    finally:
        first.unwrap()


def one_optimizer_for_two() -> Any:
    both = nn.ModuleList([make_gpt(), make_gpt(seed=1)])
    optimizer = adamw(both)
    first = wrap(both, optimizer)
    try:
        return wrap(nn.Linear(2, 2), optimizer)
    finally:
        first.unwrap()


def aliases() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    return wrap(model)


FLAT = torch.zeros(2, 16)


def part_of_a_larger_tensor() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer, flat in zip(model, FLAT, strict=True):
        layer.weight.data = flat.view(4, 4)
    return wrap(model)


def sparse_embedding() -> Any:
    layers = [nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = nn.Sequential(*layers)
    return wrap(model, torch.optim.AdamW(model.parameters()))


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, device="meta"))


class EditsInput(nn.Module):
    """A layer whose input is edited after it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x) * 1
        z = self.layers[1](y)
        y.detach().mul_(2)
        return z.sum() + y.sum()


def edited_input() -> Any:
    model = EditsInput()
    trained = wrap(model, torch.optim.AdamW(model.parameters()))
    trained(torch.ones(2, 8, requires_grad=True)).backward()


def stepped(change: Any) -> Any:
    """One step, a change to the optimizer, another step."""
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer)
    try:
        plain_loop(trained, optimizer, 0)
        change(optimizer, model)
        plain_loop(trained, optimizer, 1)
    finally:
        trained.unwrap()


def add_group(optimizer: Any, model: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def amsgrad(optimizer: Any, model: Any) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def too_small_in_the_first_step() -> Any:
    model = make_gpt()
    optimizer = adamw(model)
    trained = wrap(model, optimizer, gpu_mem="190KiB")
    plain_loop(trained, optimizer, 0)


def called_after_unwrap() -> Any:
    trained = attached()
    trained.unwrap()
    return trained(*batch(0))


def profile_without_plan() -> Any:
    path = Path(tempfile.mkdtemp()) / "autohete_profile.json"
    save_profile(path, plan_for("gpt2", "a100-40", 1, 64, suggest=False).profile)
    return wrap(plan=path)


def loaded(folder: Path, change: Any, **others: Any) -> Any:
    """Load a checkpoint whose content was changed."""
    path, trained = folder / "state.pt", attached()
    trained.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    torch.save(change(content) or content, path)  # in place, or another in its place
    return trained.load_checkpoint(path, **others)


def torn(folder: Path) -> Any:
    path, trained = folder / "state.pt", attached()
    path.write_bytes(b"PK\x03\x04 and no more")
    return trained.load_checkpoint(path)


def on_meta(folder: Path) -> Any:
    path = folder / "state.pt"
    attached().save_checkpoint(path)
    with torch.device("meta"):
        model = make_gpt()
    trained = AutoHeteWrapper(model, adamw(model), gpu_mem="16MiB", profile_path=None)
    return trained.load_checkpoint(path)


def other_shape(content: Any) -> None:
    name = next(iter(content["model"]))
    content["model"][name] = torch.ones(2, 3)


def other_groups(content: Any) -> None:
    content["optimizer"]["param_groups"][0]["params"].pop()


def cpu_adamw(**options: Any) -> Any:
    return CPUAdamW([nn.Parameter(torch.ones(3))], **options)


def cpu_adamw_scaled(scale: float) -> Any:
    optimizer = cpu_adamw()
    optimizer.grad_scale = scale
    return optimizer.step()


def cpu_adamw_loaded(saved: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
    optimizers = []
    for shape in (saved, wanted):
        param = torch.nn.Parameter(torch.ones(shape))
        param.grad = torch.ones(shape)
        optimizers.append(CPUAdamW([param]))
        optimizers[-1].step()
    return optimizers[1].load_state_dict(optimizers[0].state_dict())


def cpu_adamw_step(dtype: torch.dtype) -> Any:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    CPUAdamW([parameter]).step()


def cpu_adamw_of_sgd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    sgd = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    sgd.step()
    CPUAdamW([parameter]).load_state_dict(sgd.state_dict())


CASES = {
    # ---- the pair that is wrapped
    "a model that is none": Case(
        lambda f: AutoHeteWrapper(5, None),
        "model is int",
        "a torch.nn.Module",
        "a torch.nn.Module",  # type: ignore[arg-type]
    ),
    "an optimizer that is none": Case(
        lambda f: wrap(optimizer=5),
        "optimizer is int",
        "a torch.optim.Optimizer",
        "a torch.optim.Optimizer",
    ),
    "a wrapper in a wrapper": Case(
        lambda f: wrap(unattached(), adamw(make_gpt())),
        "AutoHeteWrapper already",
        "a plain module",
        "call unwrap()",
    ),
    "a model wrapped twice": Case(
        lambda f: wrapped_twice(), "wrapped already", "a plain module", "call unwrap()"
    ),
    "a wrapper inside the model": Case(
        lambda f: wrapped_inside(),
        "1.0 is an AutoHeteWrapper",
        "plain modules",
        "unwrap() it",
    ),
    "a parameter in two wrappers": Case(
        lambda f: parts_of_two(), "parameter", "one wrapper for each parameter", "wrap one module"
    ),
    "an optimizer of another model": Case(
        lambda f: wrap(optimizer=adamw(make_gpt(seed=1))),
        "of its parameters",
        "parameters of this TinyGPT",
        "build the optimizer from",
    ),
    "parameters that share memory": Case(
        lambda f: aliases(), "share memory", "memory of their own", "tie weights by"
    ),
    "a parameter that is part of a larger tensor": Case(
        lambda f: part_of_a_larger_tensor(),
        "is part of a larger tensor",
        "memory of its own",
        "give the parameter a clone",
    ),
    "an embedding with sparse gradients": Case(
        lambda f: sparse_embedding(), "has sparse=True", "dense gradients", "set sparse=False"
    ),
    "a model without values": Case(
        lambda f: wrap(nn.Sequential(NoReset(), NoReset()), None),
        "meta device",
        "a way to give them values",
        "load the weights",
    ),
    "an unknown keyword": Case(
        lambda f: wrap(gpu_memory=5), "gpu_memory", "unexpected keyword", "see autohete.config"
    ),
    # ---- settings
    "gpu_mem left out on the host device": Case(
        lambda f: wrap(gpu_mem=None),
        "gpu_mem is None",
        "a size on the host device",
        "give for example",
    ),
    "gpu_mem below any plan": Case(
        lambda f: wrap(gpu_mem="4KiB"),
        "gpu_mem is",
        "expected at least",
        "give more",
        InfeasibleError,
    ),
    "cpu_mem below any plan": Case(
        lambda f: wrap(cpu_mem="4KiB"),
        "cpu_mem is",
        "expected at least",
        "give more memory",
        InfeasibleError,
    ),
    "an unknown strategy": Case(lambda f: wrap(strategy="x"), "'x'", "expected one of", "autohete"),
    "an unknown precision": Case(
        lambda f: wrap(precision="int8"), "'int8'", "expected one of", "bf16"
    ),
    "fp32 asked of a half model": Case(
        lambda f: wrap(make_gpt().bfloat16(), precision="fp32"),
        "bfloat16",
        'precision is "fp32"',
        "call model.float()",
    ),
    "a window of none": Case(
        lambda f: wrap(window=0), "window is 0", "a whole number of at least 1", "at least 1"
    ),
    "no workers": Case(
        lambda f: wrap(num_workers=0), "num_workers is 0", "from 1 to 4096", "from 1 to 4096"
    ),
    "a norm below nothing": Case(
        lambda f: wrap(max_grad_norm=-1.0), "-1.0", "a number above 0", "or None"
    ),
    "updates where nobody knows": Case(
        lambda f: wrap(early_updates="always"),
        "early_updates is 'always'",
        'True, False or "in_place"',
        'True, False or "in_place"',
    ),
    "clipping what is promised unchanged": Case(
        lambda f: wrap(early_updates="in_place", max_grad_norm=1.0),
        "with max_grad_norm=1.0",
        "expected no clipping",
        "use early_updates=True",
    ),
    "a promise that was not kept": Case(
        lambda f: promise_broken(),
        "were used or changed between backward() and step()",
        "expected step() to follow",
        "load a checkpoint, and wrap with early_updates=True",
        RuntimeError,
    ),
    "a profile into no folder": Case(
        lambda f: wrap(profile_path=f / "nowhere" / "profile.json"),
        "nowhere/profile.json",
        "a file in a folder that is there",
        "make the folder, name a file, or give None",
    ),
    "a profile that is a number": Case(
        lambda f: wrap(profile_path=5), "profile_path is 5", "a path", "or None to write nothing"
    ),
    "no bandwidth among ranks": Case(
        lambda f: wrap(rank_bandwidth=0),
        "rank_bandwidth is 0",
        "bytes per second above 0",
        "expected bytes per second",
    ),
    "a plan that is none": Case(
        lambda f: wrap(plan=5), "plan is 5", "a Plan or the path", "a Plan or the path"
    ),
    "a plan of another model": Case(
        lambda f: wrap(plan=forced_plan(make_gpt(layers=2), "state")),
        "it has 6 units",
        "expected 8",
        "make a new plan",
    ),
    "a profile without a plan": Case(
        lambda f: profile_without_plan(),
        "autohete_profile.json",
        "without a plan",
        "make one with make_plan",
    ),
    "layers that are a number": Case(
        lambda f: wrap(layers=3), "layers is 3", "a class or its name", "a list of those"
    ),
    "layers that are numbers": Case(
        lambda f: wrap(layers=[3]), "layers is [3]", "a class or its name", "a list of those"
    ),
    "pinning that is neither": Case(
        lambda f: wrap(pin="yes"), "pin is 'yes'", "expected True or False", "True or False"
    ),
    "layers that match nothing": Case(
        lambda f: wrap(layers="NoSuchBlock"), "'NoSuchBlock'", "at least one", "give the class"
    ),
    "layers inside each other": Case(
        lambda f: wrap(layers=nn.Module),
        "matches modules inside each other",
        "one level",
        "name the outer class",
    ),
    # ---- moving and reading
    "another dtype after wrapping": Case(
        lambda f: attached().to(torch.float64), "float64", "expected none", "use precision="
    ),
    "half() after wrapping": Case(
        lambda f: attached().half(),
        "dtype conversions",
        "not possible after wrapping",
        "use precision=",
    ),
    "another device after wrapping": Case(
        lambda f: attached().to("cuda"), "device is cuda", "expected cpu", "unwrap() before moving"
    ),
    "a device there is no side for": Case(
        lambda f: unattached().to("mps"), "device is mps", "expected cuda", "cpu for the host"
    ),
    "the meta device": Case(
        lambda f: unattached().to("meta"), "device is meta", "expected cuda", "cpu for the host"
    ),
    "unwrapping to where nothing is": Case(
        lambda f: attached().unwrap("meta"), "device is meta", "expected cpu", "cpu or cuda"
    ),
    "a call after unwrap": Case(
        lambda f: called_after_unwrap(),
        "called after unwrap()",
        "the model that it returned",
        'call that, or .cuda() or .to("cpu")',
        RuntimeError,
    ),
    "a report before there is a run": Case(
        lambda f: unattached().report(),
        "not on a device yet",
        "AutoHeteWrapper.report",
        "call .cuda()",
        RuntimeError,
    ),
    "a trace that was not begun": Case(
        lambda f: attached().trace(f / "trace.json"),
        "no trace is on",
        "trace() before the steps",
        "call trace()",
    ),
    "a CUDA device with a CPU torch": Case(
        lambda f: unattached().cuda(),
        "CPU build",
        "expected a CUDA build",
        "install one",
        RuntimeError,
    ),
    # ---- training
    "a parameter added after wrapping": Case(
        lambda f: stepped(add_group),
        "a parameter was added",
        "the parameters it had",
        "unwrap() before",
    ),
    "amsgrad turned on after wrapping": Case(
        lambda f: stepped(amsgrad), "amsgrad is True", "expected False", "unwrap() before"
    ),
    "a first step that does not fit": Case(
        lambda f: too_small_in_the_first_step(),
        "KiB gpu_mem were left",
        "KiB (gpu_mem=",
        "smaller batch",
        torch.OutOfMemoryError,
    ),
    # ---- checkpoints
    "a file that is no checkpoint": Case(
        torn, "cannot be read", "a whole file of save_checkpoint()", "a whole file"
    ),
    "a checkpoint that is a list": Case(
        lambda f: loaded(f, lambda content: [1]),
        "holds a list",
        "a dict with the state dicts",
        "load it yourself",
    ),
    "a checkpoint without the model": Case(
        lambda f: loaded(f, lambda content: content.pop("model") and None),
        "the file has",
        "expected model too",
        "save it",
    ),
    "a checkpoint of another model": Case(
        lambda f: loaded(f, lambda content: content["model"].clear()),
        "keys are missing",
        "expected this model's",
        "build the model that was saved",
    ),
    "a checkpoint of other shapes": Case(
        lambda f: loaded(f, other_shape),
        "has shape (2, 3)",
        "expected (",
        "build the model that was saved",
    ),
    "a checkpoint without a state dict": Case(
        lambda f: loaded(f, lambda c: c | {"model": 3}),
        "model is a int",
        "expected the model's state dict",
        "model.state_dict()",
    ),
    "a checkpoint with something else than tensors": Case(
        lambda f: loaded(f, lambda c: c | {"model": dict.fromkeys(c["model"], 1.0)}),
        "is a float",
        "expected a tensor of shape",
        "build the model that was saved",
    ),
    "a checkpoint for a model on meta": Case(
        on_meta,
        "is on the meta device",
        "expected memory to load into",
        "call .cuda()",
    ),
    "a checkpoint whose optimizer is none": Case(
        lambda f: loaded(f, lambda c: c | {"optimizer": 3}),
        "optimizer is a int",
        'a state dict with "state"',
        "optimizer.state_dict()",
    ),
    "a checkpoint of another optimizer": Case(
        lambda f: loaded(f, other_groups),
        "groups have",
        "expected [",
        "build the optimizer that was saved",
    ),
    "a value where an object is wanted": Case(
        lambda f: loaded(f, lambda content: content.update(epoch=3), epoch=3),
        "epoch is int",
        "load_state_dict()",
        "values are in the returned dict",
    ),
    # ---- the optimizer by itself
    "CPUAdamW with a rule of torch's": Case(
        lambda f: cpu_adamw(capturable=True),
        "capturable is True",
        "expected False",
        "use torch.optim.AdamW",
    ),
    "CPUAdamW without workers": Case(
        lambda f: cpu_adamw(num_workers=0), "num_workers is 0", "at least 1", "at least 1"
    ),
    "a learning rate that is none": Case(
        lambda f: cpu_adamw(lr=float("nan")), "nan", "a finite number >= 0", ">= 0"
    ),
    "moments of a dtype that there is not": Case(
        lambda f: cpu_adamw(moment_dtype=torch.float64),
        "moment_dtype is torch.float64",
        "float32 or bfloat16",
        "float32 or bfloat16",
    ),
    "amsgrad with bfloat16 moments": Case(
        lambda f: cpu_adamw(moment_dtype=torch.bfloat16, amsgrad=True),
        "amsgrad is True with bfloat16 moments",
        "expected False",
        "would only grow",
    ),
    "three betas": Case(
        lambda f: cpu_adamw(betas=(0.9, 0.99, 0.999)), "(0.9, 0.99, 0.999)", "two numbers", "two"
    ),
    "one and a half workers": Case(
        lambda f: cpu_adamw(num_workers=1.5), "num_workers is 1.5", "a whole number", "whole"
    ),
    "a scale of 0": Case(
        lambda f: cpu_adamw_scaled(0.0), "grad_scale is 0.0", "a finite number > 0", "> 0"
    ),
    "a state dict of another model": Case(
        lambda f: cpu_adamw_loaded((3,), (7,)),
        "has shape (3,)",
        "expected its parameter's (7,)",
        "load a state dict of the same model",
    ),
    "a state dict of another rule": Case(
        lambda f: cpu_adamw_of_sgd(),
        "has momentum_buffer and no exp_avg and no exp_avg_sq",
        "expected exp_avg and exp_avg_sq",
        "load the state dict of the same kind of optimizer",
    ),
    "a beta out of range": Case(
        lambda f: cpu_adamw(betas=(0.9, 1.5)), "1.5", "0 <= beta < 1", "beta < 1"
    ),
    "CPUAdamW on whole numbers' like": Case(
        lambda f: cpu_adamw_step(torch.float64),
        "float64",
        "float32, bfloat16 or float16",
        "expected",
    ),
    "moments of a dtype that cannot be": Case(
        lambda f: cpu_adamw(moment_dtype=torch.float16),
        "moment_dtype is torch.float16",
        "float32 or bfloat16",
        "expected",
    ),
    "amsgrad with moments in bf16": Case(
        lambda f: cpu_adamw(amsgrad=True, moment_dtype=torch.bfloat16),
        "amsgrad is True with bfloat16 moments",
        "expected False",
        "would only grow",
    ),
    "nesterov without momentum": Case(
        lambda f: CPUSGD([nn.Parameter(torch.ones(3))], nesterov=True),
        "nesterov is True with momentum 0.0 and dampening 0.0",
        "a momentum and no dampening",
        "expected",
    ),
    # ---- the build
    "another torch than at build time": Case(
        lambda f: _native.check_build("1", "cp", torch_version="2", python_tag="cp"),
        "torch is 2",
        "expected 1",
        "build it again",
        ImportError,
    ),
    "another Python than at build time": Case(
        lambda f: _native.check_build("1", "cp311", torch_version="1", python_tag="cp312"),
        "this is cp312",
        "is for cp311",
        "build it for this Python",
        ImportError,
    ),
    # ---- the Trainer
    "a callback over a wrapper": Case(
        lambda f: AutoHeteCallback(unattached()),
        "an AutoHeteWrapper",
        "the plain model",
        "the callback wraps it",
    ),
    "a callback over no model": Case(
        lambda f: AutoHeteCallback(5),
        "model is int",
        "a torch.nn.Module",
        "a torch.nn.Module",  # type: ignore[arg-type]
    ),
    "a callback with the Trainer's own setting": Case(
        lambda f: AutoHeteCallback(make_gpt(), max_grad_norm=1.0),
        "max_grad_norm is 1.0",
        "expected nothing",
        "taken from TrainingArguments",
    ),
    "a callback with an unknown keyword": Case(
        lambda f: AutoHeteCallback(make_gpt(), gpu_memory=5),
        "gpu_memory",
        "unexpected keyword",
        "see autohete.config",
    ),
    "a callback's report before a run": Case(
        lambda f: AutoHeteCallback(make_gpt(), gpu_mem="16MiB").report(),
        "nothing is attached",
        "expected a run",
        "call it during trainer.train()",
        RuntimeError,
    ),
    "a conversion while a callback holds the model": Case(
        lambda f: held().half(), "a conversion", "expected none", "convert it before"
    ),
    "sharing while a callback holds the model": Case(
        lambda f: held().share_memory(), "share_memory() was called", "no sharing", "call unwrap()"
    ),
    # ---- the demo
    "a demo of no steps": Case(
        lambda f: DemoOptions(steps=0), "steps is 0", "1 or more", "1 or more"
    ),
    "a demo on an unknown device": Case(
        lambda f: DemoOptions(device="tpu"),
        "device is 'tpu'",
        "host, cuda or plain",
        "host, cuda or plain",
    ),
    "a width that heads do not divide": Case(
        lambda f: GPTConfig(width=33, num_heads=2),
        "width is 33",
        "a multiple of the 2 heads",
        "a multiple",
    ),
}

_KEPT: list[Any] = []


def held() -> nn.Module:
    model = make_gpt()
    _KEPT[:] = [AutoHeteCallback(model, gpu_mem="16MiB")]
    return model
