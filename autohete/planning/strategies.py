"""The other systems' placements, planned in our terms."""

from __future__ import annotations

STRATEGIES = ("autohete",)
