"""What a run did when: the engine's timeline, and compute and memory as the hooks see them.

Only while a trace is on; the hooks then also read the clock and the memory in use. On a GPU
compute is timed by CUDA events, which do not stop it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from autohete.devices import Side

Span = tuple[int, int, str, float, float, int]
"""lane, unit, what, begin and end in seconds of time.perf_counter(), bytes; as take_timeline()."""
Sample = tuple[float, int, int]
"""Seconds, device bytes and host bytes in use."""
COMPUTE_LANE = 0
_MOST_SAMPLES = 1 << 20  # as many as the engine keeps spans


class RunTrace:
    """Collects until it is asked; on the thread of the hooks."""

    def __init__(self, side: Side, engine: Any) -> None:
        self._side = side
        self._engine = engine
        self._open: list[tuple[int, str, Any]] = []
        self._closed: list[tuple[int, str, Any, Any]] = []
        self._spans: list[Span] = []
        self.samples: list[Sample] = []
        self._clock: Any = _CudaClock() if side.torch_device.type == "cuda" else time.perf_counter

    def begins(self, unit: int, what: str) -> None:
        """The unit is about to compute; a backward ends the one before it."""
        self._sample()
        if what == "backward" and self._open and self._open[-1][1] == what:
            self.ends(self._open[-1][0], what)
        self._open.append((unit, what, self._clock()))

    def ends(self, unit: int, what: str) -> None:
        """It has; what was begun inside it and left by an exception is forgotten."""
        if (unit, what) not in [(u, w) for u, w, _ in self._open]:
            return
        self._sample()
        while self._open:
            begun_unit, begun_what, begin = self._open.pop()
            if (begun_unit, begun_what) == (unit, what):
                self._closed.append((unit, what, begin, self._clock()))
                return

    def recomputing(self, unit: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a checkpointed forward: its second run is the recomputation."""
        runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return forward(*args, **kwargs)
            self.begins(unit, "recompute")
            try:
                return forward(*args, **kwargs)
            finally:  # it may stop early, by an exception of torch's
                self.ends(unit, "recompute")

        return run

    def _sample(self) -> None:
        if len(self.samples) < _MOST_SAMPLES:
            now = time.perf_counter()
            self.samples.append((now, self._side.used(), int(self._side.machine.host_used())))

    def spans(self) -> list[Span]:
        """Return all spans so far, by their begin; nothing may be in flight."""
        seconds = self._clock.seconds if isinstance(self._clock, _CudaClock) else float
        self._spans += self._engine.take_timeline()
        self._spans += [
            (COMPUTE_LANE, unit, what, seconds(begin), seconds(end), 0)
            for unit, what, begin, end in self._closed
        ]
        self._closed.clear()
        self._spans.sort(key=lambda span: span[3])
        return list(self._spans)


class _CudaClock:
    """CUDA events, read as seconds of time.perf_counter() once they have passed."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._start = time.perf_counter()
        self._first = self()

    def __call__(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, event: Any) -> float:
        torch.cuda.synchronize()
        return self._start + float(self._first.elapsed_time(event)) / 1e3
