"""The file that a run leaves its measured profile and plan in."""

from __future__ import annotations

import logging
from pathlib import Path

from autohete import _C
from autohete.planning import Plan, save_profile

_log = logging.getLogger("autohete")


class KeptProfile:
    """Writes each new plan to `path`; None writes nothing.

    The file is for later and for others, training does not need it: where it cannot be written,
    that is one warning, however many plans follow.
    """

    def __init__(self, path: str | Path | None) -> None:
        self._path = path
        self._warned = False

    def write(self, profile: _C.Profile, plan: Plan) -> None:
        """Replace what was written before."""
        if self._path is None:
            return
        try:
            save_profile(self._path, profile, plan)
        except OSError as error:
            if not self._warned:
                _log.warning(
                    "autohete: profile_path is %r, expected a file that can be written (%s); "
                    "training goes on without it: give another path, or None to write nothing",
                    str(self._path),
                    error.strerror,
                )
            self._warned = True
