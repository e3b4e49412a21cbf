"""AutoHeteCallback: autohete in a Hugging Face Trainer, by one line.

    trainer = Trainer(model, args, ..., callbacks=[AutoHeteCallback(model, gpu_mem="24GiB")])

The Trainer moves the model to the GPU in its constructor, makes the optimizer in train(), and lets
accelerate wrap it. So the callback works in two moments: when it is built it holds the parameters
where they are (`.to()` moves buffers only), and when training begins, with everything prepared and
any checkpoint loaded, it attaches. See docs/adr/0007-trainer-callback.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.training_args import ParallelMode

from autohete.config import Config
from autohete.hooks import HookedForward, in_backward
from autohete.integrations.placement import Hold, holder_of
from autohete.planning import Plan
from autohete.run_report import RunReport
from autohete.wrapper import AutoHeteWrapper

_log = logging.getLogger("autohete")
_LOGGED = ("device_peak_measured_bytes", "host_peak_measured_bytes", "h2d_bytes", "d2h_bytes")
_WAITS = ("wait_update_seconds", "wait_upload_seconds", "wait_gradients_seconds")
_WARN_EVERY = 100  # skipped steps


class AutoHeteCallback(TrainerCallback):  # type: ignore[misc]
    """Train the Trainer's model within `gpu_mem` of device memory.

    Build it before the Trainer, with the same model; results are those of the plain Trainer.
    Training, evaluation and saving go on as they do without it. After train() the model stays
    attached, so that evaluate() and predict() fit too; `unwrap()` gives the plain model back.

    Log entries of training gain `autohete/...` figures: in `state.log_history`, on the progress bar
    and for every callback after this one.

    Args:
        model: the model the Trainer gets.
        gpu_mem: device memory in bytes or as "24GiB"; measured when left out (GPU only).
        cpu_mem: host memory likewise.
        options: see autohete.config.Config. gradient_accumulation_steps and max_grad_norm are the
            Trainer's, so they are not accepted here.

    Raises:
        ValueError: here for a bad keyword, when the Trainer is built for arguments that do not go
            together with autohete (more than one GPU in a process, FSDP, DeepSpeed), and in
            train() when no plan can fit the budgets.

    Under torchrun gradients are averaged over the ranks as DistributedDataParallel does, which is
    not put around the model.

    A second callback for a model takes it over; the first does nothing from then on.
    """

    def __init__(
        self,
        model: nn.Module,
        gpu_mem: int | float | str | None = None,
        cpu_mem: int | float | str | None = None,
        **options: Any,
    ) -> None:
        self._options = {"gpu_mem": gpu_mem, "cpu_mem": cpu_mem, **options}
        self._check_options(model, options)
        self.model = model
        self.num_skipped_steps = 0
        self._device: torch.device | None = None
        self._wrapper: AutoHeteWrapper | None = None
        self._without_cache: _WithoutCache | None = None
        self._accelerated: AcceleratedOptimizer | None = None
        self._steps_seen = 0
        earlier = holder_of(model)
        if earlier is not None:
            _log.warning(
                "autohete: a new AutoHeteCallback takes the model over from an earlier one"
            )
            earlier.unwrap()
        self._hold: Hold | None = Hold(model, self)
        keep_ddp_away()

    def _check_options(self, model: nn.Module, options: dict[str, Any]) -> None:
        if isinstance(model, AutoHeteWrapper):
            raise ValueError(
                "AutoHeteCallback: model is an AutoHeteWrapper, expected the plain model; the "
                "callback wraps it itself"
            )
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"AutoHeteCallback: model is {type(model).__name__}, expected a torch.nn.Module"
            )
        for name in ("gradient_accumulation_steps", "max_grad_norm"):
            if name in options:
                raise ValueError(
                    f"AutoHeteCallback: {name} is {options[name]!r}, expected nothing; it is taken "
                    "from TrainingArguments"
                )
        try:
            Config(**self._options)
        except TypeError as error:
            raise ValueError(f"AutoHeteCallback: {error}; see autohete.config.Config") from None

    # ---------------------------------------------------------------- attaching

    def check_move(self, device: torch.device) -> None:
        """Called by the hold: buffers may go where the model trains."""
        run = self._wrapper.run if self._wrapper else None
        if run is not None and device.type != run.side.torch_device.type:
            raise ValueError(
                f"model.to: device is {device}, expected {run.side.torch_device}, where it trains; "
                "call unwrap() on the AutoHeteCallback before moving it"
            )

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """See AutoHeteWrapper.no_sync; accelerate asks the model for it."""
        return self._wrapper.no_sync() if self._wrapper else contextlib.nullcontext()

    def before_evaluation(self) -> None:
        """evaluate() before train(): there is no optimizer yet, so nothing is updated."""
        if self._wrapper is None and self._device is not None:
            self._attach(AdamW([{"params": []}]), self._device, {})

    def _attach(self, optimizer: Optimizer, device: torch.device, options: dict[str, Any]) -> None:
        self._detach()
        if self._hold is not None:
            self._hold.let_forward_pass()
        wrapper = AutoHeteWrapper(self.model, optimizer, **self._options, **options)
        wrapper.to(device)
        self._wrapper = wrapper
        if wrapper.run is not None and _takes_use_cache(self.model):
            self._without_cache = _WithoutCache(wrapper.run, self.model)
            self._without_cache.install()
        self._steps_seen = 0

    def _detach(self) -> None:
        if self._wrapper is None:
            return
        if self._without_cache is not None:
            self._without_cache.remove()
            self._without_cache = None
        self._wrapper.unwrap()
        self._wrapper = None
        self._accelerated = _recapture(self._accelerated)

    def unwrap(self) -> nn.Module:
        """Detach and return the model; model and optimizer go on as plain PyTorch objects."""
        self._detach()
        if self._hold is not None:
            self._hold.release()
            self._hold = None
            vars(self.model).pop("no_sync", None)
        return self.model

    # ---------------------------------------------------------------- what is known

    @property
    def plan(self) -> Plan | None:
        """The plan in use, AutoHeteWrapper.plan; None while no training runs."""
        return None if self._wrapper is None else self._wrapper.plan

    def report(self) -> RunReport:
        """Return what was predicted and measured so far."""
        if self._wrapper is None:
            raise RuntimeError(
                "AutoHeteCallback.report: nothing is attached, expected a run; call it during "
                "trainer.train() or after"
            )
        return self._wrapper.report()

    # ---------------------------------------------------------------- the Trainer's events

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._hold is not None:
            self._check_trainer(args, kwargs.get("model"))
            self._device = args.device
            if args.parallel_mode == ParallelMode.DISTRIBUTED:
                vars(self.model)["no_sync"] = _NoSync(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._hold is None:
            return
        self._check_trainer(args, kwargs.get("model"))
        self._device = args.device
        accelerated, optimizer = kwargs["optimizer"], kwargs["optimizer"]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if self._wrapper is None or self._wrapper._optimizer is not optimizer:
            steps = args.gradient_accumulation_steps
            self._attach(optimizer, args.device, {"gradient_accumulation_steps": steps})
        self._accelerated = _recapture(accelerated)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._wrapper is None or self._wrapper.run is None:
            return
        steps = self._wrapper.run.num_steps
        if steps == self._steps_seen:
            self._count_skipped(state.global_step)
        self._steps_seen = steps

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        logs = kwargs.get("logs")
        if self._wrapper is None or logs is None or not {"loss", "train_loss"} & logs.keys():
            return
        figures = self._figures()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)  # a copy of logs, made before this event

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The Trainer saves the optimizer on one rank alone, which has its rows only."""
        run = self._wrapper.run if self._wrapper else None
        if control.should_save and run is not None:
            run.bridge.hold_whole()

    on_epoch_end = on_step_end

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._wrapper is not None and self._wrapper.run is not None:
            self._wrapper.run.bridge.let_go_of_whole()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._wrapper is not None:
            self._wrapper.synchronize()

    # ---------------------------------------------------------------- details

    def _check_trainer(self, args: TrainingArguments, model: Any) -> None:
        if model is not self.model:
            raise ValueError(
                f"AutoHeteCallback: the Trainer's model is another {type(model).__name__} than the "
                "callback's, expected the same object; build both from one model (model_init= "
                "makes new ones, so it cannot be used)"
            )
        optim = str(getattr(args.optim, "value", args.optim))
        for wrong, what in (
            (args.n_gpu > 1, f"{args.n_gpu} GPUs (DataParallel)"),
            (bool(args.fsdp), "fsdp"),
            (bool(args.deepspeed), "deepspeed"),
            (bool(args.torch_compile), "torch_compile"),
            (args.fp16_full_eval or args.bf16_full_eval, "fp16_full_eval or bf16_full_eval"),
            ("lomo" in optim or "layerwise" in optim, f"optim={optim}"),
        ):
            if wrong:
                raise ValueError(
                    f"AutoHeteCallback: the Trainer uses {what}, expected one device for each "
                    "process, a model that is not compiled or converted, and an optimizer that "
                    "updates in step(); start one process per GPU (torchrun) or set "
                    "CUDA_VISIBLE_DEVICES to one GPU, or leave that argument out"
                )
        if args.device.type == "cpu":
            Config(**self._options).budget_for(args.device)

    def _count_skipped(self, step: int) -> None:
        self.num_skipped_steps += 1
        if self.num_skipped_steps % _WARN_EVERY == 1:
            _log.warning(
                "autohete: step %d was skipped for gradients that are not finite (%d so far)",
                step + 1,
                self.num_skipped_steps,
            )

    def _figures(self) -> dict[str, float]:
        report = self.report()
        figures = {f"autohete/{name}": getattr(report, name) for name in _LOGGED}
        figures["autohete/waited_seconds"] = sum(getattr(report, name) for name in _WAITS)
        figures["autohete/skipped_steps"] = self.num_skipped_steps
        return figures


