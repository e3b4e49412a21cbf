"""plan_for(): the question a person asks before buying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from autohete.planning import InfeasibleError, plan_for


def test_4b_trains_within_12_gb() -> None:
    """The paper's claim, as far as memory goes."""
    report = plan_for("4b", "a100-40", 1, 1024, gpu_mem="12GB", suggest=False)
    assert report.plan.device_peak_bytes <= 12e9
    assert report.description.num_parameters > 4e9


def test_the_report_says_memory_speed_reasons_and_help() -> None:
    report = plan_for("7b", "a100-40", 4, 1024)
    text = str(report)
    for part in (
        "7b",
        "a100-40",
        "tokens/s",
        "MFU",
        "lane binds",
        "recomputing frees",
        "optimizer state on the host frees",
        "device memory",
        "host memory",
    ):
        assert part in text
    assert report.help, "a CPU-bound plan must say that a faster CPU helps"
    assert all(rate > report.tokens_per_second for rate in report.help.values())
    assert report.help["batch 8"] == pytest.approx(
        plan_for("7b", "a100-40", 8, 1024, suggest=False).tokens_per_second
    )


def test_json_carries_the_same_figures() -> None:
    report = plan_for("gpt2", "rtx4090", 2, 256, suggest=False)
    data = json.loads(report.to_json())
    assert data["plan"]["step_seconds"] == report.plan.step_seconds
    assert data["tokens_per_second"] == pytest.approx(512 / report.plan.step_seconds)
    assert data["minimum_gpu_mem"] <= data["gpu_mem"]
    assert data["mfu"] == pytest.approx(data["model_tflops"] / 165)


def test_a_config_json_is_planned(tmp_path: Path) -> None:
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        vocab_size=128,
    )
    config.save_pretrained(tmp_path)
    report = plan_for(str(tmp_path / "config.json"), "h100", 2, 16, suggest=False)
    assert len([u for u in report.description.units if u.is_layer]) == 2


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '"x"'])
def test_a_foreign_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"no Hugging Face config\.json"):
        plan_for(str(tmp_path / "config.json"), "h100", 2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "zorglub"}, "model_type is 'zorglub', expected one that the installed"),
        ({"n_layer": "two"}, "transformers refuses .*n_layer.*, expected values that make a gpt2"),
        ({"n_layer": float("nan")}, "transformers refuses .*n_layer"),
        ({"n_layer": -3}, "with -3 layers, expected at least 0"),
        ({"n_layer": 10**7}, "with 10000000 layers, expected at least 0 and at most 10000"),
        ({"n_head": 0}, "no model can be made of this GPT2Config"),
    ],
)
def test_a_config_with_wrong_values_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        plan_for(str(tmp_path / "config.json"), "h100", 2, 16)
    assert "\n" not in str(error.value)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match="gpt2-xl"):
        plan_for("gpt9", "h100", 2, 16)
    with pytest.raises(ValueError, match="rtx4090"):
        plan_for("gpt2", "h9000", 2, 16)


def test_a_machine_is_known_however_its_name_is_written() -> None:
    for name in ("rtx4090", "RTX4090", "RTX 4090"):
        assert plan_for("gpt2", name, 1, 64, suggest=False).machine.name == "rtx4090"


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(InfeasibleError, match="smallest gpu_mem"):
        plan_for("7b", "a100-40", 1, 1024, gpu_mem="1GB")


def test_what_does_not_fit_names_a_batch_that_does() -> None:
    with pytest.raises(InfeasibleError, match=r"batch 2 fits\)") as error:
        plan_for("gpt2", "a100-40", 8, 1024, gpu_mem="2GB")
    assert error.value.smallest_gpu_mem > 2e9
    plan_for("gpt2", "a100-40", 2, 1024, gpu_mem="2GB", suggest=False)
    with pytest.raises(InfeasibleError, match="not even batch 1"):
        plan_for("7b", "a100-40", 1, 1024, gpu_mem="1GB")
