"""optimizer.step() under autohete: what precedes the engine's updates, and whose rule they follow.

Adam, AdamW and their CPU twins are updated by the engine, unit by unit. Every other optimizer runs
its own step, whole, on the calling thread, once all tensors are in place.
"""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from autohete import _C
from autohete.cuda_update import update_on_cuda
from autohete.guard import Guard
from autohete.layout import check_gradients
from autohete.optim import CPUAdam, CPUAdamW, CPUOptimizer, hyper_of, loaded_state
from autohete.shown_state import Shown, State, fingerprint

if TYPE_CHECKING:
    from autohete.run import Run

_NATIVE = (AdamW, Adam, CPUAdamW, CPUAdam)
WholeStates = list[tuple[nn.Parameter, str, Tensor]]
_ARRAYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
_UPDATED = (torch.float32, torch.bfloat16, torch.float16)


def _local_of(value: Any) -> Any:
    if not hasattr(value, "to_local"):
        return value
    from autohete.rank_state import local_of  # torch.distributed.tensor takes a second to import

    return local_of(value)


def _taken(value: Any) -> Any:
    """Return what the engine may take for its own: a class that wears a guard, else a copy."""
    local = _local_of(value)
    if local is None or type(local) is Tensor or isinstance(local, Guard):
        return local
    return local.detach().as_subclass(Tensor).clone()


