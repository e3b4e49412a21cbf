"""ShardedUpdates: a model that fully_shard() has cut, updated beside the next forward.

FSDP2 with CPUOffloadPolicy keeps each rank's shards of parameters, gradients and state on the host.
step() hands their updates, unit by unit, to a thread of its own and returns. They are made in the
order in which forward came to the units; FSDP2's gathering of a unit waits for that unit alone. So
does every reader: what is being updated wears a guard (`autohete/shard_guard.py`).

Nothing of this speaks to other ranks: collectives are FSDP2's and stay on the thread they were on.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from autohete.fsdp_units import ShardedUnit, units_of
from autohete.optim import CPUOptimizer
from autohete.optim.base import ReadUpdate
from autohete.shard_guard import ShardGuards

__all__ = ["ShardedUpdates"]

_not_traced: Any = torch._disable_dynamo  # type: ignore[attr-defined]


class ShardedUpdates:
    """Let a CPU optimizer update a model sharded by fully_shard() beside the next forward.

    The loop does not change: backward, clipping, step(), zero_grad(). The numbers are those of the
    optimizer by itself, to the bit. After step() parameters, gradients and state wait when they
    are touched; views and arrays of their memory taken before do not: synchronize() first.

    An update that fails raises at the first touch of its unit. Then a checkpoint can be loaded, the
    model's part before the optimizer's load_state_dict(); until that, or remove(), forward and
    step() raise it again.

    Args:
        model: the outermost module that fully_shard() was called on, offloaded by
            CPUOffloadPolicy. Parameters that it does not shard are updated in step() itself.
        optimizer: autohete.CPUAdamW, CPUAdam, CPULion or CPUSGD of its parameters.

    Raises:
        ValueError: the model is not sharded, or not on the CPU; the optimizer is another.
    """

    def __init__(self, model: nn.Module, optimizer: CPUOptimizer) -> None:
        if not isinstance(optimizer, CPUOptimizer):
            raise ValueError(
                f"ShardedUpdates: optimizer is {type(optimizer).__name__}, expected one of "
                "autohete's CPU optimizers; CPUAdamW takes the arguments of torch.optim.AdamW"
            )
        if optimizer._beside is not None:
            raise ValueError(
                "ShardedUpdates: the optimizer has one already, expected none; remove() that first"
            )
        self._optimizer = optimizer
        self._units = [_Unit(unit) for unit in units_of(model)]
        self._check_parameters()
        self._lane = ThreadPoolExecutor(max_workers=1, thread_name_prefix="autohete update")
        self._process = os.getpid()
        self._seen: list[_Unit] = []  # as forward came to them since the last step
        self._hooks = [
            module.register_forward_pre_hook(self._arrival(unit), prepend=True)  # before FSDP2's
            for unit in self._units
            for module in unit.sharded.modules
        ]
        self._order = list(self._units)
        optimizer._beside = self
        _settle_before_fork(self)

    @property
    def order(self) -> list[str]:
        """The units' names, in the order in which they are updated."""
        return [unit.sharded.name for unit in self._order]

    def synchronize(self) -> None:
        """Wait until every update that began is made.

        Raises:
            RuntimeError: one of them failed.
        """
        for unit in self._order:
            unit.ready()

    def remove(self) -> None:
        """Wait, and give the updates back to step().

        Raises:
            RuntimeError: one of them failed, and nothing has raised it yet; it is removed even so.
        """
        try:
            self.wait()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._lane.shutdown()
            if self._optimizer._beside is self:
                self._optimizer._beside = None

    # ---------------------------------------------------------------- called by the optimizer

    def wait(self) -> None:
        """Wait for all updates; raise a failure that has not been raised yet."""
        failures = []
        for unit in self._order:
            try:
                unit.settle()
            except RuntimeError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def loaded(self) -> None:
        """Forget failures: the values are a checkpoint's."""
        for unit in self._order:
            unit.failure = None

    def take(self, hypers: list[Any]) -> None:
        """Begin the updates of a step; nothing is begun where reading them raises."""
        self.synchronize()
        self._follow_forward()
        updates = {id(update.param): update for update in self._optimizer.read_updates(hypers)}
        beside: list[tuple[_Unit, list[ReadUpdate]]] = []
        for unit in self._order:
            mine = [updates.get(id(p)) for p in unit.sharded.parameters()]
            mine_read = [u for u in mine if u is not None and u.values is not None]
            if mine_read and not any(update.after for update in mine_read):
                beside.append((unit, mine_read))
                for update in mine_read:
                    del updates[id(update.param)]
        self._optimizer.make_updates(list(updates.values()))  # unsharded, or of an odd layout
        try:
            for unit, mine_read in beside:
                unit.begin(mine_read, self._optimizer.state, self._run)
        except BaseException:  # Ctrl-C: nothing may be in flight unguarded
            self.synchronize()
            raise

    def _run(self, updates: list[ReadUpdate]) -> Future[None]:
        if os.getpid() == self._process:
            return self._lane.submit(self._optimizer.make_updates, updates)
        self._optimizer.make_updates(updates)  # a forked child has none of our threads
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # ---------------------------------------------------------------- order

    def _arrival(self, unit: _Unit) -> Any:
        """Return what waits for a unit when forward comes to it, and remembers that it did."""
        ours = weakref.ref(self)

        @_not_traced  # type: ignore[untyped-decorator]
        def arrive(module: nn.Module, inputs: Any) -> None:
            unit.ready()
            updates = ours()
            if updates is not None and unit not in updates._seen:
                updates._seen.append(unit)

        return arrive

    def _follow_forward(self) -> None:
        """Units come in the order of the last forward; those it did not come to, last."""
        seen, self._seen = self._seen, []
        self._order = seen + [unit for unit in self._order if unit not in seen]

    def _check_parameters(self) -> None:
        mine = {id(p) for unit in self._units for p in unit.sharded.parameters()}
        theirs = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        if not mine & theirs:
            raise ValueError(
                "ShardedUpdates: the optimizer has none of the model's shards, expected its "
                "parameters; make the optimizer after fully_shard()"
            )


