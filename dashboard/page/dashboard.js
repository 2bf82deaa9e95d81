// The page: what the server says goes to the list and the panel, what the user chooses goes to the server.

import { AgentPanel, eventList } from "./agent_panel.js";
import { Deploying } from "./deploying.js";
import { element, forget, show } from "./elements.js";
import { link } from "./link.js";
import { Roster } from "./roster.js";
import { digits, moment } from "./words.js";

const MAX_EVENTS = 100;
const MAX_VERSIONS = 20;
const $ = (id) => document.getElementById(id);
const state = { agent: null, model: null, visible: [], broker: null, link: "connecting", now: Date.now() / 1000, events: [], hasList: false, full: false };
const title = document.title;

const deploying = new Deploying(link, $("dialog"), $("actions"), complain);
const panel = new AgentPanel($("panel"), link, deploying, { onModel: (model) => { state.model = model; look(); }, onBack: () => go(null) });
const roster = new Roster($("list"), $("rows"), { onOpen: (name) => go(name), onLook: (visible) => { state.visible = visible; look(); } });

function onMessage(message) {
  state.now = message.now;
  if (message.broker) { state.broker = message.broker; notice(); }
  if (message.fleet) {
    state.hasList = true;
    state.full = message.fleet.full;
    roster.change(message.rows ?? [], message.fleet.gone, message.fleet.whole);
    counts();
  }
  if (message.live) roster.numbers(message.live);
  if (message.actions) deploying.change(message.actions);
  if (message.events) {
    const again = new Set(message.events.map(({ agent, text }) => `${agent} ${text}`));
    state.events = [...message.events.reverse(), ...state.events.filter(({ agent, text }) => !again.has(`${agent} ${text}`))].slice(0, MAX_EVENTS);
  }
  if (message.detail) panel.change(message.detail, message.now);
  if (state.agent === null) overview();
}

// Where the page is stands in its address, so that the browser's own Back returns to the list.
function go(name) {
  const wanted = name === null ? "" : `#/${name}`;
  if (location.hash !== wanted) history.pushState(null, "", wanted || location.pathname);
  route();
  if (name !== null) $("panel").focus({ preventScroll: true });
  else $("list").focus({ preventScroll: true });
}

function route() {
  const [, name = null] = /^#\/([\w.-]{1,64})$/.exec(location.hash) ?? [];
  if (name === state.agent) return;
  state.agent = name;
  state.model = null;
  document.title = name === null ? title : `${name} - ${title}`;
  document.body.classList.toggle("open", name !== null);
  forget($("panel"));
  panel.open(name);
  roster.choose(name);
  if (name === null) overview();
  look();
}

function look() {
  link.look({ visible: state.visible, agent: state.agent, model: state.model });
}

function overview() {
  const models = versions();
  show($("panel"), [state.events, Math.floor(state.now / 60), roster.agents.size === 0, models], () => (roster.agents.size
    ? [element("p", { class: "muted", text: "Choose an agent: with a click, or with the arrow keys and Enter. / finds one." }),
      models.length > 0 && element("h3", { text: "Models" }), models.length > 0 && element("table", { class: "versions" },
        element("thead", {}, element("tr", {}, ...["model", "devices", "not ready"].map((text) => element("th", { scope: "col", text })))),
        element("tbody", {}, ...models.map(([text, all, bad]) => element("tr", {}, element("td", { text }),
          element("td", { text: digits(all) }), element("td", { class: bad ? "bad" : "muted", text: digits(bad) }))))),
      ...eventList(state.events, state.now, go)]
    : []));
}

/** Which versions of models the devices have, the most frequent first: the name, how many have it, on how many it is not ready. */
function versions() {
  const found = new Map();
  for (const { models } of roster.agents.values()) {
    for (const [name, version, condition] of models) {
      const [all, bad] = found.get(`${name} ${version}`) ?? [0, 0];
      found.set(`${name} ${version}`, [all + 1, bad + (condition === "ready" ? 0 : 1)]);
    }
  }
  return [...found].map(([text, counts]) => [text, ...counts]).sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0])).slice(0, MAX_VERSIONS);
}

