"""Updates ahead of step(): what is expected of the loop, and what clipping is told meanwhile.

The engine can update a unit while backward goes on, beside its present state, if it knows what
step() will ask for. This learns it: how many backward passes come before a step, and whether the
gradients are clipped. A wrong guess costs time, never a bit: step() takes over what ran ahead only
where it would do the very same. See docs/adr/0008-updates-ahead-of-step.md.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from autohete.first_gradients import FirstGradients
from autohete.guard import UNSCALE
from autohete.planning import format_bytes

if TYPE_CHECKING:
    from autohete.run import Run

_log = logging.getLogger("autohete")
_JUDGED = 3  # steps together; where most of their work was in vain, updates wait for a while
_STEPS_OFF = 50
_SHARE_OF_MEASURED_MEMORY = 0.6
_WORTHWHILE_WAIT = 0.005  # of a step: then the first half of a layer's gradients goes first
_STEPS_IN_HALVES = 50


class EarlyUpdates:
    """The habit of one loop, and the engine's permission to act on it."""

    def __init__(self, run: Run, enabled: bool) -> None:
        self._run = run
        self._enabled = enabled and run.bridge.native
        self._in_place = run.config.early_updates == "in_place"  # the habit is promised
        self._units_ready: int | None = None  # None: room was not asked for yet
        self._backwards = 0  # since the last step
        self._last_count = 0  # before the last step
        # Backward passes before a step; 0: not known.
        self._habit = run.config.gradient_accumulation_steps if self._in_place else 0
        self._clips = False  # the last step's gradients were asked for their norms
        self._asked = False  # this step's were
        self._grad_scale = 1.0  # of the last step: what a scaler handed over
        self._unscaled_by = 1.0  # before the last step, by a scaler's unscale_()
        self._unscaled_now = 1.0  # before this one
        self._counted = (0, 0)  # updates ahead, and those in vain, up to the last step
        self._recent: deque[tuple[int, int]] = deque(maxlen=_JUDGED)  # (updates ahead, in vain)
        self._resume_at = 0
        self._told = False
        num_units = len(run.units)
        self._uses = [0] * num_units  # calls in forward since the last backward
        self._visits_left = [0] * num_units  # of the present backward
        self._first = FirstGradients(run.units, lambda index: run.send_first_gradients(index))
        # Other systems know layers alone; and what is averaged over ranks goes as it is.
        self._splits = self._enabled and run.config.strategy == "autohete" and run.ranks is None
        self._halves_until = 0
        self._waited = 0.0  # up to the last step, for updates and uploads

    # ---------------------------------------------------------------- what the loop does

    def forward_begins(self) -> None:
        """A forward that backward will follow: gradients of before are going to change."""
        self._run.engine.withdraw_ahead()

    def backward_begins(self) -> None:
        """The outermost backward has begun and no gradient has changed yet."""
        run = self._run
        run.engine.withdraw_ahead()
        self._visits_left, self._uses = self._uses, [0] * len(self._uses)
        self._backwards += 1
        if not self._enabled or self._backwards != self._habit:
            return
        if run.bridge.groups_changed():  # their numbers are those of the last step
            return
        if self._in_place:
            hypers = run.bridge.hypers()
            run.engine.expect_step(hypers, update=True, measure=False, in_place=True)
            return
        update = run.num_steps >= self._resume_at and self._reserve()
        unscales = self._unscaled_by != 1.0
        if update or self._clips or unscales:
            run.engine.expect_step(
                run.bridge.hypers(self._grad_scale * self._unscaled_by),
                update=update,
                measure=self._clips or unscales,
                norm_scale=self._unscaled_by,  # clipping comes after
            )

    def used(self, index: int) -> None:
        """A unit was called in a forward that backward will follow."""
        self._uses[index] += 1

    def visited(self, index: int) -> bool:
        """Backward is through with a call of the unit; returns whether that was the last one.

        A unit that is called several times (tied weights make one unit of two modules) gets
        gradients until then. What was not counted has its last gradient when backward ends.
        """
        self._visits_left[index] -= 1
        return self._visits_left[index] == 0

    def in_last_visit(self, index: int) -> bool:
        """Whether backward is in the last call of the unit that was counted."""
        return self._visits_left[index] == 1

    def detach(self) -> None:
        """The parameters are the user's alone again."""
        self._first.remove()

    def _split_gradients(self, counters: dict[str, Any]) -> None:
        """Let the gradients of some layers go in halves while steps wait for updates."""
        run = self._run
        waited = counters["wait_update_seconds"] + counters["wait_upload_seconds"]
        now, self._waited = waited - self._waited, waited
        if run.step_seconds and now > _WORTHWHILE_WAIT * run.step_seconds[-1]:
            self._halves_until = run.num_steps + _STEPS_IN_HALVES
        wanted = run.num_steps < self._halves_until
        if wanted and not self._first.installed:
            self._first.install()
        elif not wanted and self._first.installed:
            self._first.remove()

    def step_taken(self, grad_scale: float) -> None:
        """Learn from a step: how many updates had been done ahead of it, and how many in vain."""
        counters = self._run.engine.counters()
        ahead = counters["updates_ahead"] - self._counted[0]
        in_vain = counters["withdrawn"] + counters["updates_redone"] - self._counted[1]
        self._counted = (self._counted[0] + ahead, self._counted[1] + in_vain)
        if self._in_place:
            self._backwards = 0
            return
        if self._splits:
            self._split_gradients(counters)
        if self._backwards == self._last_count:
            self._habit = self._backwards
        elif self._backwards != self._habit:
            self._habit = 0
        self._last_count, self._backwards = self._backwards, 0
        self._clips, self._asked = self._asked, False
        self._unscaled_by, self._unscaled_now = self._unscaled_now, 1.0
        self._grad_scale = grad_scale
        if self._is_worth_it(ahead, in_vain):
            return
        self._recent.clear()
        self._resume_at = self._run.num_steps + _STEPS_OFF
        if not self._told:
            self._told = True
            _log.info(
                "autohete: gradients, parameters or learning rates change between backward() and "
                "step(), so updates wait for step() (looked at again every %d steps)",
                _STEPS_OFF,
            )

    def _is_worth_it(self, ahead: int, in_vain: int) -> bool:
        """Whether most of the last steps' work was used; of a redone update it may be told late."""
        if ahead or in_vain:
            self._recent.append((ahead, in_vain))
        done = sum(ahead for ahead, _ in self._recent)
        void = sum(in_vain for _, in_vain in self._recent)
        return len(self._recent) < _JUDGED or 2 * void <= done

    def plan_changed(self) -> None:
        """The engine was configured anew; its second copies are gone."""
        self._units_ready = None

    def _reserve(self) -> bool:
        if self._units_ready is None:
            engine = self._run.engine
            self._units_ready = engine.reserve_ahead(self._room())
            _log.info(
                "autohete: %d of %d units can be updated before step(), with %s more host memory",
                self._units_ready,
                len(self._run.units),
                format_bytes(engine.bytes_reserved_ahead()),
            )
        return self._units_ready > 0

    def _room(self) -> int:
        """Bytes that the second copies may take: what cpu_mem leaves, where the user gave it.

        A budget that was only measured is not used up: the loop's own data has to fit beside.
        """
        run = self._run
        share = 1.0 if run.config.cpu_mem is not None else _SHARE_OF_MEASURED_MEMORY
        return max(int(share * run.cpu_mem) - run.side.host_peak(), 0)

    # ---------------------------------------------------------------- what clipping asks for

    def answer(self, index: int, func: Any, args: tuple[Any, ...]) -> Any:
        """Answer for a gradient that is not to be looked at: its norm, and a factor for it.

        `torch.nn.utils.clip_grad_norm_` asks each gradient for its norm and multiplies each by a
        factor; `GradScaler.unscale_` asks whether each is finite, and multiplies too. The norm was
        taken (by torch's own function) when the gradient landed, and a finite one has finite
        gradients; the factor is applied by the update, in the same float32 multiplication. Returns
        NotImplemented where the gradient has to be looked at after all.
        """
        gradient, *rest = args
        if len(rest) != 1:
            return NotImplemented
        if func is torch.linalg.vector_norm:
            return self._norm(index, gradient, rest[0])
        if func is UNSCALE:
            return self._unscaled(index, gradient, rest[0])
        return self._scaled(index, gradient, rest[0])

    def _norm(self, index: int, gradient: torch.Tensor, order: Any) -> Any:
        if order != 2:
            return NotImplemented
        self._asked = True
        place = self._run.engine.place_of(index, gradient)
        norm = None if place is None else self._run.engine.gradient_norm(index, place)
        return NotImplemented if norm is None else norm.to(self._run.side.torch_device)

    def _unscaled(self, index: int, gradient: torch.Tensor, factor: float) -> Any:
        self._unscaled_now = factor
        engine = self._run.engine
        place = engine.place_of(index, gradient)
        if place is None or not engine.gradient_is_finite(index, place):
            return NotImplemented
        if factor != 1.0 and not engine.scale_gradient(index, place, factor):
            return NotImplemented
        return gradient

    def _scaled(self, index: int, gradient: torch.Tensor, factor: Any) -> Any:
        if not isinstance(factor, (float, torch.Tensor)):
            return NotImplemented
        if isinstance(factor, torch.Tensor) and (factor.dim() or factor.dtype != torch.float32):
            return NotImplemented
        if float(factor) == 1.0:
            return gradient  # to the bit what multiplying would give
        place = self._run.engine.place_of(index, gradient)
        if place is None or not self._run.engine.scale_gradient(index, place, float(factor)):
            return NotImplemented
        return gradient
