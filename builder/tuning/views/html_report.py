"""The report of a tuning run: one self-contained HTML file, made only from the records."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

from agent.durable import replacing
from builder.records.best_records import chosen
from builder.records.folder import Records
from builder.records.meta_json import ModelResult, TunedOperator, Verdict
from builder.tuning.views.live import duration, micros, shortened
from builder.tuning.views.svg_charts import PALETTE, Bar, Slice, curve, paired_bars, stacked

REPORT: Final = "report.html"
MAX_CURVES: Final = 60  # more would make the page unreadable


@dataclass(frozen=True, slots=True)
class _OperatorRow:
    """An operator of the model, as a row of the report."""

    key: str
    operator: TunedOperator
    calls: int
    points: tuple[float | None, ...]
    default_s: float
    chosen_s: float
    chosen: tuple[int, ...]
    verdict: Verdict | None
    nodes: tuple[str, ...]

    @property
    def total_before_us(self) -> float:
        return self.default_s * self.calls * 1e6

    @property
    def total_after_us(self) -> float:
        return self.chosen_s * self.calls * 1e6


def write_report(records: Records, model: str) -> Path:
    """Write `report.html` into the records' folder.

    Parameters
    ----------
    records
        The records of the run.
    model
        SHA-256 of the model's file, a key of `models` in `meta.json`.
    """
    path = records.path / REPORT
    with replacing(path) as file:
        file.write(render(records, model).encode())
    return path


def render(records: Records, model: str) -> str:
    """Return the page's text; the parameters are those of `write_report`."""
    meta = records.meta
    result = meta.models[model]
    rows = sorted(_rows(records, result), key=lambda r: -r.total_before_us)
    points = sum(len(r.points) for r in rows)
    failed = sum(s is None for r in rows for s in r.points)
    seconds = sum(b.seconds for b in meta.boards.values())
    used = sum(r.verdict is not None and r.verdict.use for r in rows)
    facts = [
        (f"{points}", "points measured" + (f", {failed} of them failed" if failed else "")),
        (f"{used} of {len(rows)}", "operators faster"),
        (duration(seconds), f"on {len(meta.boards)} board{'s' if len(meta.boards) != 1 else ''}"),
    ]
    if meta.peak_gflops is not None:
        facts.append((f"{meta.peak_gflops:,.0f}", "GFLOP/s at peak"))
    return _PAGE.format(
        colours=(resources.files("builder") / "colours.css").read_text("utf-8"),
        title=escape(result.name),
        target=escape(meta.device),
        versions=escape(f"TVM {meta.tvm}, design spaces {meta.spaces}"),
        headline=_headline(result),
        facts="".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in facts),
        where=stacked([("untuned", _shares(rows, before=True)), ("tuned", _shares(rows, before=False))]),
        bars=paired_bars([_bar(row) for row in rows]),
        curves="".join(_figure(row) for row in rows[:MAX_CURVES]),
        table="".join(_line(row, meta.peak_gflops) for row in rows),
        boards="".join(
            f"<tr><td>{escape(n)}</td><td>{b.measured}</td><td>{b.failed}</td><td>{b.invalid}</td>"
            f"<td>{b.dropped}</td><td>{duration(b.seconds)}</td></tr>"
            for n, b in sorted(meta.boards.items())
        ),
    )


def _rows(records: Records, result: ModelResult) -> list[_OperatorRow]:
    rows = []
    for key, calls in result.calls.items():
        operator = records.meta.operators.get(key)
        known = records.measured(key)
        if operator is None or (default := known.get(operator.default)) is None:
            continue
        record = chosen(records, key)
        verdict = records.meta.verdicts.get(key)
        decisions = operator.default if record is None else record.decisions
        after = default  # without a comparison, a faster time may be luck
        if verdict is not None:
            default = after = verdict.ratio.untuned_us / 1e6
            if verdict.use:
                after /= verdict.ratio.speedup
        rows.append(
            _OperatorRow(
                key,
                operator,
                calls,
                tuple(known.values()),
                default,
                after,
                decisions,
                verdict,
                (result.nodes or {}).get(key, ()),
            )
        )
    return rows


def _headline(result: ModelResult) -> str:
    ratio = result.ratio
    if ratio is None:
        return "<p class='head'>The whole model has not been compared.</p>"
    verdict = "" if result.use else " It is compiled without these records."
    head = f"<b>{ratio.speedup:.2f}×</b> as fast as untuned"
    if ratio.low <= 1.0 <= ratio.high:
        head = "<b>No difference</b> beyond doubt between tuned and untuned"
    return (
        f"<p class='head'>{head} <span>(95 % interval {ratio.low:.2f} to {ratio.high:.2f}, "
        f"{ratio.pairs} pairs timed alternately on {escape(result.board or '')}): "
        f"{ratio.tuned_us / 1e3:.3f} ms per inference."
        f"{verdict}</span></p>"
    )


def _label(row: _OperatorRow) -> str:
    """Return the first node of the model, as `Task.title` does; in older folders the kernel's name."""
    return shortened(row.nodes[0] if row.nodes else row.operator.name.removeprefix("fused_"), 40)


