// The list of agents: only the rows in view exist, however many agents there are.
//
// Keyboard: arrows, Page Up and Down, Home and End choose; Enter and Space open; letters go to the search field.

import { element } from "./elements.js";
import { digits } from "./words.js";

const ROW = 58; // pixels, as in dashboard.css
const SPARE = 4; // rows above and below the window
// Names and states come from devices, and one may be called `constructor`: maps have no such members.
const SYMBOLS = new Map([["online", "\u25cf"], ["stopped", "\u25a0"], ["offline", "\u25b2"], ["unknown", "?"]]);
const order = new Intl.Collator("en", { numeric: true });

export class Roster {
  /** `onOpen` gets the name of an agent to open; `onLook` is called when other rows are in view. */
  constructor(list, rows, { onOpen, onLook }) {
    this.list = list;
    this.rows = rows;
    this.onOpen = onOpen;
    this.onLook = onLook;
    this.agents = new Map();
    this.live = new Map();
    this.names = [];
    this.cursor = null;
    this.chosen = null;
    this.words = [];
    this.kind = "all";
    this.pool = [];
    this.seen = "";
    list.addEventListener("scroll", () => this.later(), { passive: true });
    list.addEventListener("keydown", (event) => this.key(event));
    rows.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) { this.cursor = row.dataset.name; this.onOpen(this.cursor); }
    });
    new ResizeObserver(() => this.later()).observe(list);
  }

  /** Take rows that changed, and names that went. */
  change(rows, gone, whole) {
    if (whole) this.agents.clear();
    for (const name of gone) this.agents.delete(name);
    let moved = whole || gone.length > 0;
    for (const row of rows) {
      const before = this.agents.get(row.name);
      moved ||= before === undefined || this.fits(before) !== this.fits(row);
      this.agents.set(row.name, row);
    }
    if (moved) this.sort();
    this.later();
  }

  /** Take temperatures and rates of the agents in view. */
  numbers(live) {
    this.live = new Map(Object.entries(live));
    this.later();
  }

  /** Show only agents that have all these words, of one kind. */
  filter(words, kind) {
    this.words = words.toLowerCase().split(/\s+/).filter(Boolean);
    this.kind = kind;
    this.sort();
    this.later();
  }

  fits(row) {
    if (this.kind === "attention" && row.alerts.length === 0) return false;
    if (this.kind === "online" && row.state !== "online") return false;
    if (this.kind === "away" && row.state === "online") return false;
    if (this.kind === "busy" && !row.busy) return false;
    if (this.words.length === 0) return true;
    const text = [row.name, row.state, row.machine, row.version, ...row.models.flat(), ...row.alerts].join(" ").toLowerCase();
    return this.words.every((word) => text.includes(word));
  }

  sort() {
    this.names = [...this.agents.values()].filter((row) => this.fits(row)).map((row) => row.name).sort(order.compare);
    if (!this.names.includes(this.cursor)) this.cursor = this.names[0] ?? null;
  }

  /** Mark the agent whose page is open. */
  choose(name) {
    this.chosen = name;
    if (name !== null && this.names.includes(name)) this.cursor = name;
    this.later();
  }

  later() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.draw(); });
  }

  draw() {
    const height = `${this.names.length * ROW}px`;
    if (this.rows.style.height !== height) this.rows.style.height = height;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - SPARE);
    const count = Math.min(this.names.length - first, Math.ceil(this.list.clientHeight / ROW) + 2 * SPARE);
    while (this.pool.length < count) this.pool.push(this.empty());
    this.pool.forEach((row, i) => this.fill(row, i < count ? first + i : -1));
    const active = this.pool.find((row) => row.shown !== "" && row.node.dataset.name === this.cursor);
    if (active) this.list.setAttribute("aria-activedescendant", active.node.id);
    else this.list.removeAttribute("aria-activedescendant");
    const visible = this.names.slice(first, first + Math.max(0, count));
    const seen = visible.join(" ");
    if (seen !== this.seen) { this.seen = seen; this.onLook(visible); }
  }

  empty() {
    const parts = ["dot", "name", "figure", "second"].map((name) => element("span", { class: name }));
    const node = element("div", { class: "row", role: "option", id: `row-${this.pool.length}`, hidden: true }, ...parts);
    this.rows.append(node);
    return { node, parts, shown: "", at: -1 };
  }

  fill(row, at) {
    if (at < 0) {
      if (row.shown !== "") { row.node.hidden = true; row.shown = ""; row.at = -1; }
      return;
    }
    const agent = this.agents.get(this.names[at]);
    const [temperature, rate] = this.live.get(agent.name) ?? [null, null];
    const figures = [temperature === null ? null : `${temperature} \u00b0C`, rate === null ? null : `${digits(rate)}/s`];
    const models = agent.models.map(([name, version, state]) => `${name} ${version}${state === "ready" ? "" : ` (${state})`}`);
    if (agent.more) models.push(`${agent.more} more`);
    const text = {
      dot: SYMBOLS.get(agent.state) ?? "?",
      figure: figures.filter(Boolean).join(", "),
      second: agent.busy ? `deploying: ${agent.busy}` : agent.alerts.length ? agent.alerts.join("; ") : models.join(", ") || "no models",
    };
    const isOn = this.cursor === agent.name;
    const isChosen = this.chosen === agent.name;
    const shown = JSON.stringify([agent.name, agent.state, text, isOn, isChosen, this.names.length]);
    if (row.at !== at) { row.at = at; row.node.style.transform = `translateY(${at * ROW}px)`; }
    if (row.shown === shown) return;
    row.shown = shown;
    const [dot, name, figure, second] = row.parts;
    dot.textContent = text.dot;
    const isTroubled = agent.state === "online" && agent.alerts.length > 0;
    dot.className = `dot ${isTroubled ? "troubled" : SYMBOLS.has(agent.state) ? agent.state : "unknown"}`;
    name.textContent = agent.name;
    figure.textContent = text.figure;
    second.textContent = text.second;
    second.className = agent.alerts.length && !agent.busy ? "second bad" : "second";
    row.node.hidden = false;
    row.node.dataset.name = agent.name;
    row.node.classList.toggle("on", isOn);
    row.node.classList.toggle("chosen", isChosen);
    row.node.setAttribute("aria-selected", String(isOn));
    row.node.setAttribute("aria-setsize", String(this.names.length));
    row.node.setAttribute("aria-posinset", String(at + 1));
    row.node.setAttribute("aria-label", `${agent.name}, ${agent.state}, ${text.second}, ${text.figure}`);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(0, this.names.indexOf(this.cursor));
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: this.names.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      this.move(Math.min(this.names.length - 1, Math.max(0, to)));
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.cursor !== null) this.onOpen(this.cursor);
    }
  }

  move(at) {
    if (at < 0) return;
    this.cursor = this.names[at];
    const top = at * ROW;
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (top + ROW > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = top + ROW - this.list.clientHeight;
    this.later();
  }
}
