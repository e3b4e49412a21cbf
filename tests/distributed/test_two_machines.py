"""Two machines: two network namespaces of this one, joined by a link of a stated rate."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "4", "--width", "64", "--heads", "2", "--context", "64", "--batch", "4"]
RATE = "100mbit"
SLOW = "4mbit"
FAST = "10gbit"  # no hindrance: at RATE the exchange may bind already, where the cores are free
# Namespaces and links are the whole system's: another run of these tests must not take ours down.
OWN = f"ah{os.getpid()}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def inside(machine: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", f"{OWN}m{machine}", *command]


def take_down() -> None:
    for machine in (0, 1):
        subprocess.run(["ip", "netns", "del", f"{OWN}m{machine}"], capture_output=True)


def set_rate(rate: str) -> None:
    """Of the link, each way."""
    for machine in (0, 1):
        command = f"tc qdisc replace dev {OWN}l{machine} root tbf rate {rate} burst 64kb latency 2s"
        subprocess.run(inside(machine, *command.split()), check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[None]:
    if not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs ip and tc (iproute2)")
    try:
        for machine in (0, 1):
            ip("netns", "add", f"{OWN}m{machine}")
        ip("link", "add", f"{OWN}l0", "type", "veth", "peer", "name", f"{OWN}l1")
        for machine in (0, 1):
            ip("link", "set", f"{OWN}l{machine}", "netns", f"{OWN}m{machine}")
            for command in (
                f"ip addr add 10.77.0.{machine + 1}/24 dev {OWN}l{machine}",
                f"ip link set {OWN}l{machine} up",
                "ip link set lo up",
            ):
                subprocess.run(inside(machine, *command.split()), check=True, capture_output=True)
        set_rate(RATE)
    except subprocess.CalledProcessError as error:
        take_down()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield
    take_down()


def start(
    folder: Path, prefix: list[str], *launch: str, steps: int = 12, **more: str
) -> subprocess.Popen[str]:
    known = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in known}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
    script = [str(ROOT / "examples/train_gpt.py"), *SMALL, "--steps", str(steps), "--json"]
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "torch.distributed.run", *launch, *script],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_on_both(folder: Path, steps: int) -> list[subprocess.Popen[str]]:
    return [
        start(
            folder / f"machine{machine}",
            inside(machine),
            *["--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", "1"],
            *["--master-addr", "10.77.0.1", "--master-port", "29577"],
            steps=steps,
            GLOO_SOCKET_IFNAME=f"{OWN}l{machine}",
        )
        for machine in (0, 1)
    ]


def end_of(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What each has printed."""
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0][1] + outputs[1][1]
    return [out for out, _ in outputs]


@pytest.mark.slow
def test_two_machines_train_as_two_ranks_of_one_do(machines, tmp_path):
    here = start(tmp_path / "one", [], "--standalone", "--nproc-per-node", "2")
    expected = json.loads(here.communicate(timeout=200)[0])
    result = json.loads(end_of(start_on_both(tmp_path, steps=12))[0])
    assert result["loss_after"] == expected["loss_after"] < expected["loss_before"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_plan_changes_with_the_link_between_two_machines(machines, tmp_path):
    """What was timed at the first plan is what the link carries, and the plan follows."""
    found = {}
    for rate, bytes_per_second in ((FAST, None), (RATE, 100e6 / 8), (SLOW, 4e6 / 8)):
        set_rate(rate)
        folder = tmp_path / rate
        folder.mkdir()
        end_of(start_on_both(folder, steps=3))
        written = json.loads((folder / "machine0" / "autohete_profile.json").read_text())
        ranks, plan = written["profile"]["ranks"], written["plan"]
        print(f"{rate}: {ranks['exchange_bytes_per_second'] / 1e6:.2f} MB/s, {plan}")
        # Two ranks send each what they average once: the link's rate, less what carries it.
        if bytes_per_second is not None:
            timed = ranks["exchange_bytes_per_second"]
            assert 0.5 * bytes_per_second < timed < 1.3 * bytes_per_second
        found[rate] = plan
    assert found[SLOW]["binding_lane"] in ("exchange", "gather")
    assert found[SLOW]["step_seconds"] > 3 * found[RATE]["step_seconds"]
    assert found[SLOW]["units"] != found[FAST]["units"]