class OptimizerBridge:
    """The user's optimizer object, stepped by the engine while it is installed."""

    def __init__(self, run: Run, optimizer: Optimizer) -> None:
        self._run = weakref.proxy(run)
        self.optimizer = optimizer
        self._check_not_half_attached()
        self.native = (
            type(optimizer) in _NATIVE
            and getattr(optimizer, "moment_dtype", torch.float32) == torch.float32
            and not any(group.get("differentiable") for group in optimizer.param_groups)
        )
        self.amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
        # In the optimizer, but frozen and of a dtype that is not updated (integers, say).
        self._frozen = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if not p.requires_grad and p.dtype not in _UPDATED
        ]
        self._note_groups()
        self._places: dict[int, tuple[int, int]] = {}
        self._states: dict[tuple[int, int], State] = {}  # by (unit, parameter)
        self._shown: Shown | None = None
        self._moments_known: list[list[Tensor]] | None = None
        self._step_before: Any = None
        self._installed: Any = None
        self._loading: dict[str, Any] | None = None
        self._load_hooks: list[Any] = []
        self._whole: WholeStates | None = None

    def _check_not_half_attached(self) -> None:
        step = vars(self.optimizer).get("step")
        if getattr(getattr(step, "__func__", None), "_autohete_step", False):
            raise ValueError(
                "optimizer: this one is stepped by another autohete wrapper, expected a free one; "
                "call unwrap() on that wrapper first"
            )

    def _note_groups(self) -> None:
        self._group_of = self._groups()
        self._grouped = [list(group["params"]) for group in self.optimizer.param_groups]

    def _groups(self) -> dict[int, int]:
        frozen = {id(p) for p in self._frozen}
        return {
            id(p): index
            for index, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if id(p) not in frozen
        }

    def groups_changed(self) -> bool:
        """Whether a parameter joined, left or changed its param group since the last step."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        known = self._grouped
        if list(map(len, groups)) == list(map(len, known)) and all(
            map(operator.is_, chain.from_iterable(groups), chain.from_iterable(known))
        ):
            return False
        return self._groups() != self._group_of

    def _check_frozen(self) -> None:
        for parameter in self._frozen:
            if parameter.grad is not None:
                raise ValueError(
                    f"optimizer: a parameter of shape {tuple(parameter.shape)} is "
                    f"{parameter.dtype} and was frozen when it was wrapped, expected it to stay "
                    "so; unwrap() before training it and wrap again after"
                )

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has the parameter, of a dtype that can be updated."""
        return id(parameter) in self._group_of

    # ---------------------------------------------------------------- install and remove

    def install(self) -> None:
        """Replace step() on the optimizer object; hooks and schedulers go on working."""
        for u, unit in enumerate(self._run.units):
            for i, parameter in enumerate(unit.parameters):
                if self.updates(parameter):
                    self._places[id(parameter)] = (u, i)
                    self._run.engine.set_group(u, i, self._group_of[id(parameter)])
        self._step_before = vars(self.optimizer).get("step")
        original = type(self.optimizer).step
        # Ours gets torch's step hooks once, below; so what it falls back to must not have them.
        plain = getattr(original, "__wrapped__", original) if self.native else original
        bridge = weakref.ref(self)

        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            ours = bridge()
            if ours is None or ours._installed is None or optimizer is not ours.optimizer:
                return plain(optimizer, closure) if closure else plain(optimizer)
            return ours.step(closure)

        if self.native:
            # torch puts step hooks and the profiler's mark around a class's step like this.
            step = Optimizer.profile_hook_step(step)
        step._autohete_step = True  # type: ignore[attr-defined]
        # What schedulers look for, to know that step() sets _opt_called; ours does.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self._original = original
        self._installed = types.MethodType(step, self.optimizer)
        self.optimizer.step = self._installed  # type: ignore[method-assign]
        self._watch_loading()
        self.adopt_states()

    def _watch_loading(self) -> None:
        bridge = weakref.ref(self)

        def before(optimizer: Any, state_dict: dict[str, Any]) -> None:
            ours = bridge()
            if ours is not None:
                ours._loading = state_dict

        def after(optimizer: Any) -> None:
            ours = bridge()
            if ours is not None:
                ours._loaded()

        def saved(optimizer: Any, state_dict: dict[str, Any]) -> None:
            ours = bridge()
            if ours is not None and ours._whole is not None:
                ours._put_whole(state_dict, ours._whole)

        self._load_hooks = [
            self.optimizer.register_state_dict_post_hook(saved),
            self.optimizer.register_load_state_dict_pre_hook(before),
            self.optimizer.register_load_state_dict_post_hook(after),
        ]

    def remove(self) -> None:
        """Give step() back."""
        if self._installed is None:
            return
        for hook in self._load_hooks:
            hook.remove()
        if vars(self.optimizer).get("step") is self._installed:
            if self._step_before is None:
                del self.optimizer.step
            else:
                self.optimizer.step = self._step_before  # type: ignore[method-assign]
        self._installed = None

    # ---------------------------------------------------------------- the step

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Do what torch's step does, in its order: closure, scaler, clipping, update."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True
        if not self.native:
            call = (
                (lambda: self._original(optimizer, closure))
                if closure
                else (lambda: self._original(optimizer))
            )
            return self._run.step_elsewhere(call)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and self._run.exchange and self._run.exchange.own_rows:
            raise ValueError(
                "step(): a GradScaler reads every gradient and whole_gradients is False, expected "
                "it True; or train in bfloat16, which needs no scaler"
            )
        if found_inf is not None and float(found_inf) != 0:
            return loss
        limit = self._run.config.max_grad_norm
        exchange = self._run.exchange
        if limit is not None and exchange and exchange.own_rows:
            exchange.clip_own_rows(limit)
        elif limit is not None:
            nn.utils.clip_grad_norm_(self._run.model.parameters(), limit)
        with self._run.lock:
            self._run.step()
        return loss

    def commit(self) -> list[list[Tensor]]:
        """Hand this step's hyper-parameters to the engine; return the moments by unit."""
        engine = self._run.engine
        check_gradients(engine, self._run.units)
        self._check_frozen()
        if self.groups_changed():
            self._regroup()
        self.adopt_states()
        for u, i in engine.missing_state():
            engine.make_state(u, i)
            self._publish(u, i)
        hypers = self.hypers()
        engine.commit(hypers)
        self._run.early.step_taken(hypers[0].grad_scale if hypers else 1.0)
        for u, i in engine.take_relaid():
            self._publish(u, i)
        if self._run.side.torch_device.type != "cpu":
            managed = self._run.plans.is_managed
            states = {place: state.local for place, state in self._states.items()}
            update_on_cuda(self._run.units, managed, states, hypers, self._group_of, self.part_of)
        self._run.bring_device_parts()
        return self._moments()

    def _moments(self) -> list[list[Tensor]]:
        """What this rank has of the moments, by unit; made anew when some were replaced."""
        if self._moments_known is None:
            self._moments_known = [[] for _ in self._run.units]
            for (u, _), state in self._states.items():
                self._moments_known[u] += [t for key, t in state.local.items() if key != "step"]
        return self._moments_known

    def hypers(self, grad_scale: float = 1.0) -> list[_C.AdamHyper]:
        """Return the param groups' numbers as they stand.

        Args:
            grad_scale: what gradients are multiplied by where no scaler says it (yet).
        """
        return [self._hyper(group, grad_scale) for group in self.optimizer.param_groups]

    def _hyper(self, group: dict[str, Any], grad_scale: float) -> _C.AdamHyper:
        if group.get("amsgrad") and not self.amsgrad:
            raise ValueError(
                "optimizer: amsgrad is True in a param group, expected False as when it was "
                "wrapped; unwrap() before turning it on and wrap again after"
            )
        adamw = type(self.optimizer) is not Adam
        decoupled = bool(group.get("decoupled_weight_decay", adamw))
        return hyper_of(group, self.optimizer, decoupled=decoupled, grad_scale=grad_scale)

    def _regroup(self) -> None:
        """Param groups changed: tell the engine who is where, and who is not there any more."""
        self._note_groups()
        self._shown = None
        if self._group_of.keys() - self._places.keys():
            raise ValueError(
                "optimizer: a parameter was added after wrapping, expected the parameters it "
                "had; unwrap() before add_param_group() and wrap again after"
            )
        for key, place in self._places.items():
            self._run.engine.set_group(*place, self._group_of.get(key, -1))

    # ---------------------------------------------------------------- optimizer.state

    def adopt_states(self) -> None:
        """Take up state the user put there: loaded, replaced, or cleared."""
        if not self.native:
            return
        engine, states = self._run.engine, self.optimizer.state
        elsewhere = set(engine.replaced_state())  # the tensors are those shown, the memory is not
        if not elsewhere and self._shown is not None and self._shown.is_still(states):
            return
        for u, unit in enumerate(self._run.units):
            for i, parameter in enumerate(unit.parameters):
                given = states.get(parameter)
                known = self._states.get((u, i)) if (u, i) not in elsewhere else None
                if known and given is known.given and fingerprint(given) == known.fingerprint:
                    continue
                if not self.updates(parameter):
                    continue
                if given:
                    self._complete(parameter, given)
                if not given or "exp_avg" not in given:
                    if self._states.pop((u, i), None) is not None:
                        self._moments_known = None
                        engine.forget_state(u, i)
                    continue
                if known and all(given.get(key) is value for key, value in known.shown.items()):
                    continue
                step = torch.as_tensor(given["step"], device="cpu").float()
                arrays = [_taken(given.get(key)) for key in _ARRAYS]
                engine.adopt_state(u, i, step, *arrays)
                self._publish(u, i)
        self._remember_shown()

    def _remember_shown(self) -> None:
        places = [(u, i, p) for u, unit in enumerate(self._run.units)
                  for i, p in enumerate(unit.parameters) if self.updates(p)]  # fmt: skip
        known = [self._states.get((u, i)) for u, i, _ in places]
        given = [None if state is None else state.given for state in known]
        self._shown = Shown([p for *_, p in places], given)

    def _complete(self, parameter: nn.Parameter, given: dict[str, Any]) -> None:
        """Make what the user took out of a state, where the optimizer would do so at its step."""
        if isinstance(self.optimizer, CPUOptimizer) and (grad := parameter.grad) is not None:
            group = self.optimizer.param_groups[self._group_of[id(parameter)]]
            self.optimizer._complete(parameter, grad, given, group)

    def _loaded(self) -> None:
        """Torch has cast the fp32 state of half parameters down: take it from the dict again."""
        state_dict, self._loading = self._loading, None
        if not self.native or state_dict is None:
            return
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for name, param in zip(names, params, strict=True):
            if name in state_dict["state"] and param.dtype != torch.float32:
                self.optimizer.state[param] = loaded_state(param, state_dict["state"][name])

    def _publish(self, u: int, i: int) -> None:
        """Show the engine's tensors as the parameter's state."""
        state = self._run.engine.state(u, i)
        parameter = self._run.units[u].parameters[i]
        ranks, shown = self._run.ranks, dict(state)
        if ranks is not None and self._run.engine.part(u, i)[0]:
            before = self._states.get((u, i))
            for key, part in state.items():
                if key != "step":
                    if before is not None and before.local.get(key) is part:
                        shown[key] = before.shown[key]
                    else:
                        shown[key] = ranks.shown(part, parameter)
        given = self.optimizer.state[parameter]
        given.update(shown)
        self._states[(u, i)] = State(shown, state, given, fingerprint(given))
        self._moments_known = self._shown = None

    @property
    def state_keys(self) -> tuple[str, ...]:
        """What the state of a parameter may consist of."""
        more = ("max_exp_avg_sq",) if self.amsgrad else ()
        return ("step", "exp_avg", "exp_avg_sq", *more, "master")

    def memory_for_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the tensors of a parameter's state, shown as the optimizer's, to be overwritten.

        Nothing may be in flight.
        """
        u, i = self._places[id(parameter)]
        if (u, i) not in self._states:
            self._run.engine.make_state(u, i)
        self._publish(u, i)
        return self._states[(u, i)].local

    def part_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Return the rows of something shaped like the parameter that this rank updates."""
        is_shared, first, num = self._run.engine.part(*self._places[id(parameter)])
        return whole.narrow(0, first, num) if is_shared else whole

    def hold_whole(self) -> None:
        """Let state_dict() on the first rank give the whole state as it is now. Collective.

        For loops that save on one rank alone, until let_go_of_whole().
        """
        ranks = self._run.ranks
        if ranks is not None:
            whole = self.whole_states()
            self._whole = whole if ranks.rank == 0 else None

    def let_go_of_whole(self) -> None:
        """state_dict() gives each rank's part again."""
        self._whole = None

    def _put_whole(self, state_dict: dict[str, Any], whole: WholeStates) -> None:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        number = {id(p): index for index, p in enumerate(params)}
        state: dict[int, dict[str, Any]] = {k: dict(v) for k, v in state_dict["state"].items()}
        for parameter, key, value in whole:
            state[number[id(parameter)]][key] = value
        state_dict["state"] = state

    def whole_states(self) -> WholeStates:
        """Bring every state that the ranks have parts of together. Collective."""
        return [
            (self._run.units[u].parameters[i], key, value.full_tensor())
            for (u, i), state in sorted(self._states.items(), key=lambda item: item[0])
            for key, value in state.shown.items()
            if hasattr(value, "full_tensor")
        ]

    def publish_states(self) -> None:
        """Show them again after they moved to another device."""
        for u, i in list(self._states):
            self._publish(u, i)
