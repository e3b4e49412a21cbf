"""The command line: help, exit codes, JSON, and a doctor that works when nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from autohete._version import __version__
from autohete.cli import doctor
from autohete.cli.main import SUBCOMMANDS, group

ROOT = Path(__file__).resolve().parent.parent.parent
START = "from autohete.cli import main; main()"


def autohete(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", prelude + START, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
def test_every_subcommand_has_help_with_an_example(name: str) -> None:
    result = CliRunner().invoke(group, [name, "--help"])
    assert result.exit_code == 0
    assert f"autohete {name}" in result.output


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(group, ["--version"])
    assert __version__ in result.output


def test_a_wrong_option_is_exit_code_2() -> None:
    assert CliRunner().invoke(group, ["doctor", "--nonsense"]).exit_code == 2


def test_help_needs_no_torch() -> None:
    done = autohete("--help", prelude="import sys; sys.modules['torch'] = None; ")
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_doctor_finds_this_installation_sound() -> None:
    done = autohete("doctor", "--json")
    assert done.returncode == 0, done.stdout
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["compiled core"]["status"] == "ok"
    assert findings["torch"]["status"] == "ok"


def test_doctor_works_without_torch_and_says_how_to_get_it() -> None:
    done = autohete("doctor", "--json", prelude="import sys; sys.modules['torch'] = None; ")
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["torch"]["status"] == "failed"
    assert findings["torch"]["remedy"] == "pip install torch"


def test_doctor_names_a_core_that_was_built_for_another_torch() -> None:
    prelude = "import torch; torch.__version__ = '1.0'; "
    done = autohete("doctor", "--json", prelude=prelude)
    assert done.returncode == 1, done.stderr
    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert "torch is 1.0" in findings["compiled core"]["detail"]
    assert "\n" not in findings["compiled core"]["detail"]


def test_doctor_prints_for_people_too() -> None:
    result = CliRunner().invoke(doctor.command, [])
    assert "host memory" in result.output


def test_an_error_of_the_contract_is_one_line_and_exit_code_1() -> None:
    done = autohete("demo", "--plain", "--steps", "1", "--width", "33", "--heads", "2")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "autohete: GPTConfig: width is 33, expected a multiple of the 2 heads"
    )


def test_check_without_the_host_device_is_refused() -> None:
    result = CliRunner().invoke(group, ["demo", "--check", "--plain"])
    assert result.exit_code == 2
    assert "--check compares" in result.output


def test_plan_needs_no_gpu_and_its_json_is_whole() -> None:
    arguments = "plan gpt2-xl --gpu a100-40 --gpu-mem 12GiB --batch 2 --json".split()
    done = autohete(*arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpu_mem"] == 12 * 2**30
    assert report["plan"]["device_peak_bytes"] <= report["gpu_mem"]


def test_a_plan_that_cannot_fit_names_the_smallest_size_and_exits_with_1() -> None:
    done = autohete(*"plan 7b --gpu a100-40 --gpu-mem 100MiB --batch 1".split())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "smallest gpu_mem" in done.stderr


def test_simulate_reads_a_profile_and_writes_a_trace(tmp_path: Path) -> None:
    from autohete.planning import make_plan, plan_for, save_profile

    profile = plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile
    file, trace = tmp_path / "autohete_profile.json", tmp_path / "trace.json"
    save_profile(file, profile, make_plan(profile, "4GiB"))
    done = autohete("simulate", str(file), "--json", "--trace", str(trace))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["step_seconds"] * (1 + 1e-9) >= figures["compute_seconds"] > 0  # last bit
    assert len(json.loads(trace.read_text())["traceEvents"]) > 0


def test_simulate_without_a_plan_says_what_to_give(tmp_path: Path) -> None:
    from autohete.planning import plan_for, save_profile

    file = tmp_path / "autohete_profile.json"
    save_profile(file, plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile)
    done = autohete("simulate", str(file))
    assert done.returncode == 2
    assert "--gpu-mem" in done.stderr


def test_simulate_compares_every_strategy_and_ablation(tmp_path: Path) -> None:
    from autohete.planning import plan_for, save_profile

    file = tmp_path / "autohete_profile.json"
    save_profile(file, plan_for("gpt2", "a100-40", 1, 512, suggest=False).profile)
    done = autohete("simulate", str(file), "--gpu-mem", "1GiB", "--compare", "--json")
    assert done.returncode == 0, done.stderr
    names = [result["strategy"] for result in json.loads(done.stdout)]
    assert names[:2] == ["autohete", "zero_offload"]
    assert names[-3:] == ["without fifo", "without barrier", "without aggregation"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("simulate", "--table paper"),
        ("simulate {file} --compare", "--gpu-mem"),
        ("plan --gpu a100-40", "give one model"),
        ("plan gpt2 --model gpt2 --gpu a100-40", "give one model"),
        ("report nowhere.json", "give a profile"),
    ],
)
def test_a_command_line_that_lacks_something_names_it(
    tmp_path: Path, arguments: str, reason: str
) -> None:
    file = tmp_path / "autohete_profile.json"
    file.write_text("{}")
    result = CliRunner().invoke(group, arguments.format(file=file).split())
    assert result.exit_code == 2
    assert reason in result.output


def test_plan_sweeps_memory_as_json() -> None:
    done = autohete(*"plan --model gpt2 --gpu a100-40 --gpu-mem 3GB --sweep gpu_mem --json".split())
    assert done.returncode == 0, done.stderr
    points = json.loads(done.stdout)
    assert points[-1]["value"] == 3_000_000_000
    assert all(point["device_peak_bytes"] <= point["value"] for point in points)
