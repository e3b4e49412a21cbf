"""A Lightning Trainer with AutoHeteStrategy does what it does without, to the bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'autohete[test]'")
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from models import TinyGPT, batch
from oracle import Result, adamw, assert_bit_equal, forced_plan
from torch.utils.data import DataLoader, Dataset

from autohete.integrations.lightning import AutoHeteStrategy

pytestmark = pytest.mark.filterwarnings("ignore")


class Data(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        tokens, targets = batch(index, rows=1)
        return tokens[0], targets[0]


class Language(LightningModule):
    """Its steps call the inner model, not the LightningModule itself."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = TinyGPT(layers=3)
        self.automatic_optimization = not manual

    def training_step(self, both: Any, index: int) -> Any:
        loss = self.net(*both)
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.clip_gradients(self.optimizers(), 0.3, "norm")
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, both: Any, index: int) -> None:
        self.log("val", self.net(*both))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Seen(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.optimizer: Any = None
        self.strategy_device: Any = None

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, *_: Any) -> None:
        self.losses.append(out["loss"].item())
        self.losses.append(module.net.head.weight.norm().item())  # finished weights are seen

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val"]))

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.optimizer = trainer.optimizers[0]


def strategy(model: Language, **options: Any) -> AutoHeteStrategy:
    options = options or {"plan": forced_plan(model, "all+c")}
    return AutoHeteStrategy("16MiB", "64MiB", profile_path=None, **options)


def fit(
    ours: bool, *, manual: bool = False, resume: Any = None, budget: Any = None, folder: Any = ".",
    **options: Any,
) -> tuple[Result, Trainer]:  # fmt: skip
    seed_everything(1, verbose=False)
    model = Language(manual)
    seen = Seen()
    if ours:
        options["strategy"] = strategy(model, **(budget or {}))
    loader = partial(DataLoader, Data(), batch_size=2)
    trainer = Trainer(
        accelerator="cpu", max_epochs=options.pop("max_epochs", 2), logger=False,
        callbacks=[seen, ModelCheckpoint(folder, save_last=True, filename="{epoch}")],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    trainer.fit(model, loader(), loader(), ckpt_path=resume)
    return Result(seen.losses, model, seen.optimizer), trainer


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3},
    "clipping by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "manual optimization": {"manual": True},
}


@pytest.mark.parametrize("case", CASES)
def test_same_losses_weights_and_moments_as_without_the_strategy(case):
    ours, trainer = fit(True, **CASES[case])
    expected, _ = fit(False, **CASES[case])
    assert_bit_equal(ours, expected)
    assert trainer.strategy.report().num_steps > 0
    assert all(type(p) is torch.nn.Parameter for p in ours.model.parameters())


def test_a_planned_run_measures_its_first_step_and_stays_within_the_budget():
    ours, trainer = fit(True, budget={"strategy": "autohete"})
    assert_bit_equal(ours, fit(False)[0])
    report = trainer.strategy.report()
    assert report.device_peak_measured_bytes <= 16 << 20


@pytest.mark.parametrize(("writer", "reader"), [(True, False), (False, True), (True, True)])
def test_a_run_is_resumed_with_and_without_the_strategy(writer, reader, tmp_path):
    fit(writer, folder=tmp_path / "first", max_epochs=1)
    saved = tmp_path / "first" / "last.ckpt"
    ours, _ = fit(reader, resume=saved)
    expected, _ = fit(False, resume=saved)
    assert_bit_equal(ours, expected)


def test_evaluation_without_training_gives_the_plain_figures():
    figures = []
    for ours in (True, False):
        model = Language()
        options = {"strategy": strategy(model)} if ours else {}
        trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, **options)
        figures.append(trainer.test(model, DataLoader(Data(), batch_size=3), verbose=False))
    assert figures[0] == figures[1]


def test_what_cannot_be_honoured_is_refused_in_words():
    class Two(Language):
        def configure_optimizers(self) -> Any:
            return [adamw(self), adamw(self)]

    model = Two(manual=True)
    trainer = Trainer(accelerator="cpu", logger=False, strategy=strategy(model), max_steps=1)
    with pytest.raises(ValueError, match="gave 2 optimizers, expected one"):
        trainer.fit(model, DataLoader(Data()))
    with pytest.raises(ValueError, match="AutoHeteStrategy: .*gpu_memory"):
        AutoHeteStrategy(gpu_memory=5)
    with pytest.raises(ValueError, match="accumulate_grad_batches"):
        AutoHeteStrategy("1GiB", gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match="nothing was trained yet"):
        AutoHeteStrategy("1GiB").report()
