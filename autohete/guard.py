"""Tensors whose bytes are moving wear a guard: the first touch waits until they are final.

A parameter, gradient or moment is made an instance of a guard class while its unit's bytes are on
their way or being updated, and an instance of its own class again while the unit computes and after
the first touch. The object, its storage and its identity stay the same. So a bare reference
(`p.norm()` right after `step()`) sees the newest values, at no cost inside forward and backward.

Not seen: views and NumPy arrays taken earlier, `torch.tensor(p)`, raw pointers. `synchronize()`
covers those. See docs/adr/0002-guarded-tensors.md.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad

from autohete import _C

_Tensor: Any = torch.Tensor  # descriptors: their types are not declared

# What a tensor answers without looking at its bytes. Everything else settles it first.
_METADATA = {
    getattr(_Tensor, name).__get__
    for name in (
        "dtype device layout shape ndim grad requires_grad is_leaf grad_fn is_cuda is_cpu is_meta "
        "is_sparse is_quantized is_nested output_nr itemsize nbytes"
    ).split()
    if hasattr(torch.Tensor, name)
}
_METADATA |= {_Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.requires_grad.__set__}
_METADATA |= {
    getattr(torch.Tensor, name)
    for name in (
        "size stride dim numel nelement element_size is_contiguous is_floating_point is_complex "
        "storage_offset __len__ __hash__ requires_grad_ register_hook get_device is_signed "
        "register_post_accumulate_grad_hook is_inference"
    ).split()
}


_GET_GRADIENT = _Tensor.grad.__get__
# Who takes gradients and only hands them to functions that ask a guard first.
_HARMLESS = {
    clip_grad.__file__,
    grad_scaler.__file__,
    sys.modules[torch.optim.Optimizer.__module__].__file__,
}

# What clipping asks of a gradient: its unit may know without looking.
_ANSWERED = {torch.linalg.vector_norm, torch.Tensor.mul_}
# What a GradScaler asks of all gradients at once: whether they are finite, and a factor for them.
UNSCALE: Any = torch._amp_foreach_non_finite_check_and_unscale_


# torch.compile'd functions of the user's must not trace into it: settling changes classes.
_not_traced: Any = torch._disable_dynamo  # type: ignore[attr-defined]


def _asking_file() -> str:
    """The file of the code that touched a guard; not what keeps torch.compile out of here."""
    frame = sys._getframe(3)
    if frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    while frame.f_back and frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py")):
        frame = frame.f_back
    return frame.f_code.co_filename


def _guarded(values: Any) -> Iterator[Guard]:
    for value in values:
        if isinstance(value, Guard):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _guarded(value)
        elif isinstance(value, dict):
            yield from _guarded(value.values())


class Guard:
    """What all guard classes share. `settle` belongs to one unit."""

    settle: Callable[[], None]
    answer: Callable[[Any, tuple[Any, ...]], Any] | None = None
    """(func, args) -> the result, or NotImplemented; of gradients that are only leaving."""

    gradient_taken: Callable[[], None] | None = None
    """Called when somebody gets a parameter's gradient: makes it final first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Not compiled, but asked of thousands of gradients when they are clipped: to keep the
        # compiler out by _not_traced always would cost as much as the answer.
        if torch.compiler.is_compiling():
            return _answer_untraced(cls, func, args, kwargs or {})
        return cls._answer_call(func, args, kwargs or {})

    @classmethod
    def _answer_call(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
                if result is not None and func == _GET_GRADIENT and cls.gradient_taken:
                    cls._hand_out()
                return result
        if func in _ANSWERED and not kwargs and isinstance(args[0], Guard):
            answer = type(args[0]).answer
            result = answer(func, args) if answer else NotImplemented
            if result is not NotImplemented:
                return result
        if func is UNSCALE and not kwargs:
            left = Guard._still_to_unscale(args[0], float(args[2]))
            if not left:
                return None
            args = (left, *args[1:])
        for tensor in list(_guarded((*args, *kwargs.values()))):
            Guard._settled(tensor)  # the first may have unguarded the others
        return func(*args, **kwargs)  # on plain tensors; autograd.grad runs user code inside

    @staticmethod
    def _still_to_unscale(gradients: list[Any], factor: float) -> list[Any]:
        def is_done(gradient: Any) -> bool:
            answer = type(gradient).answer if isinstance(gradient, Guard) else None
            return answer is not None and answer(UNSCALE, (gradient, factor)) is not NotImplemented

        return [gradient for gradient in gradients if not is_done(gradient)]

    @classmethod
    def _hand_out(cls) -> None:
        """What C++ code, DLPack or a raw pointer does with a gradient is seen by nobody."""
        if cls.gradient_taken and _asking_file() not in _HARMLESS:
            cls.gradient_taken()

    def _settled(self) -> Any:
        """Settle, and be an instance of the own class again (also when the unit let go of it)."""
        if isinstance(self, Guard):  # an earlier one of the same unit may have done it
            type(self).settle()
        if isinstance(self, Guard):
            own: Any = nn.Parameter if isinstance(self, nn.Parameter) else torch.Tensor
            self.__class__ = own
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._settled(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._settled().__reduce_ex__(protocol)


@_not_traced  # type: ignore[untyped-decorator]
def _answer_untraced(guard: type[Guard], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return guard._answer_call(func, args, kwargs)


def settle_guarded(func: Any, tensors: list[torch.Tensor]) -> None:
    """Settle what is about to be read by `func` without being asked."""
    if func not in _METADATA:
        for tensor in _guarded(tensors):
            Guard._settled(tensor)


def _gradient_of(parameter: GuardedParameter) -> torch.Tensor | None:
    gradient: torch.Tensor | None
    if torch._C._len_torch_function_stack():  # a mode's own code may look at guarded tensors
        gradient = _GET_GRADIENT(parameter)
        return gradient
    asked_openly = torch._C._is_torch_function_enabled()
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _GET_GRADIENT(parameter)
    # A compiled function may have settled it since it found out what class it has.
    if gradient is not None and asked_openly and isinstance(parameter, Guard):
        parameter._hand_out()
    return gradient


def _set_gradient(parameter: GuardedParameter, gradient: torch.Tensor | None) -> None:
    if torch._C._len_torch_function_stack():
        _Tensor.grad.__set__(parameter, gradient)
        return
    with torch._C.DisableTorchFunctionSubclass():
        _Tensor.grad.__set__(parameter, gradient)


_gradient_of_untraced: Any = _not_traced(_gradient_of)
_set_gradient_untraced: Any = _not_traced(_set_gradient)


class GuardedParameter(Guard, nn.Parameter):
    """Its gradient without the way through __torch_function__: loops ask for it a lot."""

    @property
    def grad(self) -> torch.Tensor | None:
        if torch.compiler.is_compiling():
            untraced: torch.Tensor | None = _gradient_of_untraced(self)
            return untraced
        return _gradient_of(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if torch.compiler.is_compiling():
            _set_gradient_untraced(self, gradient)
        else:
            _set_gradient(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class UnitGuard:
    """The guard classes of one unit, and who wears them.

    Args:
        settle: makes parameters, gradients and moments final; called on the first touch of one.
        settle_gradient: the same for gradients that are only leaving.
        answer: what may be answered for those without settling; see Guard.answer.
        gradient_taken: called when somebody gets the gradient of a guarded parameter.
    """

    def __init__(
        self,
        settle: Callable[[], None],
        settle_gradient: Callable[[], None],
        answer: Callable[[Any, tuple[Any, ...]], Any] | None = None,
        gradient_taken: Callable[[], None] | None = None,
    ) -> None:
        body: dict[str, Any] = {"settle": staticmethod(settle)}
        if gradient_taken is not None:
            body["gradient_taken"] = staticmethod(gradient_taken)
        self._parameter: Any = type("Parameter", (GuardedParameter,), dict(body))
        self._tensor: Any = type("Tensor", (Guard, torch.Tensor), dict(body))
        body = {"settle": staticmethod(settle_gradient)}
        if answer is not None:
            body["answer"] = staticmethod(answer)
        self._gradient: Any = type("Tensor", (Guard, torch.Tensor), dict(body))

    def wear(self, parameters: list[nn.Parameter], moments: list[torch.Tensor]) -> None:
        """Guard parameters and moments; tensors of other classes stay as they are."""
        _C.change_class(parameters, nn.Parameter, self._parameter)
        _C.change_class(moments, torch.Tensor, self._tensor)

    def wear_gradients(self, parameters: list[nn.Parameter]) -> bool:
        """Guard the gradients the parameters have now.

        Returns:
            Whether all wear it; those of other classes than torch's own stay as they are.
        """
        return _C.change_class_of_gradients(parameters, torch.Tensor, self._gradient)

    def take_off(self, parameters: list[nn.Parameter], moments: list[torch.Tensor]) -> None:
        """Make them instances of their own classes again."""
        _C.change_class(parameters, self._parameter, nn.Parameter)
        _C.change_class(moments, self._tensor, torch.Tensor)

    def take_off_gradients(self, parameters: list[nn.Parameter]) -> None:
        """The same for the gradients the parameters have now."""
        _C.change_class_of_gradients(parameters, self._gradient, torch.Tensor)