def _nothing() -> Any:
    return contextlib.nullcontext


class _NoSync:
    """A held model's no_sync(), as DDP's; a copy of the model has one that does nothing."""

    def __init__(self, callback: AutoHeteCallback) -> None:
        self._callback = callback

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        return self._callback.no_sync()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def keep_ddp_away() -> None:
    """Let accelerate prepare held models without DistributedDataParallel, once and for all.

    The Trainer gives a callback no place between making the accelerator and wrapping the model.
    With evaluation_mode accelerate does all it does to a model but multiply it.
    """
    original = Accelerator.prepare_model
    if getattr(original, "_autohete", False):
        return

    @functools.wraps(original)
    def prepare_model(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        held = isinstance(model, nn.Module) and holder_of(model) is not None
        if held and self.distributed_type != DistributedType.NO and len(args) < 2:
            kwargs["evaluation_mode"] = True
        return original(self, model, *args, **kwargs)

    prepare_model._autohete = True  # type: ignore[attr-defined]
    Accelerator.prepare_model = prepare_model


class _WithoutCache(HookedForward):
    """Training needs no key-value cache, and a layer that is recomputed would append to it twice.

    Trainer 5 turns it off too; 4.57 leaves `config.use_cache` on.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.run is not None and torch.is_grad_enabled() and not in_backward():
            kwargs.setdefault("use_cache", False)
        return self.forward(*args, **kwargs)


def _takes_use_cache(model: nn.Module) -> bool:
    inner: Any = getattr(model, "get_base_model", lambda: model)()  # PEFT's forward takes **kwargs
    named = "use_cache" in inspect.signature(inner.forward).parameters
    return named and bool(getattr(getattr(inner, "config", None), "use_cache", False))


def _recapture(optimizer: Any) -> AcceleratedOptimizer | None:
    """Let accelerate's wrapper take `step` again from the optimizer inside.

    With a GradScaler it took the bound method when it was made and writes that back after each
    step, so a step() installed since would be lost. Unpickling takes it anew; so does this.
    """
    if not isinstance(optimizer, AcceleratedOptimizer):
        return None
    optimizer.__setstate__(optimizer.__getstate__())
    return optimizer
