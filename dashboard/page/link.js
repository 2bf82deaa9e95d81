// The connection to the dashboard's server: one WebSocket that stays, requests beside it.
//
// Promises: it connects again by itself, whatever went away, and says what is wrong. The token stays in this
// tab's memory: it leaves the address bar at once, and no other site can read it.
// The page loads this file first, and it connects at once: the first message, which has all agents, is on its way
// while the rest of the page is loaded. What arrives before `listen` waits for it.

const QUIET_MS = 7000; // the server says something every 2 s; a connection is made in less, too
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
const KEPT = "edgebundle-token";

/** Take the token from the address, or the one that this tab has kept. */
function takeToken() {
  const given = location.hash.slice(1);
  if (/^[\w-]{20,}$/.test(given)) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEPT) ?? "";
}

/** An error that the server explains. */
export class ServerError extends Error {
  constructor(message, hint = "") {
    super(message);
    this.hint = hint;
  }
}

class Link {
  constructor(token) {
    this.token = token;
    this.early = [];
    this.onMessage = (message) => this.early.push(() => this.onMessage(message));
    this.onState = (state) => this.early.push(() => this.onState(state));
    this.looking = null;
    this.pause = FIRST_PAUSE_MS;
    addEventListener("online", () => this.hurry());
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.hurry(); });
    this.connect();
  }

  /** From now on `onMessage` gets each message, and `onState` gets "up", "lost" or "refused". */
  listen(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    for (const waiting of this.early.splice(0)) waiting();
  }

  connect() {
    clearTimeout(this.timer);
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const socket = new WebSocket(`${scheme}://${location.host}/live`, ["edgebundle", this.token || "none"]);
    this.socket = socket;
    this.wait(socket);
    socket.onopen = () => {
      this.pause = FIRST_PAUSE_MS;
      this.onState("up");
      this.look(this.looking);
      this.wait(socket);
    };
    socket.onmessage = (event) => {
      this.wait(socket);
      this.onMessage(JSON.parse(event.data));
    };
    socket.onclose = () => this.lost(socket);
  }

  // A connection that is silent for too long is dead: a laptop slept, a tunnel broke.
  wait(socket) {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => { socket.close(); this.lost(socket); }, QUIET_MS);
  }

  async lost(socket) {
    if (this.socket !== socket) return;
    this.socket = null;
    clearTimeout(this.silence);
    // Why a WebSocket was refused is kept from scripts: ask.
    const refused = await fetch("/api/session", { headers: this.headers(), signal: AbortSignal.timeout(QUIET_MS) }).then((answer) => answer.status === 403, () => false);
    this.onState(refused ? "refused" : "lost");
    if (refused) return;
    this.timer = setTimeout(() => this.connect(), this.pause);
    this.pause = Math.min(this.pause * 2, LONGEST_PAUSE_MS);
  }

  hurry() {
    if (this.socket === null && this.timer !== undefined) this.connect();
  }

  /** Tell the server what the page looks at. */
  look(at) {
    this.looking = at;
    if (at && this.socket?.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(at));
  }

  headers() {
    return { "X-Edgebundle-Token": this.token };
  }

  /** Send a request; returns the answer's JSON, or throws a `ServerError`. */
  async ask(path, { method = "POST", body, type = "application/octet-stream", signal } = {}) {
    let answer;
    try {
      answer = await fetch(path, { method, body, signal, headers: { ...this.headers(), "Content-Type": type } });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("the dashboard does not answer", "check whether `edgebundle dashboard` still runs");
    }
    if (answer.status === 204) return null;
    const json = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new ServerError(json.error ?? `status ${answer.status}`, json.hint);
    return json;
  }
}

/** The page's connection. */
export const link = new Link(takeToken());
