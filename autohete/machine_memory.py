"""Memory that all ranks of one machine see: what passes between them need not go through a socket.

Only the bytes go this way. That a rank has written is told by a collective of torch.distributed,
one for each round, so order, waiting and a rank that ends are as with any other collective.

Two slots in turns. Who enters round i has read what round i - 1 brought, and a slot is written
again in round i + 2, after round i + 1 was entered by all: so nobody overwrites what is still read.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SLOTS = 2
_TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MachineMemory:
    """As many rows of bytes as there are ranks, the same memory on all of them.

    Collective: all ranks call rows(), with the same lengths in the same order.

    Args:
        rank, size: of the group.
        share: gives all ranks the first one's value.
        all_of: whether all ranks say yes.
    """

    def __init__(
        self, rank: int, size: int, share: Callable[[Any], Any], all_of: Callable[[bool], bool]
    ) -> None:
        self._rank, self._size = rank, size
        self._share, self._all_of = share, all_of
        self._length = 0
        self._slots: list[Tensor] = []
        self._round = 0
        self._refused = False

    def rows(self, length: int) -> Tensor | None:
        """Return `size` rows of `length` bytes for the next round; None where there are none.

        They are valid until the round after the next one. None: the ranks are on several machines,
        or the system refuses; from then on always, on all ranks.
        """
        if self._refused:
            return None
        if length > self._length and not self._grow(length):
            self._refused, self._slots = True, []
            return None
        self._round += 1
        slot = self._slots[self._round % _SLOTS]
        return slot[: self._size * length].view(self._size, length)

    def _grow(self, length: int) -> bool:
        num_bytes = _TOKEN_BYTES + _SLOTS * self._size * length
        made = self._make(num_bytes) if self._rank == 0 else None
        descriptor, offer = made or (-1, None)
        try:
            memory = self._map(descriptor, self._share(offer), num_bytes)
            agreed = self._all_of(memory is not None)
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        if memory is None or not agreed:
            return False
        self._length = length
        self._slots = list(memory[_TOKEN_BYTES:].chunk(_SLOTS))
        return True

    @staticmethod
    def _make(num_bytes: int) -> tuple[int, tuple[str, str, bytes]] | None:
        """Return a file in memory, and where other processes of this machine find it."""
        with contextlib.suppress(OSError):
            descriptor = os.memfd_create("autohete", os.MFD_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
                token = os.urandom(_TOKEN_BYTES)
                os.pwrite(descriptor, token, 0)
                return descriptor, (
                    _BOOT_ID.read_text(),
                    f"/proc/{os.getpid()}/fd/{descriptor}",
                    token,
                )
            except OSError:
                os.close(descriptor)
        return None

    def _map(
        self, descriptor: int, offer: tuple[str, str, bytes] | None, num_bytes: int
    ) -> Tensor | None:
        """Return the file's bytes; None where it is not to be had, or is another one."""
        if offer is None:
            return None
        boot_id, path, token = offer
        with contextlib.suppress(OSError):
            if boot_id != _BOOT_ID.read_text():
                return None
            if self._rank == 0:
                return _bytes_of(descriptor, num_bytes)
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
                return None  # of another process, in a container of its own
            theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.pread(theirs, _TOKEN_BYTES, 0) == token:
                    return _bytes_of(theirs, num_bytes)
            finally:
                os.close(theirs)
        return None


def _bytes_of(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
