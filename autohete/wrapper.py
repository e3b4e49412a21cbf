"""AutoHeteWrapper: what users import."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autohete import checkpoint
from autohete.config import Config
from autohete.distributed import device_of_launch
from autohete.layout import check_types
from autohete.planning import Plan
from autohete.planning.profile_file import write_atomically
from autohete.run import Run
from autohete.run_report import RunReport, chrome_trace
from autohete.run_trace import RunTrace

_PAIR = ("model", "optimizer")
_MODULES_OWN = vars(nn.Module()).keys()  # the training mode, hooks and their flags


def _itself(model: nn.Module) -> nn.Module:
    return model


def _check_not_inside(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for child_name, child in module._modules.items():
            if isinstance(child, AutoHeteWrapper):
                inside = f"{name}.{child_name}" if name else child_name
                raise ValueError(
                    f"model: {inside} is an AutoHeteWrapper, expected plain modules inside the one "
                    "that is wrapped; unwrap() it, and wrap the outer model only"
                )


class AutoHeteWrapper(nn.Module):
    """Train `model` with `optimizer` within `gpu_mem` of device memory and `cpu_mem` of the host's.

    The loop does not change: call the wrapper as the model, `loss.backward()`,
    `optimizer.step()`, `optimizer.zero_grad()`. Move it once with `.cuda()`, or with `.to("cpu")`
    for the host device. Results are those of plain PyTorch. Attributes, parameters and state_dict
    keys are the model's own.

    The first training step runs under the plan that needs least memory while it is measured; from
    the second on the planner's decision is used (`plan`).

    Args:
        model: any torch.nn.Module.
        optimizer: of its parameters. Adam, AdamW and autohete.CPUAdamW are updated unit by unit;
            others run their own step.
        gpu_mem: device memory in bytes or as "24GiB"; measured when left out (GPU only).
        cpu_mem: host memory likewise; measured when left out.
        options: see autohete.config.Config.

    Raises:
        ValueError: a keyword that cannot be honoured, or a pair that does not belong together.
        InfeasibleError: (a ValueError) no plan can fit the budgets.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model = AutoHeteWrapper(model, optimizer, gpu_mem="1MiB", profile_path=None).to("cpu")
        >>> model(torch.ones(2, 8)).sum().backward()
        >>> optimizer.step()
        >>> model.unwrap()  # doctest: +ELLIPSIS
        Sequential(...
    """

    # Kept out of nn.Module's own registries, so that names and keys stay the model's.
    module: nn.Module
    _optimizer: Optimizer
    _config: Config
    run: Run | None
    _unwrapped: bool

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        gpu_mem: int | float | str | None = None,
        cpu_mem: int | float | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        try:
            config = Config(gpu_mem=gpu_mem, cpu_mem=cpu_mem, **options)
        except TypeError as error:
            raise ValueError(f"AutoHeteWrapper: {error}; see autohete.config.Config") from None
        if isinstance(model, AutoHeteWrapper):
            raise ValueError(
                "model: this is an AutoHeteWrapper already, expected a plain module; call "
                "unwrap() on it before wrapping again"
            )
        check_types(model, optimizer)
        _check_not_inside(model)
        vars(self)["module"] = model
        vars(self)["_optimizer"] = optimizer
        vars(self)["_config"] = config
        vars(self)["run"] = None
        vars(self)["_unwrapped"] = False
        # Whatever is registered here is registered with the model, and functional_call finds it.
        for registry in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[registry] = vars(model)[registry]
        self.training = model.training

    # ---------------------------------------------------------------- attaching

    def _attach(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"AutoHeteWrapper.to: device is {device}, expected cuda, or cpu for the host device"
            )
        if self.run is None:
            device = device_of_launch(device)
            run = Run(self.module, self._optimizer, self._config, device)
            run.owner = weakref.ref(self)
            vars(self)["run"], vars(self)["_unwrapped"] = run, False
            return
        have = self.run.side.torch_device
        if device.type != have.type or (device.index not in (None, have.index)):
            raise ValueError(
                f"AutoHeteWrapper.to: device is {device}, expected {have}, where it trains now; "
                "unwrap() before moving"
            )

    def to(self, *args: Any, **kwargs: Any) -> AutoHeteWrapper:
        """Attach to the device. Later calls with the same device do nothing."""
        parsed: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype = parsed[0], parsed[1]
        if dtype is not None:
            raise ValueError(
                f"AutoHeteWrapper.to: dtype is {dtype}, expected none; use precision= when wrapping"
            )
        if device is not None:
            self._attach(device)
        return self

    def cuda(self, device: int | torch.device | None = None) -> AutoHeteWrapper:
        """Attach to a GPU."""
        index = device.index if isinstance(device, torch.device) else device
        self._attach(torch.device("cuda", index) if index is not None else torch.device("cuda"))
        return self

    def cpu(self) -> AutoHeteWrapper:
        """Attach to the host device."""
        self._attach(torch.device("cpu"))
        return self

    def unwrap(self, device: torch.device | str | None = None) -> nn.Module:
        """Detach and return the model; it and the optimizer go on as plain PyTorch objects.

        The wrapper is not called any more then, unless .cuda() or .to("cpu") attaches it again.

        Args:
            device: where their tensors are afterwards; left out: where they trained. A model that
                the GPU cannot hold as a whole is kept on the CPU with unwrap("cpu").

        Raises:
            torch.OutOfMemoryError: they do not fit there; nothing has changed.
            RuntimeError: called inside a forward or backward of the model, from a hook of it.
        """
        target = None if device is None else torch.device(device)
        if target is not None and target.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"unwrap: device is {target}, expected cpu: torch sees no GPU here; leave it out "
                'to stay where it trained, or unwrap("cpu")'
            )
        if target is not None and target.type not in ("cpu", "cuda"):
            raise ValueError(f"unwrap: device is {target}, expected cpu or cuda")
        if self.run is not None:
            self.run.check_is_left("unwrap")
            self.run.detach(target)
            vars(self)["run"] = None
        vars(self)["_unwrapped"] = True
        return self.module

    def _the_run(self, what: str) -> Run:
        if self.run is None:
            raise RuntimeError(
                f"AutoHeteWrapper.{what}: not on a device yet (or unwrapped); call .cuda() or "
                '.to("cpu") first'
            )
        return self.run

    # ---------------------------------------------------------------- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; attaches to the GPU, or to the host device, when that was not done.

        Raises:
            RuntimeError: after unwrap(), where only .cuda() or .to("cpu") attach again.
        """
        if self.run is None and self._unwrapped:
            raise RuntimeError(
                "AutoHeteWrapper: called after unwrap(), expected a call of the model that it "
                'returned; call that, or .cuda() or .to("cpu") to train with the wrapper again'
            )
        if self.run is None:
            self._attach(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return self.module(*args, **kwargs)

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None while the model is on no device.

        Before the first step it is the one that needs least memory (strategy "safest"): that step
        is measured under it.
        """
        return None if self.run is None else self.run.plans.in_use

    def report(self) -> RunReport:
        """Return what was predicted and measured so far."""
        return RunReport.of(self._the_run("report"))

    def metrics(self) -> dict[str, float]:
        """Return this step's figures for a logger (TensorBoard, W&B): names and numbers."""
        return self.report().metrics()

    def trace(self, path: str | Path | None = None) -> None:
        """Record every lane's work from now on; with `path`, write a Chrome trace and stop.

        While a trace is on, report() holds it too, and draws it beside the prediction.

        Raises:
            ValueError: `path` is given and no trace is on.
            OSError: it cannot be written; the trace goes on, for another path.
        """
        run = self._the_run("trace")
        if path is None:
            run.plans.tracing = True
            run.engine.record_timeline(True)
            run.trace = RunTrace(run.side, run.engine)
            return
        if run.trace is None:
            raise ValueError(
                "AutoHeteWrapper.trace: no trace is on, expected trace() before the steps that "
                "it shall hold; call trace(), train some steps, then trace(path)"
            )
        run.synchronize()
        trace = chrome_trace(run.trace.spans(), [u.name for u in run.units])
        write_atomically(Path(path), json.dumps(trace))
        run.plans.tracing, run.trace = False, None
        run.engine.record_timeline(False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients of the backward passes inside this rank's own, as DDP's no_sync() does.

        For all micro-batches of a step but the last: that one averages their sum over the ranks.
        Does nothing where one process trains alone.
        """
        run = self.run
        return run.exchange.no_sync() if run and run.exchange else contextlib.nullcontext()

    def synchronize(self) -> None:
        """Wait until nothing is in flight: every tensor holds its newest value, views included."""
        self._the_run("synchronize").synchronize()

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, path: str | os.PathLike[str], **others: Any) -> None:
        """Write model, optimizer and `others` to a file; it is whole at any moment, or the old one.

        Plain PyTorch reads it: torch.load gives a dict with the state dicts "model" and "optimizer"
        and one entry for each keyword. Nothing is copied in memory. Of several ranks all call this
        and the first one writes, which has the whole optimizer state in memory meanwhile.

        Args:
            path: the file; it is written beside (NAME.part) and renamed.
            others: objects with a state_dict (scheduler=scheduler, scaler=scaler), or values that
                torch.load takes with weights_only=True (step=7).

        Raises:
            RuntimeError: another process is saving to that path.
            OSError: it cannot be written; the old file is as it was.
        """
        content = checkpoint.content_of({"model": self, "optimizer": self._optimizer, **others})
        ranks = self.run.ranks if self.run else None
        if ranks is None:
            checkpoint.write_whole(path, content)
        else:
            content["optimizer"] = checkpoint.whole_of(content["optimizer"])
            ranks.first_does(lambda: checkpoint.write_whole(path, content))

    def load_checkpoint(self, path: str | os.PathLike[str], **others: Any) -> dict[str, Any]:
        """Take up a file of save_checkpoint(), or one that plain PyTorch wrote with those keys.

        Goes on to the bit, optimizer and fp32 masters included. Tensors are read one at a time,
        into the memory they have. Plain PyTorch resumes with load_state_dict of what torch.load
        gives.

        Args:
            others: objects with a load_state_dict; each gets its entry.

        Returns:
            The entries that were not asked for by keyword.

        Raises:
            ValueError: the file is not whole, or not of this model or these `others`; nothing has
                changed.
        """
        file = checkpoint.SavedFile(path)
        try:
            saved = file.content
            checkpoint.check_entries(saved, {"model": self, "optimizer": None, **others})
            checkpoint.check_model(self.module, saved["model"])  # else the optimizer is blamed
            run = self.run
            native = run is not None and run.bridge.native
            if "optimizer" in saved:
                keys = run.bridge.state_keys if run is not None and native else None
                checkpoint.check_optimizer(self._optimizer, saved["optimizer"], keys)
            if run is not None:
                run.synchronize()
            checkpoint.load_model(file, self.module, saved["model"])
            if "optimizer" in saved:
                make = run.bridge.memory_for_state if run is not None and native else None
                cut = {"part_of": run.bridge.part_of} if run is not None and native else {}
                checkpoint.load_optimizer(file, self._optimizer, saved["optimizer"], make, **cut)
            rest = {key: file.read_all(value) for key, value in saved.items() if key not in _PAIR}
        finally:
            file.close()
        for name, value in others.items():
            value.load_state_dict(rest.pop(name))
        return rest

    # ---------------------------------------------------------------- the model's own surface

    def __getattr__(self, name: str) -> Any:
        if name in (
            "module",
            "run",
            "_unwrapped",
        ):  # not set yet: a failed constructor, or unpickling
            raise AttributeError(name)
        if name == "_ddp_params_and_buffers_to_ignore":  # the first thing DDP asks a module
            raise ValueError(
                "AutoHeteWrapper: DistributedDataParallel was put around it, expected nothing; the "
                "wrapper averages gradients over the ranks of torch.distributed by itself"
            )
        return getattr(self.module, name)

    def __len__(self) -> int:
        container: Any = self.module
        return len(container)

    def __bool__(self) -> bool:
        return True  # a model is one, whether it has a length or not

    def __getitem__(self, key: Any) -> Any:
        container: Any = self.module
        return container[key]

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __reduce__(self) -> Any:
        """Pickle as the plain model, like a copy."""
        return _itself, (self.module,)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MODULES_OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        modules: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return modules

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self.module.named_children()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    def state_dict(  # type: ignore[override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def train(self, mode: bool = True) -> AutoHeteWrapper:
        vars(self)["training"] = mode
        self.module.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> AutoHeteWrapper:
        self.module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    def apply(self, fn: Any) -> AutoHeteWrapper:
        self.module.apply(fn)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> AutoHeteWrapper:
        """Take a move by a module around this one as to(); what changes nothing is taken, too."""
        kinds = {(t.dtype, t.device) for t in (*self.parameters(), *self.buffers())}
        before = [torch.empty(1, dtype=dtype, device=device) for dtype, device in kinds]
        after = [fn(tensor) for tensor in before]
        same = [
            b is a and (a.is_cuda or not a.is_shared()) for b, a in zip(before, after, strict=True)
        ]
        if all(same):
            return self
        devices = {tensor.device for tensor in after}
        moved = len(devices) == 1 and devices.isdisjoint(device for _, device in kinds)
        if moved and [tensor.dtype for tensor in after] == [tensor.dtype for tensor in before]:
            self._attach(devices.pop())
            return self
        raise ValueError(
            "AutoHeteWrapper: dtype conversions (half(), float(), double()) and share_memory() are "
            "not possible after wrapping; use precision= when wrapping, or unwrap() first"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a plain copy of the model (not wrapped)."""
        import copy

        return copy.deepcopy(self.module, memo)

    def __repr__(self) -> str:
        return f"AutoHeteWrapper({self.module!r})"
