"""Why a file is no checkpoint, in our words: torch's own advise to load it unsafely."""

from __future__ import annotations

import os
import re
import stat

_ZIP = b"PK\x03\x04"
_BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # torch.save's first pickle until 1.6
_GIT_LFS = b"version https://git-lfs"


def why_not_a_checkpoint(descriptor: int) -> str | None:
    """Return what is wrong with how an open file begins; None where nothing is."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return "it is no regular file"
    start = os.pread(descriptor, 32, 0)
    if start.startswith(_ZIP):
        return None
    if not start:
        return "it is empty"
    if start.startswith(_GIT_LFS):
        return "it is a pointer of Git LFS, whose file `git lfs pull` fetches"
    if start.startswith(_BEFORE_ZIP):
        return "it is of torch.save's format before 1.6, which torch.load and torch.save renew"
    return f"it begins with {start[:12]!r}, which no file of torch.save does"


def why_torch_refused(error: BaseException) -> str:
    """Return what torch.load complained about, in one line and without its advice."""
    text = str(error)
    if found := re.search(r"GLOBAL (\S+) was not", text):
        return f"it holds {found[1]}, but only tensors, containers and plain values are loaded"
    if "TorchScript" in text:
        return "it is a TorchScript archive"
    line = text.strip().partition("\n")[0]
    if not line or "weights_only" in text:
        return f"it is damaged: {type(error).__name__} while its structure was read"
    return f"it is damaged: {line}"
