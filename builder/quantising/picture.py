"""The picture of a quantisation: one self-contained HTML page, made from its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from agent.durable import replacing
from builder.quantising.report import Block, QuantisationReport, kilobytes

MAX_BARS: Final = 120  # more would make the page unreadable: the noisiest are drawn
_SHOWN_DB: Final = 60.0  # the end of the scale; more is noise below float32's own in practice
_ROW, _LABEL, _WIDTH, _SHARE = 20, 330, 940, 120  # pixels
_LABEL_CHARS: Final = 46


def write_picture(report: QuantisationReport, path: str | os.PathLike[str]) -> None:
    """Write the page to a file, at once and completely."""
    with replacing(Path(path)) as file:
        file.write(render(report).encode())


def render(report: QuantisationReport) -> str:
    """Return the page's text."""
    found = report.agreement
    facts = [
        (kilobytes(report.bytes), f"instead of {kilobytes(report.float_bytes)}"),
        (f"{report.int8_share:.1f} %", "of the multiply-adds quantised"),
    ]
    if found.sqnr_db is not None:
        facts.insert(0, (f"{found.sqnr_db:.1f} dB", "signal to quantisation noise"))
    if found.top1 is not None:
        facts.insert(0, (f"{found.top1:.2f} %", f"of {found.samples} samples with float's best class"))
    if found.accuracy is not None:
        facts.insert(0, (f"{found.accuracy:.2f} %", f"accuracy, float {found.float_accuracy:.2f} %"))
    return _PAGE.format(
        title=escape(report.model),
        activations=escape(report.activations),
        samples=report.samples,
        facts="".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts),
        warnings="".join(f"<p class='warn'>{escape(text)}</p>" for text in report.warnings),
        bars=_bars(report.blocks, report.total_macs),
        rows="".join(f"<tr><td>{escape(a)}</td><td>{escape(b)}</td></tr>" for a, b in report.rows()),
    )


def _bars(blocks: Sequence[Block], total_macs: int) -> str:
    """Draw a bar for each block, in the graph's order: the longer, the less noise."""
    shown = sorted(blocks, key=lambda block: _SHOWN_DB if block.sqnr_db is None else block.sqnr_db)[:MAX_BARS]
    kept = {block.name for block in shown}
    scale = (_WIDTH - _LABEL - _SHARE - 70) / _SHOWN_DB
    parts = []
    for row, block in enumerate(block for block in blocks if block.name in kept):
        y = row * _ROW + 4
        name = block.name if len(block.name) <= _LABEL_CHARS else f"…{block.name[1 - _LABEL_CHARS :]}"
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        db = block.sqnr_db
        wide = 0.0 if db is None else max(1.0, min(db, _SHOWN_DB) * scale)
        title = f"<title>{escape(block.kind)}</title>"
        parts.append(
            f'<rect x="{_LABEL}" y="{y}" width="{wide:.1f}" height="15" rx="2" class="{block.precision}">'
            f"{title}</rect>"
        )
        note = "never quantised" if db is None else f"{db:.1f} dB"
        note += "" if block.precision == "int8" or db is None else ", left in float"
        parts.append(f'<text x="{_LABEL + wide + 6:.1f}" y="{y + 12}" class="small">{note}</text>')
        if block.macs:
            share = f"{100 * block.macs / max(total_macs, 1):.1f} % of the work"
            parts.append(
                f'<text x="{_WIDTH - 4}" y="{y + 12}" text-anchor="end" class="small">{share}</text>'
            )
    height = len(shown) * _ROW + 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img">{"".join(parts)}</svg>'
    )


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title} in int8</title>
<style>
:root {{ --paper:#fff; --ink:#1c2733; --soft:#66717e; --line:#dde2e8; --card:#f6f8fa;
  --int8:#0072B2; --float:#E69F00; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper:#14181d; --ink:#e4e9ee; --soft:#98a3af; --line:#2d343c; --card:#1c2128; --int8:#56B4E9; }}
}}
body {{ font:15px/1.5 system-ui,sans-serif; color:var(--ink); background:var(--paper);
  max-width:1000px; margin:32px auto; padding:0 20px; }}
h1 {{ margin:0; font-size:26px; }} h2 {{ margin:40px 0 6px; font-size:18px; }}
p {{ margin:4px 0 14px; color:var(--soft); }} p.warn {{ color:#D55E00; }}
.facts {{ display:flex; flex-wrap:wrap; gap:12px; margin:18px 0; }}
.facts div {{ background:var(--card); border-radius:8px; padding:10px 16px; min-width:130px; }}
.facts b {{ display:block; font-size:20px; }} .facts span {{ color:var(--soft); font-size:13px; }}
svg {{ max-width:100%; height:auto; }} svg text {{ font:12px system-ui,sans-serif; fill:var(--ink); }}
svg text.small {{ font-size:11px; fill:var(--soft); }}
.int8 {{ fill:var(--int8); }} .float {{ fill:var(--float); }}
table {{ border-collapse:collapse; width:100%; font-size:13px; }}
td {{ padding:4px 8px; text-align:left; border-bottom:1px solid var(--line); overflow-wrap:anywhere; }}
td:first-child {{ white-space:nowrap; color:var(--soft); }}
</style></head><body>
<h1>{title} in int8</h1><p>activations in {activations}, weights in int8 for each channel;
{samples} calibration samples</p>
<div class="facts">{facts}</div>{warnings}
<h2>Blocks</h2>
<p>Signal to noise of each block if only this block is quantised: the longer the bar, the less noise. 6 dB are
one bit. Blue blocks are in int8, orange ones in float.</p>{bars}
<h2>Summary</h2><table>{rows}</table>
</body></html>
"""