function counts() {
  const all = [...roster.agents.values()];
  const online = all.filter((agent) => agent.state === "online").length;
  const bad = all.filter((agent) => agent.alerts.length).length;
  show($("counts"), [all.length, online, bad, state.full], () => all.length ? [
    `${online} of ${all.length} online`, bad > 0 && element("span", { class: "bad", text: `, ${bad} ${bad === 1 ? "needs" : "need"} attention` }),
    state.full && element("span", { class: "bad", text: " (more agents than this page lists)" })] : []);
  const isEmpty = state.hasList && roster.names.length === 0;
  const isNew = $("list").hidden && !isEmpty;
  $("empty").hidden = !isEmpty;
  $("list").hidden = isEmpty;
  if (isNew && document.activeElement === document.body) $("list").focus({ preventScroll: true });
  if (isEmpty) show($("empty"), [all.length === 0, state.broker?.url], () => (all.length ? element("p", { text: "No agent fits." }) : firstSteps()));
}

function firstSteps() {
  return [element("h2", { text: "No agents yet" }),
    element("p", { text: `The broker ${state.broker?.url ?? ""} knows no agent. On a device, install the package, then:` }),
    element("pre", { text: `sudo edge-agent enroll --broker ${state.broker?.url ?? "URL"} --trust signing.pub --start` }),
    element("p", { text: "To try it on this machine:" }),
    element("pre", { text: `edge-agent run --broker ${state.broker?.url ?? "URL"} --device try --trust keys/ --state-dir try/` }),
    element("p", { class: "muted", text: "It appears here by itself. docs/install.md describes every step." })];
}

function notice() {
  const { broker } = state;
  $("broker").textContent = broker ? broker.url : "";
  const text = {
    refused: "This address is no longer valid: the dashboard was started again, or the address was not complete. Open the one that `edgebundle dashboard` printed.",
    lost: "The dashboard does not answer: it was stopped, or the connection to it is lost. Trying again\u2026 What you see is not current.",
  }[state.link] ?? (broker && !broker.up ? `The broker has been unreachable since ${moment(broker.since)} (${broker.why}). Trying again\u2026 What you see is not current.`
    : broker?.refused.length ? `The broker's access list keeps this user from reading: ${broker.refused.join(", ")}.` : "");
  $("notice").hidden = !text;
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

function complain(error) {
  const dialog = $("dialog");
  if (dialog.open) dialog.close();
  dialog.replaceChildren(element("h2", { id: "question", class: "bad", text: error.message }), ...(error.hint ? [element("p", { text: error.hint })] : []),
    element("div", { class: "buttons" }, element("button", { type: "button", text: "Close", autofocus: true, on: { click: () => dialog.close() } })));
  dialog.showModal();
}

const filter = () => { roster.filter($("find").value, $("show").value); counts(); };
$("find").addEventListener("input", filter);
$("show").addEventListener("change", filter);
$("find").addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); $("list").focus(); }
  if (event.key === "Escape") { $("find").value = ""; filter(); }
});
$("skip").addEventListener("click", (event) => { event.preventDefault(); $("list").focus(); });
addEventListener("keydown", (event) => {
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "") || $("dialog").open;
  if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) { event.preventDefault(); if (document.body.classList.contains("open") && innerWidth < 832) go(null); $("find").focus(); }
  if (event.key === "Escape" && !isTyping && state.agent !== null) go(null);
});
addEventListener("popstate", route);
addEventListener("hashchange", route);
for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => event.preventDefault()); // a file that misses opens nothing
route();
$("list").focus({ preventScroll: true });
link.listen(onMessage, (now) => {
  state.link = now;
  // A connection begins with all that the server knows; it may be another server than before.
  if (now === "up") { state.events = []; deploying.forget(); }
  notice();
});
