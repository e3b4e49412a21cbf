"""Sizes people write."""

from __future__ import annotations

import numpy as np
import pytest

from autohete.planning import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("40GB", 40 * 10**9),
        (40e9, 40 * 10**9),
        (7, 7),
        ("7", 7),
        ("1.5 MiB", 1572864),
        (" 3 kb ", 3000),
        ("2TiB", 2**41),
        ("1e9", 10**9),
        ("1_000 B", 1000),
        ("0", 0),
        (".5kB", 500),
        (np.int64(16 << 20), 16 << 20),
    ],
)
def test_sizes_in_bytes_and_both_kinds_of_units(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["40XB", "40G", "GB", "", "1.2.3GB", "40 GB x", "forty", "nan", "inf", "0x10"]
)
def test_what_is_no_size_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ValueError, match="gpu_mem is"):
        parse_bytes(text, "gpu_mem")


def test_an_unknown_unit_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown unit 'G'.*GiB"):
        parse_bytes("40G", "gpu_mem")


@pytest.mark.parametrize(
    "size", [float("nan"), float("inf"), -1, "-3GB", 1.5, 2**54, "1e30", None, True, [1], b"1"]
)
def test_numbers_out_of_range_and_other_types_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="cpu_mem is"):
        parse_bytes(size, "cpu_mem")


def test_written_sizes_have_three_digits() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 999.9 * 2**20, 2**40)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "0.98 GiB",
        "1.00 TiB",
    ]
