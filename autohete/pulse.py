"""Who of a group's ranks lives: each beats in the store that the group was made with."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

_BEAT_SECONDS = 1.0
_END_SECONDS = 2.0  # for a beat that is under way when the process ends
_SILENT_SECONDS = 8.0  # a rank that has not beaten for this long has ended, or hangs


def store_of(group: Any) -> Any:
    """A part of the default group's store for this group alone, over a connection of its own.

    A connection does one thing at a time: waits of other parts of the program must not hold ours.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        store = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"autohete/{group.group_name}", store)


class Pulse:
    """Tells the others that this rank lives, and knows who does not."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stop = threading.Event()
        self._looked = threading.Condition()  # guards the two below; told after every look
        self._seen: dict[int, tuple[int, float]] = {}  # beats, when they last grew
        self._left: dict[int, str] = {}
        self._start = time.monotonic()
        me = weakref.ref(self)
        self._thread = threading.Thread(
            target=_beat, args=(me, self._stop), name="autohete-pulse", daemon=True
        )
        self._thread.start()
        # Also at exit: a thread that comes back from the store into an interpreter that has ended
        # takes the process with it ("terminate called without an active exception").
        weakref.finalize(self, _end, self._stop, self._thread)

    def stop(self, why: str) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        with contextlib.suppress(Exception):  # the store's rank may be gone
            self._store.set(f"left/{self._rank}", why)

    def beat(self) -> None:
        """One beat, and a look at the others'."""
        try:
            self._store.add(f"beat/{self._rank}", 1)
            for peer in range(self._size):
                if peer != self._rank:
                    self._look_at(peer)
        except Exception:  # the store went with the process that held it, the first rank mostly
            with self._looked:
                if not self._stop.is_set():
                    self._left.setdefault(0, "holds the store, which does not answer any more")
        with self._looked:
            self._looked.notify_all()

    def _look_at(self, peer: int) -> None:
        beats = int(self._store.add(f"beat/{peer}", 0))
        left = None
        if self._store.check([f"left/{peer}"]):
            left = self._store.get(f"left/{peer}").decode()
        now = time.monotonic()
        with self._looked:
            if left is not None:
                self._left[peer] = left
            if beats != self._seen.get(peer, (-1, 0.0))[0]:
                self._seen[peer] = (beats, now)

    def silent(self) -> dict[int, str]:
        """Return who is gone, by rank, in words."""
        with self._looked:
            return self._gone()

    def wait_for_silent(self, seconds: float) -> dict[int, str]:
        """Return who is gone as soon as anybody is; nobody when the time is over."""
        with self._looked:
            return self._looked.wait_for(self._gone, seconds)

    def _gone(self) -> dict[int, str]:
        """With the lock held."""
        now = time.monotonic()
        gone = dict(self._left)
        for peer in range(self._size):
            last = self._seen.get(peer, (0, self._start))[1]
            if peer != self._rank and now - last > _SILENT_SECONDS:
                gone.setdefault(peer, f"has ended or hangs (silent for {now - last:.0f} s)")
        gone.pop(self._rank, None)
        return gone


def _beat(pulse: weakref.ref[Pulse], stop: threading.Event) -> None:
    """The thread: keeps nothing alive."""
    while not stop.wait(_BEAT_SECONDS):
        alive = pulse()
        if alive is None:
            return
        alive.beat()
        del alive


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)
