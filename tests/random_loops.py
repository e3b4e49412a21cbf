"""A random training loop under plain PyTorch and under autohete; tests/recipes.py draws it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from models import batch
from oracle import Result
from recipe_parts import SCHEDULERS, build, make_optimizer, make_plan
from recipes import LENGTH, Recipe, Step
from torch import Tensor, nn

from autohete import AutoHeteWrapper

# ------------------------------------------------------------------- one run


class PlannedError(Exception):
    """The failure a loop was told to have."""


class Loop:
    """One run of a recipe: the objects of the present leg, and everything that was seen."""

    def __init__(self, recipe: Recipe, *, ours: bool) -> None:
        self.recipe = recipe
        self.ours = ours
        self.seen: list[Any] = []
        self.leg = -1
        self.drawn = 0  # batches
        self.saved: dict[str, Any] | None = None
        self._new_leg()

    def run(self) -> Result:
        torch.manual_seed(self.recipe.seed + 7)
        for index, step in enumerate(self.recipe.steps):
            self._step(step, index)
            if step.resumes:
                self._save()
                self._leave()
                self._new_leg()
        self._leave()
        return Result(self.seen, self.model, self.optimizer)

    # ---------------------------------------------------------------- legs

    def _new_leg(self) -> None:
        recipe = self.recipe
        self.leg += 1
        leg = recipe.legs[self.leg]
        self.kept_state: Any = None
        random_state = torch.get_rng_state()
        self.model = build(recipe)
        torch.set_rng_state(random_state)
        self.optimizer = make_optimizer(recipe, self.model)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
            if recipe.scaler
            else None
        )
        make = SCHEDULERS.get(recipe.scheduler)
        self.scheduler = make(self.optimizer) if make else None
        if self.saved is not None and not leg["load_late"]:
            self._load(self.model)
        self.trained: Any = self.model
        if self.ours and not leg.get("plain"):
            self.trained = self._wrap(leg)
        if self.saved is not None and leg["load_late"]:
            self._load(self.trained)

    def _wrap(self, leg: dict[str, Any]) -> AutoHeteWrapper:
        options: dict[str, Any] = {
            "early_updates": leg["early_updates"],
            "window": leg["window"],
            "max_grad_norm": self.recipe.max_grad_norm,
        }
        if "kinds" in leg:
            options["plan"] = make_plan(leg, self.model)
        else:
            options["strategy"] = leg["strategy"]
        trained = AutoHeteWrapper(
            self.model,
            self.optimizer,
            gpu_mem="16MiB",
            cpu_mem="64MiB",
            profile_path=None,
            **options,
        ).to("cpu")
        assert trained.run is not None
        if leg["delays"] is not None:
            trained.run.side.machine.set_random_delays(leg["delays"], 2e-4)
        trained.run.side.machine.set_poison(True)
        return trained

    def _leave(self) -> None:
        if self.trained is not self.model:
            self.trained.unwrap()

    def _save(self) -> None:
        state = {"model": self.trained.state_dict(), "optimizer": self.optimizer.state_dict()}
        for name in ("scaler", "scheduler"):
            if (part := getattr(self, name)) is not None:
                state[name] = part.state_dict()
        self.saved = copy.deepcopy(state)

    def _load(self, model: Any) -> None:
        assert self.saved is not None
        model.load_state_dict(self.saved["model"])
        self.optimizer.load_state_dict(self.saved["optimizer"])
        for name in ("scaler", "scheduler"):
            if (part := getattr(self, name)) is not None:
                part.load_state_dict(self.saved[name])

    # ---------------------------------------------------------------- one step

    def _step(self, step: Step, index: int) -> None:
        self._evaluate(step.evaluate_first)
        self.model.skipped = step.skipped_blocks
        self._change_hyper(step.hyper)
        with self._frozen(step.frozen):
            if step.fails:
                self._fail(step.fails)
            if step.closure:
                drawn = self.drawn

                def closure() -> Any:
                    self.drawn = drawn
                    self.optimizer.zero_grad()
                    self._backwards(step)
                    self._edit_gradients(step.gradients)
                    self._clip_where_autohete_does_not()
                    return self.seen[-1]

                self.seen.append(self.optimizer.step(closure))
            else:
                if step.zero == "before backward":
                    self.optimizer.zero_grad()
                self._backwards(step)
                self._step_optimizer(step)
        self._zero(step.zero)
        if self.scheduler is not None:
            self.scheduler.step(*[float(index)] * (self.recipe.scheduler == "Plateau"))
        with torch.no_grad():
            self._edit_weights(step.edit)
        self._evaluate(step.evaluate_last)

    def _step_optimizer(self, step: Step) -> None:
        if self.scaler is None:
            self._edit_gradients(step.gradients)
            self._clip_where_autohete_does_not()
            self.optimizer.step()
            return
        if not any(p.grad is not None for g in self.optimizer.param_groups for p in g["params"]):
            return  # the scaler refuses a step without gradients
        if step.gradients:
            self.scaler.unscale_(self.optimizer)
            self._edit_gradients(step.gradients)
        if any(p.grad is not None for g in self.optimizer.param_groups for p in g["params"]):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.append(self.scaler.get_scale())

    def _clip_where_autohete_does_not(self) -> None:
        if self.recipe.max_grad_norm is not None and self.trained is self.model:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)

    def _backwards(self, step: Step) -> None:
        for _ in range(step.micro_batches):
            self._backward(step)

    def _forward(self, step: Step) -> Tensor:
        length = step.lengths[self.drawn % len(step.lengths)]
        tokens, targets = batch(self.drawn + 100 * self.recipe.seed, length=length)
        self.drawn += 1
        with self._autocast():
            loss = self.trained(tokens, targets) / step.micro_batches
        self.seen.append(loss.item())
        return self._scaled(loss * (float("inf") if step.infinite else 1.0))

    def _scaled(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler is not None else loss

    def _backward(self, step: Step) -> None:
        loss = self._forward(step)
        self._evaluate(step.evaluate_between)
        if not loss.requires_grad:  # all of it is frozen
            return
        if step.backward == "twice":
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
        elif step.backward == "two losses":
            loss.backward(retain_graph=True)
            self._scaled(self._penalty()).backward()
        elif step.backward == "two forwards":
            other = self._forward(step)
            loss.backward()
            other.backward()
        elif step.backward == "summed":
            (loss + self._forward(step)).backward()
        elif step.backward == "grad" and self.recipe.checkpointing != "reentrant":
            parameters = [p for p in self.trained.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for p, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad + gradient
        else:
            loss.backward()

    def _penalty(self) -> Tensor:
        """A loss that uses weights without their modules."""
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        return 1e-3 * sum((p.float().square().sum() for p in wanted), start=torch.zeros(()))

    def _fail(self, where: str) -> None:
        def fail(*_: Any) -> None:
            raise PlannedError

        block = self.model.blocks[1]
        if where == "forward":
            handle = block.up.register_forward_pre_hook(fail)
        else:
            handle = block.up.register_full_backward_hook(fail)
        try:
            with self._autocast():
                loss = self.trained(*batch(self.drawn, length=LENGTH))
            if loss.requires_grad:
                self._scaled(loss).backward()
            self.seen.append("did not fail")
        except PlannedError:
            self.seen.append("failed")
        finally:
            handle.remove()

    # ---------------------------------------------------------------- what users do around it

    def _autocast(self) -> AbstractContextManager[Any]:
        kind = self.recipe.precision.removeprefix("autocast ")
        if kind == self.recipe.precision:
            return nullcontext()
        return torch.autocast("cpu", dtype=torch.bfloat16 if kind == "bf16" else torch.float16)

    @contextmanager
    def _frozen(self, parts: tuple[str, ...]) -> Iterator[None]:
        """Some parts are frozen during the step and join again after it."""
        held = [
            p
            for name, p in self.model.named_parameters()
            if name.startswith(parts) and p.requires_grad
        ] if parts else []  # fmt: skip
        for p in held:
            p.requires_grad_(False)
        yield
        for p in held:
            p.requires_grad_(True)

    def _evaluate(self, how: str) -> None:
        if not how:
            return
        if "mode" not in how or how == "inference_mode":
            self.trained.eval()
        contexts = {"inference_mode": torch.inference_mode, "graph thrown away": nullcontext}
        with contexts.get(how, torch.no_grad)(), self._autocast():
            self.seen.append(self.trained(*batch(self.drawn + 50, length=LENGTH)).item())
        self.trained.train()

    def _edit_gradients(self, how: str) -> None:
        parameters = [p for p in self.trained.parameters() if p.grad is not None]
        if not how or not parameters:
            return
        if how == "norm":
            self.seen.append(str(nn.utils.clip_grad_norm_(self.trained.parameters(), 0.3).item()))
        elif how == "value":
            nn.utils.clip_grad_value_(self.trained.parameters(), 1e-3)
        elif how == "halved":
            for p in parameters[::2]:
                p.grad.mul_(0.5)
        elif how == "replaced":
            for p in parameters[1::2]:
                p.grad = p.grad * 2
        elif how == "one dropped":
            parameters[len(parameters) // 2].grad = None
        elif how == "zeroed":
            parameters[0].grad.zero_()
        else:
            self.seen += [str(p.grad.norm().item()) for p in parameters]

    def _zero(self, how: str) -> None:
        if how == "none":
            self.optimizer.zero_grad()
        elif how == "zero":
            self.optimizer.zero_grad(set_to_none=False)
        elif how == "model":
            self.trained.zero_grad()
        elif how == "by hand":
            for p in self.trained.parameters():
                p.grad = None

    def _change_hyper(self, how: str) -> None:
        for group in self.optimizer.param_groups if how else ():
            if how == "lr":
                group["lr"] *= 0.7
            elif how == "betas":
                group["betas"] = (0.85, 0.95)
            else:
                group["weight_decay"] += 0.05

    def _edit_weights(self, how: str) -> None:
        if not how:
            return
        parameters = list(self.model.parameters())
        if how == "load":
            state = self.trained.state_dict()
            self.trained.load_state_dict({name: value * 0.9 for name, value in state.items()})
        elif how == "data":
            for p in parameters[::3]:
                p.data.mul_(0.5)
        elif how == "init":
            for p in self.model.blocks[1].parameters():
                nn.init.constant_(p, 0.01)
        elif how == "new storage":
            for p in parameters[1::4]:
                p.data = p.data * 0.95
        elif how == "swapped":  # as weight averages are
            kept = [p.detach().clone() for p in parameters]
            for p in parameters:
                p.mul_(0.3)
            self._evaluate("no_grad")
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)
        elif how == "exchanged":  # the same, by handing out other memory
            backup = [p.data for p in parameters]
            for p, value in zip(parameters, backup, strict=True):
                p.data = value * 0.3
            self._evaluate("no_grad")
            for p, value in zip(parameters, backup, strict=True):
                p.data = value
        elif how == "state cleared":
            self.optimizer.state.clear()
        elif how == "state kept and put back":
            if self.kept_state is None:
                self.kept_state = self.optimizer.state_dict()
                self.optimizer.load_state_dict({**self.kept_state, "state": {}})
            else:
                self.optimizer.load_state_dict(self.kept_state)
        else:
            for p in parameters:
                p.add_(1e-3)


def run(recipe: Recipe, *, ours: bool) -> Result:
    """Run the recipe; the losses of the result are everything the loop saw."""
    return Loop(recipe, ours=ours).run()
