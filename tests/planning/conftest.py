"""Loads torch's libraries before autohete._C, whatever test runs first."""

import torch  # noqa: F401
