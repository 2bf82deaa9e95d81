// Deployments and rollbacks: a question, then their steps as the agent reports them.

import { element, show } from "./elements.js";
import { bytes } from "./words.js";

const STEPS = ["downloading", "verifying", "installing", "testing", "activating", "committing", "cleanup"];
const KEPT_MS = 20000; // how long a success stays in view

/** Ask a question in a dialog; resolves to whether it was confirmed. The safe answer has the focus. */
export function confirmed(dialog, question, lines, verb) {
  return new Promise((resolve) => {
    const yes = element("button", { class: "main", type: "button", text: verb, on: { click: () => dialog.close("yes") } });
    const no = element("button", { type: "button", text: "Cancel", autofocus: true, on: { click: () => dialog.close("") } });
    dialog.replaceChildren(element("h2", { id: "question", text: question }), ...lines.map((text) => element("p", { text })),
      element("div", { class: "buttons" }, no, yes));
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

export class Deploying {
  /** `onError` gets what could not begin. */
  constructor(link, dialog, node, onError) {
    this.link = link;
    this.dialog = dialog;
    this.node = node;
    this.onError = onError;
    this.actions = new Map();
    this.hidden = new Set();
  }

  /** Send a bundle, ask, and deploy it to an agent. */
  async deploy(file, agent, models) {
    if (!file || this.dialog.open) return;
    try {
      const upload = await this.link.ask(`/api/bundles?${new URLSearchParams({ name: file.name })}`, { body: file });
      const running = models.find((model) => model.name === upload.name);
      const lines = [
        `${upload.file}: ${bytes(upload.size)}, for ${upload.target}`,
        running ? `It replaces ${running.name} ${running.version}, which serves until the new one has passed its recorded samples.`
          : `${agent} does not run ${upload.name} yet.`,
        upload.digest,
      ];
      if (await confirmed(this.dialog, `Deploy ${upload.name} ${upload.version} to ${agent}?`, lines, "Deploy")) {
        await this.link.ask("/api/deploy", { body: JSON.stringify({ bundle: upload.id, agent }), type: "application/json" });
      } else {
        await this.link.ask(`/api/bundles/${upload.id}`, { method: "DELETE" });
      }
    } catch (error) {
      this.onError(error);
    }
  }

  /** Ask, and return a model to its previous version. */
  async rollBack(agent, model) {
    if (this.dialog.open) return;
    const lines = [
      `${model.name} ${model.version} serves until the previous version has passed its recorded samples.`,
      `previous: ${model.previous}`,
      "The agent refuses it if its security counter is lower than that of a version that was in service.",
    ];
    if (!await confirmed(this.dialog, `Roll back ${model.name} on ${agent}?`, lines, "Roll back")) return;
    try {
      await this.link.ask("/api/roll-back", { body: JSON.stringify({ agent, model: model.name }), type: "application/json" });
    } catch (error) {
      this.onError(error);
    }
  }

  /** Forget what a server said that may be gone. */
  forget() {
    this.actions.clear();
    this.draw();
  }

  /** Take what changed. */
  change(actions) {
    for (const action of actions) {
      const known = this.actions.get(action.id);
      this.actions.set(action.id, action);
      if (action.outcome === "ok" && known?.outcome !== "ok") setTimeout(() => this.hide(action.id), KEPT_MS);
    }
    this.draw();
  }

  hide(id) {
    this.hidden.add(id);
    this.draw();
  }

  draw() {
    const shown = [...this.actions.values()].filter((action) => !this.hidden.has(action.id)).slice(-4);
    show(this.node, shown, () => shown.map((action) => {
      const name = `${action.model} ${action.version}`.trim();
      const title = { "": action.kind === "deploy" ? `Deploying ${name} to ${action.agent}` : `Rolling back ${name} on ${action.agent}`,
        ok: action.kind === "deploy" ? `${name} is in service on ${action.agent}` : `${name} on ${action.agent} is the previous version again`,
        failed: `${action.agent}: ${name}: it was not ${action.kind === "deploy" ? "deployed" : "rolled back"}` }[action.outcome];
      return element("div", { class: `action ${action.outcome}`, data: { action: action.id } },
        element("button", { type: "button", text: "\u00d7", "aria-label": "Hide this", data: { key: `hide ${action.id}` }, on: { click: () => this.hide(action.id) } }),
        element("strong", { text: title }),
        action.outcome === "" && steps(action.step),
        action.outcome === "" && element("progress", { max: 1, ...(action.step === "downloading" ? { value: action.fraction } : {}), "aria-label": action.step }),
        action.message && element("p", { class: action.outcome === "failed" ? "bad" : "", text: action.message }),
        action.hint && element("p", { class: "hint", text: action.hint }));
    }));
  }
}

/** The steps of a deployment, with the one under way. */
export function steps(now) {
  const at = STEPS.indexOf(now.replace(" ", "_"));
  if (at < 0) return element("div", { class: "steps" }, element("span", { class: "now", text: now }));
  return element("div", { class: "steps" }, ...STEPS.map((step, i) =>
    element("span", { class: i < at ? "done" : i === at ? "now" : "", text: i < at ? `\u2713 ${step}` : step })));
}
