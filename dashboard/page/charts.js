// Charts of a model: answers a second over time, and the histogram of its latencies.

import { svg } from "./elements.js";
import { digits, latency } from "./words.js";

const WIDTH = 420;
const HEIGHT = 150;
const LEFT = 44;
const BOTTOM = 22;
const TOP = 10;
// Longer pauses between two points are gaps: the agent or the dashboard was away.
const GAP_S = 60;

/** Draw points `[time, value]` over time; a null value is a gap. */
export function lineChart(points, unit, now) {
  const known = points.filter(([, value]) => value !== null);
  if (known.length === 0) return nothing("no numbers yet: an agent publishes them every ten seconds");
  const first = Math.min(points[0][0], now - 60);
  const most = nice(Math.max(...known.map(([, value]) => value)));
  const x = (time) => LEFT + ((time - first) / Math.max(1, now - first)) * (WIDTH - LEFT - 6);
  const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  const pieces = [];
  let piece = [];
  let last = null;
  for (const [time, value] of points) {
    if (value === null || (last !== null && time - last > GAP_S)) { pieces.push(piece); piece = []; }
    if (value !== null) piece.push([x(time), y(value)]);
    last = time;
  }
  pieces.push(piece);
  const path = (piece) => piece.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const base = y(0).toFixed(1);
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `now ${digits(known.at(-1)[1])} ${unit}, at most ${digits(Math.max(...known.map(([, v]) => v)))}` },
  ...axes(most, (value) => digits(value), y),
  ...pieces.filter((piece) => piece.length > 1).map((piece) =>
    svg("path", { class: "area", d: `${path(piece)}L${piece.at(-1)[0].toFixed(1)} ${base}L${piece[0][0].toFixed(1)} ${base}Z` })),
  ...pieces.filter((piece) => piece.length > 1).map((piece) => svg("path", { class: "line", d: path(piece) })),
  ...pieces.filter((piece) => piece.length === 1).map(([[px, py]]) => svg("circle", { class: "bar", cx: px.toFixed(1), cy: py.toFixed(1), r: 2.5 })),
  svg("text", { x: LEFT, y: HEIGHT - 6, text: `${Math.round((now - first) / 60)} min ago` }),
  svg("text", { x: WIDTH - 6, y: HEIGHT - 6, "text-anchor": "end", text: "now" }));
}

/** Draw a histogram: buckets `[upper bound in seconds or null, count]`. */
export function histogram(buckets) {
  const total = buckets.reduce((sum, [, count]) => sum + count, 0);
  if (total <= 0) return nothing("no answers yet");
  let start = buckets.findIndex(([, count]) => count > 0);
  let end = buckets.findLastIndex(([, count]) => count > 0);
  start = Math.max(0, start - 1);
  end = Math.min(buckets.length - 1, end + 1);
  const shown = buckets.slice(start, end + 1);
  const most = Math.max(...shown.map(([, count]) => count));
  const step = (WIDTH - LEFT - 6) / shown.length;
  const y = (value) => TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM);
  const label = ([bound], i) => (bound === null ? `> ${latency(shown[i - 1]?.[0] ?? 0)}` : latency(bound));
  const every = Math.ceil((shown.length * 52) / (WIDTH - LEFT));
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `${digits(total)} answers; ${shown.filter(([, count]) => count).map((bucket) => `up to ${label(bucket, shown.indexOf(bucket))}: ${digits(bucket[1])}`).join(", ")}` },
  ...axes(most, digits, y),
  ...shown.map(([, count], i) => svg("rect", { class: "bar", x: (LEFT + i * step + 1).toFixed(1), width: Math.max(1, step - 2).toFixed(1),
    y: y(count).toFixed(1), height: (y(0) - y(count)).toFixed(1) }, svg("title", { text: `up to ${label(shown[i], i)}: ${digits(count)} answers` }))),
  ...shown.map((bucket, i) => (i % every ? null : svg("text", { x: (LEFT + (i + 1) * step).toFixed(1), y: HEIGHT - 6, "text-anchor": "end", text: label(bucket, i) }))));
}

function axes(most, words, y) {
  return [0, 0.5, 1].flatMap((part) => [
    svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 6, y1: y(part * most).toFixed(1), y2: y(part * most).toFixed(1) }),
    svg("text", { x: LEFT - 5, y: (y(part * most) + 4).toFixed(1), "text-anchor": "end", text: words(part * most) }),
  ]);
}

function nothing(text) {
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} 40`, role: "img", "aria-label": text }, svg("text", { x: 0, y: 24, text }));
}

function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value) ?? value;
}
