"""The beats by which ranks know of each other."""

from __future__ import annotations

import subprocess
import sys

END = """
import atexit, threading

# What is registered first runs last: after the pulse has ended.
atexit.register(lambda: print("alive" if one._thread.is_alive() else "ended"))
from torch._C._distributed_c10d import HashStore
from autohete import pulse

pulse._BEAT_SECONDS = 0.001
beaten = threading.Event()

class Store(HashStore):
    def add(self, *args):
        beaten.set()
        return super().add(*args)

one = pulse.Pulse(Store(), 0, 2)
beaten.wait()
"""


def test_no_beat_is_under_way_when_the_interpreter_ends():
    done = subprocess.run([sys.executable, "-c", END], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "ended"), done.stderr