def _shares(rows: list[_OperatorRow], *, before: bool) -> list[Slice]:
    most = len(PALETTE) - 1
    shares = [Slice(_label(r), r.total_before_us if before else r.total_after_us) for r in rows[:most]]
    rest = sum(r.total_before_us if before else r.total_after_us for r in rows[most:])
    return [*shares, Slice(f"{len(rows) - most} more", rest)] if len(rows) > most else shares


def _bar(row: _OperatorRow) -> Bar:
    note = "not compared"
    if row.verdict is not None:
        ratio = row.verdict.ratio
        note = f"{ratio.speedup:.2f}× ({ratio.low:.2f}–{ratio.high:.2f})" + (
            "" if row.verdict.use else ", kept"
        )
    calls = f" ×{row.calls}" if row.calls > 1 else ""
    return Bar(_label(row) + calls, row.total_before_us, row.total_after_us, note)


def _figure(row: _OperatorRow) -> str:
    return (
        f"<figure>{curve(row.points, row.default_s, row.chosen_s)}"
        f"<figcaption>{escape(_label(row))}</figcaption></figure>"
    )


def _line(row: _OperatorRow, peak: float | None) -> str:
    rate = row.operator.flops / row.chosen_s / 1e9
    nodes = ", ".join(row.nodes)
    cells = (
        f"{escape(nodes)}<br><small>{escape(row.operator.name)}</small>"
        if nodes
        else escape(row.operator.name),
        escape(row.operator.kind),
        str(row.calls),
        f"{row.operator.flops / 1e6:,.1f}",
        micros(row.default_s),
        micros(row.chosen_s),
        f"{rate:,.1f}",
        f"{rate / peak:.0%}" if peak else "",
        row.operator.describe(row.operator.default),
        row.operator.describe(row.chosen),
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tuning of {title}</title>
<style>
{colours}
:root {{ --before: light-dark(#b8bec6, #5d6873); }}
body {{ font:15px/1.5 system-ui,sans-serif; color:CanvasText; background:Canvas;
  max-width:1000px; margin:32px auto; padding:0 20px; }}
h1 {{ margin:0; font-size:26px; }} h2 {{ margin:40px 0 6px; font-size:18px; }}
p {{ margin:4px 0 14px; color:var(--muted); }}
.head {{ font-size:17px; color:CanvasText; margin:18px 0; }} .head b {{ font-size:30px; color:var(--cool); }}
.head span {{ color:var(--muted); font-size:15px; }}
.facts {{ display:flex; flex-wrap:wrap; gap:12px; }}
.facts div {{ background:var(--soft); border-radius:8px; padding:10px 16px; min-width:130px; }}
.facts b {{ display:block; font-size:20px; }} .facts span {{ color:var(--muted); font-size:13px; }}
svg {{ max-width:100%; height:auto; }} svg text {{ font:12px system-ui,sans-serif; fill:CanvasText; }}
svg text.small {{ font-size:11px; fill:var(--muted); }} svg text.bad {{ fill:var(--hot); }}
.grid {{ stroke:var(--line); }} .dash {{ stroke:var(--muted); stroke-dasharray:4 3; }}
.dot {{ fill:var(--before); }} .best {{ fill:none; stroke:var(--cool); stroke-width:2; }}
.before {{ fill:var(--before); }} .after {{ fill:var(--cool); }}
.curves {{ display:grid; grid-template-columns:repeat(auto-fill,minmax(300px,1fr)); gap:10px 20px; }}
figure {{ margin:0; }} figcaption {{ font-size:12px; color:var(--muted); }}
table {{ border-collapse:collapse; width:100%; font-size:13px; }}
td,th {{ padding:4px 8px; text-align:right; border-bottom:1px solid var(--line); }}
td:first-child,th:first-child {{ text-align:left; overflow-wrap:anywhere; }}
td small {{ color:var(--muted); }}
.scroll {{ overflow-x:auto; }}
</style></head><body>
<h1>Tuning of {title}</h1><p>{target}<br>{versions}</p>
{headline}
<div class="facts">{facts}</div>
<h2>Where the time goes</h2>
<p>The tuned operators of one inference: time per call multiplied by the number of calls.</p>{where}
<h2>Before and after</h2>
<p>Grey: compiled without these records. Blue: compiled with them. On the right, the speed-up and its 95 %
interval, timed alternately; “kept” means that the untuned schedule is kept.</p>{bars}
<h2>Measured points</h2>
<p>Each dot is one measurement, in the order of measuring; the lowest ones are partly luck. The dashed line is
the time without records, the solid line the time with them, both timed alternately. The scale is logarithmic;
very slow points are drawn at the top.</p>
<div class="curves">{curves}</div>
<h2>Operators</h2><div class="scroll"><table>
<tr><th>nodes of the model, and their kernel</th><th>kind</th><th>calls</th><th>MFLOP</th>
<th>untuned us</th><th>compiled us</th><th>GFLOP/s</th><th>of peak</th>
<th>untuned</th><th>compiled</th></tr>{table}</table></div>
<h2>Boards</h2><table>
<tr><th>board</th><th>measured</th><th>failed</th><th>throttled</th><th>dropped</th><th>busy</th></tr>
{boards}</table>
</body></html>
"""
