"""Two machines: two network namespaces of this one, joined by a link of a stated rate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "4", "--width", "64", "--heads", "2", "--context", "64", "--batch", "4"]
RATE = "100mbit"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(machine: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", f"autohete{machine}", *command]


def take_down() -> None:
    for machine in (0, 1):
        subprocess.run(["ip", "netns", "del", f"autohete{machine}"], capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs ip and tc (iproute2)")
    take_down()
    try:
        for machine in (0, 1):
            ip("netns", "add", f"autohete{machine}")
        ip("link", "add", "ahlink0", "type", "veth", "peer", "name", "ahlink1")
        for machine in (0, 1):
            ip("link", "set", f"ahlink{machine}", "netns", f"autohete{machine}")
            for command in (
                f"ip addr add 10.77.0.{machine + 1}/24 dev ahlink{machine}",
                f"ip link set ahlink{machine} up",
                "ip link set lo up",
                f"tc qdisc add dev ahlink{machine} root tbf rate {RATE} burst 256kb latency 50ms",
            ):
                subprocess.run(inside(machine, *command.split()), check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        take_down()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield
    take_down()


def start(folder: Path, prefix: list[str], *launch: str, **more: str) -> Any:
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in known}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    script = [str(ROOT / "examples/train_gpt.py"), *SMALL, "--steps", "12", "--json"]
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "torch.distributed.run", *launch, *script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_machines_train_as_two_ranks_of_one_do(machines, tmp_path):
    here = start(tmp_path / "one", [], "--standalone", "--nproc-per-node", "2")
    expected = json.loads(here.communicate(timeout=200)[0])
    ranks = [
        start(
            tmp_path / f"machine{machine}",
            inside(machine),
            *["--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", "1"],
            *["--master-addr", "10.77.0.1", "--master-port", "29577"],
            GLOO_SOCKET_IFNAME=f"ahlink{machine}",
        )
        for machine in (0, 1)
    ]
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1] + outputs[1][1]
    result = json.loads(outputs[0][0])
    assert result["loss_after"] == expected["loss_after"] < expected["loss_before"]