class _Unit:
    """One unit: the update that runs, and the guards that wait for it."""

    def __init__(self, sharded: ShardedUnit) -> None:
        self.sharded = sharded
        self._guards = ShardGuards(self.settle)
        self._update: Future[None] | None = None
        self._lock = threading.Lock()  # of the end of an update
        self.failure: str | None = None  # of an update; its values are not those of any step

    def begin(
        self,
        updates: list[ReadUpdate],
        state: dict[Any, dict[str, Any]],
        run: Callable[[list[ReadUpdate]], Future[None]],
    ) -> None:
        """Begin its updates; whoever touches what they read or write waits for them."""
        read = [[update.param.grad, *state[update.param].values()] for update in updates]
        self._update = run(updates)
        self._guards.wear(update.param for update in updates)
        self._guards.wear(value for values in read for value in values if _is_tensor(value))
        self._guards.wear(self.sharded.gathered_from())

    def settle(self) -> None:
        """Wait for this unit, and raise what its update raised, once. From any thread."""
        update = self._update
        if update is None:
            return
        try:
            self._result(update)
        except Exception as error:
            self.failure = (
                f"autohete: the update of {self.sharded.name} failed ({error}), so its values are "
                "not those of any step; go on from a checkpoint"
            )
            self._end(update)
            raise RuntimeError(self.failure) from error
        self._end(update)

    def ready(self) -> None:
        """Wait for this unit, and refuse it where an update of it failed."""
        self.settle()
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def _end(self, update: Future[None]) -> None:
        with self._lock:
            if self._update is update:  # else another thread was faster, and the next may run
                self._guards.take_off()
                self._update = None

    @staticmethod
    def _result(update: Future[None]) -> None:
        update.result()


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _settle_before_fork(updates: ShardedUpdates) -> None:
    """A child has no thread that would end what is in flight."""
    ours = weakref.ref(updates)

    def settle() -> None:
        alive = ours()
        if alive is not None:
            alive.synchronize()

    os.register_at_fork(before=settle)
