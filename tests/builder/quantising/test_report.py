"""The table and the page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from builder.quantising.agreement import Agreement
from builder.quantising.picture import MAX_BARS, render
from builder.quantising.report import Block, QuantisationReport, count_methods

REPORT = QuantisationReport(
    model="<model>",
    activations="uint8",
    samples=100,
    float_bytes=4_000_000,
    bytes=1_000_000,
    agreement=Agreement(100, 31.4, 99.0, 91.0, 90.5),
    max_drop=0.5,
    min_sqnr_db=None,
    total_macs=10_000_000,
    int8_macs=9_800_000,
    excluded=("b",),
    blocks=(
        Block("a", "Conv", "int8", 30.0, 9_800_000),
        Block("b", "Conv", "float", 12.0, 200_000),
        Block("c<", "Exp", "float", None, 0),
    ),
    methods=count_methods(["MSE", "min-max", "MSE"]),
    bias_correction_db=None,
    warnings=("a & b",),
)


def test_table_says_what_it_cost() -> None:
    rows = dict(REPORT.rows())
    assert rows == {
        "size": "1,000.0 kB, float 4,000.0 kB (0.25)",
        "accuracy": "90.50 %, float 91.00 % (at most 0.5 points may be lost)",
        "agreement": "99.00 % of 100 samples have float's best class",
        "noise": "31.4 dB signal to noise at the outputs; least inside: a 30.0 dB",
        "quantised": "98.0 % of 10.0 million multiply-adds, 1 of 3 blocks",
        "left in float": "b",
        "ranges": "MSE: 2, min-max: 1 tensors",
        "bias correction": "not used: it adds noise",
    }
    assert REPORT.lines()[-1] == "  note: a & b"


def test_table_without_classes_names_the_limit_on_noise() -> None:
    rows = dict(replace(REPORT, agreement=Agreement(9, 31.4), max_drop=None, min_sqnr_db=20.0).rows())
    assert "accuracy" not in rows
    assert "agreement" not in rows
    assert rows["noise"].startswith("31.4 dB signal to noise at the outputs (at least 20 dB); ")


def test_table_says_how_much_coarser_weights_are_for_sums_of_16_bits() -> None:
    rows = dict(replace(REPORT, widened=(1.04, 1.1)).rows())
    assert rows["16-bit sums"] == "four products in 2 layers, whose weights have 7 % larger steps"


def test_document_is_json() -> None:
    document = json.loads(json.dumps(REPORT.document()))
    assert document["int8_share"] == 98.0
    assert document["drop"] == pytest.approx(0.5)
    assert document["blocks"][1] == {
        "name": "b",
        "kind": "Conv",
        "precision": "float",
        "sqnr_db": 12.0,
        "macs": 200_000,
    }


def test_page_has_a_bar_for_each_block_and_escapes_names() -> None:
    page = render(REPORT)
    assert "&lt;model&gt; in int8" in page
    assert "a &amp; b" in page
    assert "c&lt;" in page
    assert "c<" not in page
    assert page.count('class="int8"') == 1
    assert page.count('class="float"') == 2
    assert "never quantised" in page
    assert "12.0 dB, left in float" in page
    many = replace(REPORT, blocks=tuple(Block(f"n{i}", "Conv", "int8", float(i), 1) for i in range(200)))
    assert render(many).count("<rect") == MAX_BARS
    assert ">n0<" in render(many)
