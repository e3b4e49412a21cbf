"""AutoHeteStrategy: autohete in a Lightning Trainer, by one argument.

    trainer = Trainer(strategy=AutoHeteStrategy(gpu_mem="24GiB"), max_epochs=1)

A strategy is where Lightning decides who places the model and who calls the steps. This one leaves
the model where it is until the optimizer is known, attaches then, and counts each step of the
LightningModule as one forward of the model, whichever of its modules the step calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.optim import AdamW, Optimizer

from autohete.config import Config
from autohete.hooks import as_root
from autohete.planning import Plan
from autohete.run_report import RunReport
from autohete.wrapper import AutoHeteWrapper


class AutoHeteStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Train a LightningModule within `gpu_mem` of device memory; results are those without it.

    The model is attached while fit(), validate(), test() or predict() runs and is a plain one on
    the CPU afterwards, as Lightning leaves it. Checkpoints are Lightning's own.

    Args:
        gpu_mem: device memory in bytes or as "24GiB"; measured when left out (GPU only).
        cpu_mem: host memory likewise.
        device: where to train; left out: the GPU, or the host device where there is none.
        options: see autohete.config.Config. gradient_accumulation_steps is the Trainer's, so it is
            not accepted here.

    Raises:
        ValueError: for a bad keyword here; in fit() for a LightningModule with several optimizers,
            and when no plan can fit the budgets.
    """

    strategy_name = "autohete"

    def __init__(
        self,
        gpu_mem: int | float | str | None = None,
        cpu_mem: int | float | str | None = None,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        if "gradient_accumulation_steps" in options:
            raise ValueError(
                "AutoHeteStrategy: gradient_accumulation_steps was given, expected nothing; it is "
                "the Trainer's accumulate_grad_batches"
            )
        self._options = {"gpu_mem": gpu_mem, "cpu_mem": cpu_mem, **options}
        try:
            Config(**self._options)
        except TypeError as error:
            raise ValueError(f"AutoHeteStrategy: {error}; see autohete.config.Config") from None
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._wrapper: AutoHeteWrapper | None = None
        self._report: RunReport | None = None

    # ---------------------------------------------------------------- placing

    def model_to_device(self) -> None:
        """Leave the model where it is: it moves when the optimizer is known."""

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        options = {"gradient_accumulation_steps": trainer.accumulate_grad_batches}
        wrapper = AutoHeteWrapper(
            self.lightning_module, self._the_optimizer(), **self._options, **options
        )
        self._wrapper = wrapper.to(self.root_device)

    def _the_optimizer(self) -> Optimizer:
        if not self.optimizers:  # nothing is trained: validate(), test(), predict()
            return AdamW([{"params": []}])
        if len(self.optimizers) > 1:
            raise ValueError(
                f"AutoHeteStrategy: configure_optimizers() gave {len(self.optimizers)} optimizers, "
                "expected one; use param groups, or a LightningModule for each model"
            )
        optimizer: Optimizer = self.optimizers[0]
        return optimizer

    def teardown(self) -> None:
        if self._wrapper is not None:
            self._report = self.report()
            self._wrapper.unwrap("cpu")
            self._wrapper = None
        super().teardown()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load it where it stands; Lightning would bring it to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    # ---------------------------------------------------------------- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_root(super().training_step, args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_root(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_root(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_root(super().predict_step, args, kwargs)

    def _as_root(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._wrapper is None or self._wrapper.run is None:
            return step(*args, **kwargs)
        return as_root(self._wrapper.run, step, args, kwargs)

    # ---------------------------------------------------------------- what is known

    @property
    def plan(self) -> Plan | None:
        """The plan in use, AutoHeteWrapper.plan; None while no training runs."""
        return None if self._wrapper is None else self._wrapper.plan

    def report(self) -> RunReport:
        """Return what was predicted and measured, also after fit()."""
        if self._wrapper is not None:
            return self._wrapper.report()
        if self._report is None:
            raise RuntimeError(
                "AutoHeteStrategy.report: nothing was trained yet, expected a run; call it during "
                "fit() or after"
            )
        return self._report
