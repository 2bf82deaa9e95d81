// One agent: what it is, its models with their numbers, its deployments, and what happened to it.

import { droppable, element, forget, show } from "./elements.js";
import { histogram, lineChart } from "./charts.js";
import { steps } from "./deploying.js";
import { Trial } from "./trial.js";
import { ago, bytes, digits, duration, latency, moment } from "./words.js";

export class AgentPanel {
  /** `onModel` gets the chosen model's name; `onBack` is called to return to the list. */
  constructor(node, link, deploying, { onModel, onBack }) {
    Object.assign(this, { node, link, deploying, onModel, onBack });
    this.name = null;
    this.model = null;
    this.trial = null;
    this.trialKey = null;
    this.detail = null;
    droppable(node, (file) => this.take(file));
  }

  /** Show an agent from now on, or none. */
  open(name) {
    if (name === this.name) return;
    this.closeTrial();
    this.name = name;
    this.model = null;
    this.detail = null;
    this.node.replaceChildren();
    if (name === null) return;
    this.parts = Object.fromEntries(["head", "alerts", "facts", "models", "model", "trial", "charts", "jobs", "events"].map((part) =>
      [part, element("div", { class: part === "head" ? "head" : "" })]));
    this.file = element("input", { type: "file", accept: ".bundle", hidden: true, on: { change: () => {
      const [file] = this.file.files;
      this.take(file);
      this.file.value = "";
    } } });
    this.parts.head.append(this.back(), element("h2", { text: name }));
    this.node.append(...Object.values(this.parts), this.file);
    this.node.scrollTop = 0;
  }

  take(file) {
    if (!file || !this.detail) return;
    if (file.name.endsWith(".bundle")) this.deploying.deploy(file, this.name, this.detail.allModels ?? []);
    else if (this.trial) this.trial.take(file);
    else this.deploying.onError(new Error("expected a .bundle file: no model that is ready is chosen"));
  }

  closeTrial() {
    this.trial?.close();
    this.trial = null;
    this.trialKey = null;
  }

  /** Take the agent's numbers; `now` is the server's time. */
  change(detail, now) {
    if (detail.name !== this.name) return;
    this.detail = detail;
    const { parts } = this;
    if (detail.absent) {
      this.closeTrial();
      forget(parts.head);
      for (const part of Object.values(parts)) { forget(part); part.replaceChildren(); }
      parts.head.append(this.back(), element("p", { text: `The broker no longer knows ${this.name}: it was removed or renamed.` }));
      return;
    }
    if (!detail.allModels.some((model) => model.name === this.model) && detail.allModels.length) {
      this.model = detail.allModels[0].name;
      this.onModel(this.model);
    }
    show(parts.head, [detail.name, detail.state, detail.version, detail.machine], () => [
      this.back(), element("h2", { text: detail.name }),
      element("span", { class: detail.state === "online" ? "good" : "bad", text: detail.state }),
      element("span", { class: "muted", text: [detail.version && `edge-agent ${detail.version}`, detail.machine].filter(Boolean).join(", ") })]);
    show(parts.alerts, [detail.alerts, detail.rejection], () => [
      detail.alerts.length > 0 && element("ul", { class: "plain alerts" }, ...detail.alerts.map((text) => element("li", { text }))),
      detail.rejection && element("p", { class: "refusal" }, element("span", { class: "bad", text: `${detail.rejection.message} (${detail.rejection.code})` }),
        element("br"), element("span", { class: "hint", text: detail.rejection.hint }))]);
    show(parts.facts, this.facts(detail, now), (facts) => element("dl", { class: "facts" }, ...facts.map(([name, value, isBad]) =>
      element("div", {}, element("dt", { text: name }), element("dd", { class: isBad ? "bad" : "", text: value })))));
    show(parts.models, [detail.allModels.map((model) => [model.name, model.version, model.condition]), this.model], () => this.models(detail));
    const model = detail.allModels.find((each) => each.name === this.model);
    show(parts.model, model && [model, model.since && ago(model.since, now)], () => (model ? this.about(model, now) : []));
    const chart = detail.chart?.model === this.model ? detail.chart : null;
    show(parts.charts, model && chart, () => (model && chart ? this.charts(chart, now) : []));
    this.tryOut(model);
    show(parts.jobs, [detail.jobs, Math.floor(now / 60)], () => jobs(detail.jobs, now));
    show(parts.events, [detail.events, Math.floor(now / 60)], () => eventList(detail.events, now));
  }

  back() {
    return element("button", { class: "back", type: "button", text: "\u2190 agents", data: { key: "back" }, on: { click: this.onBack } });
  }

  facts(detail, now) {
    const zones = detail.zones.map(([zone, value]) => `${digits(value)} \u00b0C${detail.zones.length > 1 && zone ? ` ${zone}` : ""}`);
    const facts = [];
    const add = (name, value, isBad = false) => { if (value) facts.push([name, value, isBad]); };
    add("running for", detail.uptime != null && detail.state === "online" && duration(detail.uptime + Math.max(0, now - detail.sampled)));
    add("temperature", zones.slice(0, 4).join(", "), detail.alerts.some((text) => text.startsWith("hot")));
    if (detail.throttled.length) add("slowed down by", detail.throttled.join(", ").replaceAll("_", " "), true);
    else if (detail.throttledBefore.length) add("slowed down since boot by", detail.throttledBefore.join(", ").replaceAll("_", " "));
    else if (detail.sampled) add("slowed down", "no");
    add("load", detail.load != null && `${digits(detail.load)}${detail.cores ? ` on ${detail.cores} cores` : ""}`);
    add("free memory", detail.memoryFree != null && `${bytes(detail.memoryFree)}${detail.memory ? ` of ${bytes(detail.memory)}` : ""}`);
    add("free for bundles", detail.diskFree != null && bytes(detail.diskFree));
    add("sandbox", detail.sandboxMissing && (detail.sandboxMissing.length ? `without ${detail.sandboxMissing.join(", ")}` : "complete"), Boolean(detail.sandboxMissing?.length));
    add("metrics", detail.sampled ? (now - detail.sampled > 40 ? ago(detail.sampled, now) : "now") : "none yet");
    return facts;
  }

