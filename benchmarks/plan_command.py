"""How long `autohete plan` takes to answer, from the shell, and that it leaves CUDA alone.

python benchmarks/plan_command.py [--repeats 5] [--bar 3]

Runs the command in new processes; prints every time and the median. Exit code 1 past the bar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

COMMAND = "plan --model 7b --gpu a100-40 --batch 8"
# The command in a process that then says what it has imported and initialised.
PROBE = (
    "import sys\n"
    "from autohete.cli.main import group\n"
    "group({arguments!r}, prog_name='autohete', standalone_mode=False)\n"
    "import torch\n"
    "names = ('transformers', 'torch._dynamo')\n"
    "print('CUDA initialised:', torch.cuda.is_initialized(), file=sys.stderr)\n"
    "print('imported:', [n for n in names if n in sys.modules], file=sys.stderr)\n"
)


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Seconds until the answer, and seconds of CPU: those do not depend on who else computes."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    cpu = after.children_user + after.children_system
    return time.perf_counter() - start, cpu - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bar", type=float, default=3.0)
    options = parser.parse_args()
    command = [sys.executable, "-m", "autohete", *COMMAND.split()]
    print(
        f"autohete {COMMAND}; {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    )
    subprocess.run(
        [sys.executable, "-c", PROBE.format(arguments=COMMAND.split())],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    times = [seconds_of(command) for _ in range(options.repeats)]
    middle, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    shown = ", ".join(f"{wall:.2f}" for wall, _ in times)
    print(f"seconds {shown}; median {middle:.2f} (of CPU {cpu:.2f}), bar {options.bar}")
    sys.exit(middle > options.bar)


if __name__ == "__main__":
    main()