  models(detail) {
    return [element("h3", { text: detail.allModels.length ? "Models" : "No models yet" }),
      element("div", { class: "models", role: "group", "aria-label": "Models" }, ...detail.allModels.map((model) =>
        element("button", { type: "button", "aria-pressed": String(model.name === this.model), data: { key: `model ${model.name}` }, on: { click: () => this.choose(model.name) } },
          `${model.name} ${model.version}`, element("small", { class: model.condition === "ready" ? "" : "bad", text: model.condition })))),
      element("div", { class: "buttons" },
        element("button", { type: "button", text: "Deploy a bundle\u2026", data: { key: "deploy" }, on: { click: () => this.file.click() } }),
        element("span", { class: "hint", text: "or drop a .bundle file anywhere on this page" }))];
  }

  choose(model) {
    if (model === this.model) return;
    this.closeTrial();
    this.model = model;
    this.onModel(model);
    if (this.detail) this.change(this.detail, Date.now() / 1000);
  }

  about(model, now) {
    return [element("h3", { text: `${model.name} ${model.version}` }),
      model.reason && element("p", { class: "bad", text: model.reason }),
      element("p", { class: "muted", text: [
        model.since ? `in service since ${moment(model.since)} (${ago(model.since, now)}, by the device's clock)` : "",
        model.image !== null ? "takes pictures" : model.audio !== null ? "takes recordings" : model.inputs.length ? `takes ${model.inputs.join(", ")}` : "",
        model.steps.length ? `answers with ${model.steps.join(", ")}` : ""].filter(Boolean).join("; "), title: model.inputs.join(", ") }),
      element("p", { class: "muted digest", text: [model.digest, model.key && `signed by ${model.key.slice(0, 16)}`].filter(Boolean).join(", ") }),
      model.previous && element("div", { class: "buttons" }, element("button", { type: "button", text: "Roll back\u2026", data: { key: "roll back" },
        on: { click: () => this.deploying.rollBack(this.name, model) } }))];
  }

  charts(chart, now) {
    const last = chart.points.at(-1);
    const times = chart.quantiles.map(([quantile, seconds]) => `p${Math.round(quantile * 100)} ${latency(seconds)}`).join(", ");
    const statuses = chart.statuses.filter(([status]) => status !== "200").map(([status, count]) => `${digits(count)} \u00d7 ${status}`).join(", ");
    return element("div", { class: "charts" },
      element("figure", {}, element("figcaption", { text: `Answers a second: ${last ? digits(last[1]) : "-"}${statuses ? `; refused: ${statuses}` : ""}` }),
        lineChart(chart.points.map(([time, rate]) => [time, rate]), "answers a second", now)),
      element("figure", {}, element("figcaption", { text: `Latency on the device since its start${times ? `: ${times}` : ""}` }), histogram(chart.buckets)));
  }

  tryOut(model) {
    const key = model?.ready ? `${model.name} ${model.image !== null} ${model.audio !== null && model.audioRate}` : null;
    if (key === this.trialKey) return;
    this.closeTrial();
    this.trialKey = key;
    if (key === null) {
      this.parts.trial.replaceChildren();
      return;
    }
    this.trial = new Trial(this.link, this.name, model);
    this.parts.trial.replaceChildren(element("h3", { text: "Try it" }), this.trial.node);
  }
}

function jobs(list, now) {
  if (!list.length) return [];
  return [element("h3", { text: "Deployments" }), element("table", { class: "wide" },
    element("thead", {}, element("tr", {}, ...["when", "model", "result"].map((text) => element("th", { scope: "col", text })))),
    element("tbody", {}, ...list.map((job) => element("tr", {},
      element("td", { title: job.time ? moment(job.time) : "", text: ago(job.time, now) }), element("td", { text: job.model }),
      element("td", {}, element("span", { class: job.status === "SUCCEEDED" ? "good" : ["QUEUED", "IN_PROGRESS"].includes(job.status) ? "" : "bad", text: job.status.toLowerCase().replace("_", " ") }),
        job.step && steps(job.step),
        job.message && element("p", { text: `${job.message}${job.code ? ` (${job.code})` : ""}` }),
        job.status !== "SUCCEEDED" && job.hint && element("p", { class: "hint", text: job.hint }))))))];
}

/** What happened, the newest first. */
export function eventList(events, now, onOpen = null) {
  if (!events.length) return [];
  return [element("h3", { text: "What happened" }), element("table", { class: "wide" }, element("tbody", {}, ...events.map((event) =>
    element("tr", {}, element("td", { class: "muted", title: moment(event.time_s), text: ago(event.time_s, now) }),
      onOpen && element("td", {}, element("button", { type: "button", text: event.agent, data: { key: `event ${event.number}` }, on: { click: () => onOpen(event.agent) } })),
      element("td", {}, element("span", { class: event.kind === "bad" ? "bad" : event.kind === "good" ? "good" : "", text: event.text }),
        event.hint && element("p", { class: "hint", text: event.hint }))))))];
}
