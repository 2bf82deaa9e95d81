/**
 * The client of edgebundle: ask models on devices over MQTT, from Node and from browsers.
 *
 *     import { Client } from "edgebundle";
 *
 *     const faces = new Client("mqtt://broker").model("kitchen", "faces"); // "ws://broker:9001" in a browser
 *     console.log((await faces({ image: "cat.jpg" })).boxes);
 *
 * Promises: a request is sent again, with the same Correlation Data, until there is one answer, or an error
 * that says why there is none; late and second answers are dropped. docs/mqtt.md is the protocol, and
 * docs/clients.md shows this client beside the one for Python, which has the same names.
 *
 * A request is sent at QoS 0 first and repeated at QoS 1. JavaScript cannot set TCP_QUICKACK, without which an
 * answer at QoS 1 waits 40 ms in a broker that keeps Nagle's algorithm on; repeating makes up for QoS 0.
 */
import * as mqttModule from "mqtt";

// Node 18 has it only in a module.
const crypto = globalThis.crypto ?? (await import(/* @vite-ignore */ "node:crypto")).webcrypto;
const connect = mqttModule.connect ?? mqttModule.default.connect;

/** When to send a request again for the first time; the interval grows by half each time. */
const RESEND_S = 2;
const LONGEST_RESEND_S = 15;
/** Without an answer after this long, find out whether the agent exists. */
const ABSENT_S = 1;
/** The retained messages of a subscription have all arrived when none has for this long. */
const QUIET_S = 0.15;
const LIST_LIMIT_S = 0.7;
const INFO_LIMIT_S = 1;
/** The first pause after a 503; it doubles each time. */
const OVERLOAD_PAUSE_S = 0.2;
const CONNECT_LIMIT_S = 10;
/** MQTT 5.0, 3.4.2.1: the broker accepted the message, and there is no subscriber. */
const NO_SUBSCRIBERS = 0x10;
/** By default an agent accepts packets of 64 MiB; a broker drops a larger one without a word. */
const MAX_REQUEST_BYTES = 64 * 1024 * 1024 - 256 * 1024;
/** An answer has at most 64 MiB, and its properties. */
const MAX_PACKET_BYTES = 65 * 1024 * 1024;
/** What an agent retains; its metrics are the longest document. */
const MAX_DOCUMENT_BYTES = 4 * 1024 * 1024;
const MAX_DOCUMENT_VALUES = 1 << 18;
/** Values of an answer in JSON, and texts of one in bytes: reading more takes a second. MQTT 5's are not JSON. */
const MAX_JSON_VALUES = 1 << 20;
const MAX_TEXTS = 1 << 18;
/** As the agent writes it. */
const MAX_DIMENSIONS = 16;
const MAX_NAMES = 10000;
const MAX_SHOWN = 8;
const PREFIX = "edge/v1";
const RAW = "application/octet-stream";
const JSON_TYPE = "application/json";
const DEVICE_NAME = /^[A-Za-z0-9._-]{1,64}$/;
const MODEL_NAME = /^[a-z0-9._-]{1,64}$/;
const REPLY_NAME = /^[A-Za-z0-9][A-Za-z0-9._~:=@-]{0,127}$/;
const RESERVED = ["groups", "replies"];
/** Who asks without a user; no user has this name. */
const ANONYMOUS = "anonymous";
const SESSION_NAME = /^[A-Za-z0-9._~:@+-]{1,64}$/;
/** A request that ends a session without computing anything. */
const END_OF_SESSION = {};
const TENSOR = /^([^;]{1,256});([A-Z0-9]{1,8});((?:0|[1-9][0-9]{0,9})?(?:,(?:0|[1-9][0-9]{0,9})){0,15})$/;
const UTF8 = new TextDecoder();
const TIMING = /^\s*(queue|decode|compute|encode);dur=([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*$/;

/** Datatypes of the Open Inference Protocol, and the typed arrays that hold them. */
const ARRAYS = {
  BOOL: Uint8Array,
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP16: Uint16Array,
  FP32: Float32Array,
  FP64: Float64Array,
};
const DATATYPES = new Map([
  [Uint8Array, "UINT8"],
  [Uint8ClampedArray, "UINT8"],
  [Uint16Array, "UINT16"],
  [Uint32Array, "UINT32"],
  [BigUint64Array, "UINT64"],
  [Int8Array, "INT8"],
  [Int16Array, "INT16"],
  [Int32Array, "INT32"],
  [BigInt64Array, "INT64"],
  [Float32Array, "FP32"],
  [Float64Array, "FP64"],
]);

/** A failure that can be explained in one line; `hint` says what to do about it. */
export class ClientError extends Error {
  constructor(message, hint = null) {
    super(hint ? `${message} (${hint})` : message);
    this.name = new.target.name;
    this.hint = hint;
  }
}
/** An argument cannot be used. */
export class UsageError extends ClientError {}
/** The broker cannot be reached, or refuses. */
export class BrokerError extends ClientError {}
/** The broker knows no agent, or no group, of that name. */
export class UnknownAgentError extends ClientError {}
/** No answer came before the deadline. */
export class NoAnswerError extends ClientError {}
/** What came is not the answer of an agent. */
export class BadAnswerError extends ClientError {}
/** The client was closed, perhaps while the request was under way. */
export class ClosedError extends ClientError {}
/** The agent answered with a status that is not 200. */
export class RefusedError extends ClientError {
  constructor(message, hint = null, status = 0) {
    super(message, hint);
    this.status = status;
  }
}
/** 400: the input's names, shapes, datatypes or payload do not fit the model. */
export class InputError extends RefusedError {}
/** 404: no model of that name runs there. */
export class UnknownModelError extends RefusedError {}
/** 408: the deadline passed while the request waited or was computed. */
export class DeadlineError extends RefusedError {}
/** 409: the request is not the next step of its session. */
export class SessionStepError extends RefusedError {}
/** 410: the session has ended: others took its place, it was unused, or the model was restarted. */
export class SessionGoneError extends RefusedError {}
/** 413: the payload is longer than an agent accepts. */
export class PayloadError extends RefusedError {}
/** 415: the model or the agent does not take this kind of payload. */
export class MediaTypeError extends RefusedError {}
/** 500: the model failed while it ran. */
export class ExecutionError extends RefusedError {}
/** 503: the queue was full, or the model was out of service, until the deadline. */
export class OverloadedError extends RefusedError {}

const REFUSALS = {
  400: [InputError, "`info()` of the model lists its inputs"],
  404: [UnknownModelError, null],
  408: [DeadlineError, "allow more time with a longer deadline, or send fewer requests"],
  409: [SessionStepError, "begin again: session.reset()"],
  410: [SessionGoneError, "begin again: session.reset()"],
  413: [PayloadError, "send a smaller picture, or fewer tensors in one request"],
  415: [MediaTypeError, "send a JPEG or PNG if the model has preprocessing, or tensors if it does not"],
  500: [ExecutionError, "read the agent's log on the device: journalctl -u edge-agent"],
  503: [OverloadedError, "try again later, or deploy the model to more agents"],
};

/** One answer: tensors by name, labels and boxes as objects. */
export class Answer {
  constructor({ agent, model, version, outputs, timing, attempts, trace }) {
    this.agent = agent;
    this.model = model;
    this.version = version;
    /** Name -> { name, datatype, shape, data }. */
    this.outputs = outputs;
    /** Seconds: { total, network, queue, decode, compute, encode }; null if the agent does not say. */
    this.timing = timing;
    this.attempts = attempts;
    this.trace = trace;
  }

  /** The first top-k list, best first: { label, score, index }. */
  get labels() {
    const prefix = this.#prefix("indices", "scores");
    if (prefix === null) return [];
    const scores = this.outputs.get(`${prefix}scores`).data;
    const indices = Array.from(this.outputs.get(`${prefix}indices`).data, Number);
    const names = this.#names(prefix, indices);
    return indices.map((index, i) => ({ label: names[i], score: scores[i], index }));
  }

  /**
   * The first list of detected objects, best first: { label, score, index, x0, y0, x1, y1 } in pixels of the
   * picture as it was sent, after its Exif rotation.
   */
  get boxes() {
    const prefix = this.#prefix("classes", "boxes");
    if (prefix === null) return [];
    const scores = this.outputs.get(`${prefix}scores`).data;
    const edges = this.outputs.get(`${prefix}boxes`).data;
    const indices = Array.from(this.outputs.get(`${prefix}classes`).data, Number);
    const names = this.#names(prefix, indices);
    return indices.map((index, i) => {
      const [x0, y0, x1, y1] = edges.slice(4 * i, 4 * i + 4);
      return { label: names[i], score: scores[i], index, x0, y0, x1, y1 };
    });
  }

  /** What the names of a list begin with; texts, or classes that are not finite, are no list. */
  #prefix(suffix, partner) {
    for (const name of this.outputs.keys()) {
      if (name !== suffix && !name.endsWith(`_${suffix}`)) continue;
      const prefix = name.slice(0, name.length - suffix.length);
      const parts = [suffix, "scores", partner].map((part) => this.outputs.get(prefix + part));
      if (!parts.every((part) => part !== undefined && part.datatype !== "BYTES")) continue;
      if (parts[0].data.every((index) => Number.isFinite(Number(index)))) return prefix;
    }
    return null;
  }

  #names(prefix, indices) {
    return this.outputs.get(`${prefix}labels`)?.data ?? indices.map(String);
  }
}

/** A client of the agents at one broker; it connects at the first request, or with `connect()`. */
export class Client {
  #url;
  #options;
  #mqtt = null;
  #ready = null;
  #closed = false;
  #connects = 0;
  #replyName;
  /** The user in the topic of a request, as "/alice"; empty without one. */
  #user;
  #folder = randomName(8);
  #progress;
  #isV5;
  #exchanges = new Map();
  #presences = new Map();
  #states = new Map();
  #watched = new Set();
  #listeners = new Set();
  #inquiries = new Map();
  #listing = Promise.resolve();
  /** What the broker said about messages that it took, until their callback asks; mqtt.js does not pass it on. */
  #verdicts = new Map();

  /**
   * @param {string} url `mqtt://`, `mqtts://`, `ws://` or `wss://`; browsers have only the last two.
   * @param {object} [options] `username`, `password`; `mqttVersion` (5 or "3.1.1"); `progress(line)`; anything
   *   else goes to `connect` of mqtt.js, such as `ca`, `cert`, `key`.
   */
  constructor(url, { progress = () => {}, mqttVersion = 5, ...options } = {}) {
    let user = options.username;
    try {
      const parts = new URL(url);
      if (!["mqtt:", "mqtts:", "ws:", "wss:"].includes(parts.protocol)) throw new TypeError();
      user ??= parts.username ? decodeURIComponent(parts.username) : undefined;
    } catch {
      throw new UsageError(
        `expected the URL of a broker, got ${show(url)}`,
        "write mqtt://HOST, mqtts://HOST, ws://HOST:PORT or wss://HOST:PORT",
      );
    }
    if (mqttVersion !== 5 && mqttVersion !== "3.1.1") {
      throw new UsageError(`mqttVersion: expected 5 or "3.1.1", got ${show(mqttVersion)}`);
    }
    this.#url = url;
    this.#isV5 = mqttVersion === 5;
    this.#progress = progress;
    // Both names are compared by the broker's access list; without a user, the answers' name is random.
    const isName = user !== undefined && REPLY_NAME.test(user) && !RESERVED.includes(user);
    this.#user = isName && user !== ANONYMOUS ? `/${user}` : "";
    this.#replyName = isName ? user : `${ANONYMOUS}-${randomName(6)}`;
    if (user && !this.#user) progress(`no user in a topic can be ${show(user)}: this client asks without one`);
    this.#options = {
      reconnectPeriod: 500,
      connectTimeout: CONNECT_LIMIT_S * 1000,
      ...options,
      // Random, because anyone who knows it can disconnect this client.
      clientId: `edgebundle-${randomName(8)}`,
      protocolVersion: this.#isV5 ? 5 : 4,
      clean: true,
      resubscribe: true,
      queueQoSZero: false,
      ...(this.#isV5 ? { properties: { maximumPacketSize: MAX_PACKET_BYTES, ...options.properties } } : {}),
    };
  }

  /** A model on one agent; nothing is sent yet. */
  model(agent, model) {
    return this.#callable(agent, model, false);
  }

  /** A model on any agent of a group: the broker gives each request to one of them. */
  groupModel(group, model) {
    return this.#callable(group, model, true);
  }

  /** Connect; a request does it too. */
  connect() {
    if (this.#closed) return Promise.reject(new ClosedError("the client is closed"));
    this.#ready ??= this.#connect().catch((error) => {
      this.#ready = null;
      throw error;
    });
    return this.#ready;
  }

  /** The names of the agents that the broker knows, online or not. */
  agents() {
    return this.#names(`${PREFIX}/+/state`, (levels) =>
      levels.length === 4 && levels[3] === "state" ? [levels[2]] : [],
    );
  }

  /** End the connection; requests that are under way are rejected with `ClosedError`. */
  async close() {
    this.#closed = true;
    for (const exchange of [...this.#exchanges.values()]) {
      exchange.fail(new ClosedError("the client was closed while the request was under way"));
    }
    const mqtt = this.#mqtt;
    this.#mqtt = null;
    if (mqtt !== null) await mqtt.endAsync(true);
  }

  #callable(name, model, isGroup) {
    if (!DEVICE_NAME.test(name) || RESERVED.includes(name) || !MODEL_NAME.test(model)) {
      throw new UsageError(
        `expected the names of ${isGroup ? "a group" : "an agent"} and a model, got ${show(name)} and ${show(model)}`,
      );
    }
    const target = {
      name,
      model,
      isGroup,
      topic: `${PREFIX}/${isGroup ? "groups/" : ""}${name}/models/${model}/infer${this.#user}`,
      stateFilter: isGroup ? `${PREFIX}/+/models/${model}/state` : `${PREFIX}/${name}/models/${model}/state`,
    };
    const call = (input, options) => this.#ask(target, input, options);
    return Object.assign(call, {
      agent: name,
      model,
      info: () => this.#info(target),
      map: (items, options) => this.#map(call, items, options),
      session: (sessionName) => this.#session(target, sessionName),
    });
  }

  /** Calls whose state, or whose recording, goes on from one to the next; docs/mqtt.md, Sessions. */
  #session(target, name = randomName(8)) {
    if (target.isGroup) {
      throw new UsageError(`${target.name}: expected one agent for a session, got a group, whose members take turns`);
    }
    if (!SESSION_NAME.test(name)) {
      throw new UsageError(`session: expected 1 to 64 letters, digits and ._~:@+-, got ${show(name)}`);
    }
    let step = 0;
    let turn = Promise.resolve();
    // One call at a time: the next step is sent after the answer to the one before.
    const call = (input, { end = false, ...options } = {}) => {
      const answer = turn.then(async () => {
        const session = { session: name, session_step: step, ...(end ? { session_end: true } : {}) };
        const received = await this.#ask(target, input, options, session);
        step = end ? 0 : step + 1;
        return received;
      });
      turn = answer.catch(() => {});
      return answer;
    };
    return Object.assign(call, {
      session: name,
      /** The next call begins again. */
      reset: () => {
        step = 0;
      },
      /** End a recording: hear what is left of it. */
      finish: async (options) => {
        const { audioRate } = await this.#info(target);
        if (audioRate === null) throw new UsageError("expected a model that takes recordings to finish one");
        return call({ audio: new Uint8Array(0), contentType: `audio/L16;rate=${audioRate}` }, { ...options, end: true });
      },
      /** End the session, so that the device has its place for others. */
      close: async () => {
        if (step > 0) await call(END_OF_SESSION, { end: true, deadlineS: 2 }).catch(() => {});
      },
    });
  }

  async #connect() {
    const mqtt = connect(this.#url, this.#options);
    this.#mqtt = mqtt;
    mqtt.on("message", (topic, payload, packet) => this.#received(topic, payload, packet));
    mqtt.on("packetreceive", ({ cmd, messageId, reasonCode }) => {
      if (cmd === "puback" && reasonCode) this.#verdicts.set(messageId, reasonCode);
    });
    mqtt.on("connect", () => {
      // Node's TCP or TLS socket; that of a WebSocket in Node has it set already, and a browser sets it itself.
      mqtt.stream?.setNoDelay?.(true);
      this.#connects += 1;
      for (const exchange of this.#exchanges.values()) exchange.reconnected();
    });
    mqtt.on("close", () => {
      if (this.#exchanges.size > 0 && !this.#closed && this.#connects > 0)
        this.#progress("the connection to the broker was lost; connecting again");
    });
    try {
      const connected = new Promise((resolve, reject) => {
        mqtt.once("connect", resolve);
        mqtt.once("error", reject);
        mqtt.once("close", () => reject(new Error("the connection was closed")));
      });
      const subscribed = connected.then(() => {
        mqtt.on("error", () => {}); // "close" follows, and the library connects again
        return mqtt.subscribeAsync(`${PREFIX}/replies/${this.#replyName}/+/${this.#folder}/#`, { qos: 1 });
      });
      await within(CONNECT_LIMIT_S, subscribed);
    } catch (error) {
      mqtt.on("error", () => {});
      mqtt.end(true);
      this.#mqtt = null;
      const place = new URL(this.#url);
      throw new BrokerError(
        `cannot reach the broker at ${place.protocol}//${place.host}: ${reason(error)}`,
        "check the address, and whether the broker runs there",
      );
    }
  }

  #received(topic, payload, packet) {
    const levels = topic.split("/");
    if (levels[2] === "replies") {
      const exchange = this.#exchanges.get(levels[6]);
      // A retained message is no answer: it would arrive with the subscription.
      if (levels.length === 7 && levels[5] === this.#folder && exchange?.target.name === levels[4] && !packet.retain) {
        exchange.arrived(payload, packet.properties ?? {});
      }
    } else if (levels.length === 4 && levels[3] === "state" && this.#watched.has(topic)) {
      this.#presences.set(levels[2], parseObject(payload));
    } else if (levels.length === 6 && levels[3] === "models" && levels[5] === "state") {
      for (const filter of [topic, `${PREFIX}/+/models/${levels[4]}/state`]) {
        const known = this.#states.get(filter);
        if (known === undefined || (known.size >= MAX_NAMES && !known.has(levels[2]))) continue;
        if (payload.length > 0) known.set(levels[2], parseObject(payload));
        else known.delete(levels[2]);
      }
    }
    for (const listener of this.#listeners) listener(levels, payload);
  }

  async #watch(filter) {
    if (this.#watched.has(filter)) return;
    this.#watched.add(filter);
    await this.#mqtt?.subscribeAsync(filter, { qos: 0 }).catch(() => {});
  }

  async #ask(target, input, { deadlineS = 30, raw, traceparent, tracestate, progress, signal } = {}, session = null) {
    if (!(deadlineS > 0 && deadlineS < Infinity)) {
      throw new UsageError(`deadlineS: expected a positive number of seconds, got ${show(deadlineS)}`);
    }
    if (raw !== undefined && typeof raw !== "boolean") {
      throw new UsageError(`raw: expected true or false, got ${show(raw)}`);
    }
    const end = now() + deadlineS;
    await this.connect();
    const request = await this.#request(target, input);
    request.session = session;
    request.raw = raw === true;
    if (request.body.length > MAX_REQUEST_BYTES) {
      throw new UsageError(`expected a request of at most ${MAX_REQUEST_BYTES} bytes, got ${request.body.length}`);
    }
    if (!this.#isV5 && request.contentType !== JSON_TYPE) request.json = await this.#toJson(target, request);
    const trace = {};
    if (traceparent !== undefined) trace.traceparent = traceparent;
    if (tracestate !== undefined) trace.tracestate = tracestate;
    if (!target.isGroup) void this.#watch(`${PREFIX}/${target.name}/state`);
    let pause = OVERLOAD_PAUSE_S;
    let began = null;
    let attempts = 0;
    for (;;) {
      const exchange = this.#exchange(target, request, { end, trace, progress: progress ?? this.#progress, signal });
      let message;
      try {
        message = await exchange.done;
      } finally {
        exchange.close();
      }
      began ??= exchange.sentAt;
      attempts += exchange.attempts;
      const received = readAnswer(message, target.name);
      if (received.status === 200) {
        const timing = timingOf(message.properties.userProperties?.["server-timing"], exchange.arrivedAt - began);
        return new Answer({
          agent: target.name,
          model: target.model,
          version: received.version,
          outputs: received.outputs,
          timing,
          attempts,
          trace,
        });
      }
      // The next answer gets as long as the pause, at least: else "no answer" would hide the 503.
      if (received.status !== 503 || now() + 2 * pause >= end) throw await this.#refusal(target, received);
      await sleep(pause);
      pause *= 2;
    }
  }

  #exchange(target, request, { end, trace, progress, signal }) {
    const id = randomName(8);
    const replyTo = `${PREFIX}/replies/${this.#replyName}/${target.name}/${this.#folder}/${id}`;
    const exchange = { target, attempts: 0, sentAt: null, arrivedAt: null, noSubscriber: false };
    const said = new Set();
    let timer = null;
    let interval = RESEND_S;
    let next = 0;
    let over = false;
    // Without MQTT 5 the same bytes each time, by which the agent recognises a repeated request.
    const body = this.#isV5
      ? request.body
      : encode(
          JSON.stringify({
            reply_to: replyTo,
            id,
            deadline_s: Math.max(0.001, end - now()),
            ...request.session,
            ...(request.json ?? JSON.parse(decode(request.body))),
            ...(request.raw ? { parameters: { postprocess: "none" } } : {}),
          }),
        );
    exchange.done = new Promise((resolve, reject) => {
      const settle = (how) => (value) => {
        if (over) return;
        over = true;
        exchange.close();
        how(value);
      };
      exchange.resolve = settle(resolve);
      exchange.fail = settle(reject);
    });
    const aborted = () => exchange.fail(signal.reason);
    exchange.close = () => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", aborted);
      this.#exchanges.delete(id);
    };
    exchange.arrived = (payload, properties) => {
      exchange.arrivedAt = now();
      exchange.resolve({ payload, properties });
    };
    const send = (qos) => {
      const left = end - now();
      if (left <= 0 || !this.#mqtt?.connected) return; // `reconnected` follows
      exchange.attempts += 1;
      const properties = {
        contentType: request.contentType,
        responseTopic: replyTo,
        correlationData: encode(id),
        messageExpiryInterval: Math.max(1, Math.ceil(left)),
        userProperties: {
          accept: request.raw ? `${RAW};postprocess=none` : RAW,
          ...(request.tensors.length > 0 ? { tensor: request.tensors } : {}),
          ...sessionProperties(request.session),
          ...trace,
        },
      };
      this.#mqtt.publish(target.topic, body, this.#isV5 ? { qos, properties } : { qos }, (error, packet) => {
        const code = error?.code ?? this.#verdicts.get(packet?.messageId) ?? 0;
        this.#verdicts.delete(packet?.messageId);
        if (qos === 1) exchange.noSubscriber = code === NO_SUBSCRIBERS;
        if (code === 0x87 || code === 0x95) {
          exchange.fail(
            new BrokerError(
              `the broker refused the request to ${target.topic}: ${reason(error)}`,
              this.#user === "" && code === 0x87
                ? "name the user that the broker knows: new Client(url, { username })"
                : "let this user publish there in the broker's access list, or send less in one request",
            ),
          );
        }
      });
    };
    const wait = (until) => {
      timer = setTimeout(tick, Math.max(0, 1000 * (Math.min(until, end) - now())));
    };
    const tick = () => {
      if (over) return;
      if (now() >= end) {
        exchange.fail(this.#tooLate(exchange));
        return;
      }
      void this.#inquire(exchange, () => send(1));
      const away = this.#away(target);
      if (away !== "" && !said.has(away)) {
        said.add(away);
        progress(`${away}; waiting for up to ${(end - now()).toFixed(0)} s`);
      }
      if (now() >= next) {
        send(1);
        next = now() + interval;
        interval = Math.min(1.5 * interval, LONGEST_RESEND_S);
      }
      if (!over) wait(next);
    };
    exchange.reconnected = () => {
      send(1);
      interval = RESEND_S;
      next = now() + interval;
      clearTimeout(timer);
      wait(next);
    };
    this.#exchanges.set(id, exchange);
    if (signal?.aborted) aborted();
    signal?.addEventListener("abort", aborted, { once: true });
    exchange.sentAt = now();
    next = exchange.sentAt + interval;
    interval *= 1.5;
    if (!over) {
      send(0);
      wait(Math.min(next, exchange.sentAt + ABSENT_S));
    }
    return exchange;
  }

  async #request(target, input) {
    if (input === null || typeof input !== "object") {
      throw new UsageError(
        `expected { image }, { tensors } or { row }, got ${show(input)}`,
        'model({ image: "cat.jpg" }) or model({ tensors: { x: { shape: [1, 4], data } } })',
      );
    }
    const kinds = ["image", "audio", "row", "tensors"].filter((kind) => input[kind] !== undefined);
    if (kinds.length > 1) throw new UsageError(`expected one kind of input, got ${kinds.join(" and ")}`);
    if (input === END_OF_SESSION) return { contentType: RAW, body: new Uint8Array(0), tensors: [] };
    if (input.row !== undefined) return rowRequest(input.row);
    if (input.audio !== undefined) {
      const body = await pictureBytes(input.audio);
      return { contentType: input.contentType ?? "audio/wav", body, tensors: [] };
    }
    if (input.image !== undefined) return pictureRequest(await pictureBytes(input.image));
    const tensors = [];
    const parts = [];
    const given = Object.entries(input.tensors ?? {});
    if (given.length === 0)
      throw new UsageError(
        "expected a picture or tensors, got nothing",
        "model({ image }), model({ tensors: { name: { shape, data } } }) or model({ row: { name: 21.5 } })",
      );
    for (const [name, { datatype, shape, data }] of given) {
      const type = datatype ?? DATATYPES.get(data?.constructor);
      if (type === undefined || ARRAYS[type] === undefined) {
        throw new UsageError(
          `input ${show(name)}: expected a typed array, got ${show(data?.constructor?.name)}`,
          "use Float32Array for FP32, BigInt64Array for INT64",
        );
      }
      const count = (shape ?? []).reduce((product, dim) => product * dim, 1);
      const array = ArrayBuffer.isView(data) ? data : ARRAYS[type].from(data);
      if (!Array.isArray(shape) || array.length !== count) {
        throw new UsageError(`input ${show(name)}: expected ${count} values for shape [${shape}], got ${array.length}`);
      }
      tensors.push(`${name};${type};${shape.join(",")}`);
      parts.push(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    }
    return { contentType: RAW, body: concatenated(parts), tensors };
  }

  async #toJson(target, request) {
    if (request.contentType !== RAW) {
      const { inputs } = await this.#info(target);
      if (inputs.length !== 1)
        throw new UsageError(`expected a model with one input for a picture, got ${inputs.length} inputs`);
      const data = [toBase64(request.body)];
      return {
        inputs: [
          {
            name: inputs[0].name,
            datatype: "BYTES",
            shape: [1],
            data,
            parameters: { content_type: request.contentType },
          },
        ],
      };
    }
    const outputs = rawOutputs(request.tensors, request.body);
    return {
      inputs: [...outputs.values()].map(({ name, datatype, shape, data }) => ({
        name,
        datatype,
        shape,
        data: Array.from(data, Number),
      })),
    };
  }

  async *#map(call, items, { inFlight = 4, ...options } = {}) {
    if (!(inFlight >= 1)) throw new UsageError(`inFlight: expected at least 1, got ${show(inFlight)}`);
    const abort = new AbortController();
    options.signal?.addEventListener("abort", () => abort.abort(options.signal.reason), { once: true });
    if (options.signal?.aborted) abort.abort(options.signal.reason);
    const running = [];
    try {
      for await (const item of items) {
        if (running.length >= inFlight) yield await running.shift();
        const request = call(item, { ...options, signal: abort.signal });
        request.catch(() => {}); // reported when its turn comes
        running.push(request);
      }
      while (running.length > 0) yield await running.shift();
    } finally {
      abort.abort(new ClosedError("the requests of this map were given up"));
    }
  }

  async #info(target) {
    await this.connect();
    if (!this.#states.has(target.stateFilter)) this.#states.set(target.stateFilter, new Map());
    const known = this.#states.get(target.stateFilter);
    if (known.size === 0) {
      void this.#watch(target.stateFilter);
      const end = now() + INFO_LIMIT_S;
      while (known.size === 0 && now() < end) await sleep(0.01);
      if (known.size === 0) throw await this.#unknown(target);
    }
    const [agent, state] = known.entries().next().value;
    const list = (value) => (Array.isArray(value) ? value : []);
    return {
      agent,
      name: target.model,
      version: text(state.version),
      inputs: list(state.inputs),
      outputs: list(state.outputs),
      imageInput: state.image_input ?? null,
      audioInput: state.audio_input ?? null,
      audioRate: state.audio_rate ?? null,
      hasState: state.has_state === true,
      columns: list(state.columns),
      postprocess: list(state.postprocess),
      ready: state.ready === true,
      state: text(state.state),
      message: text(state.message),
    };
  }

  // What to say when there is no answer.

  #away(target) {
    const presence = this.#presences.get(target.name);
    if (target.isGroup || presence === undefined) return "";
    if (presence.state !== "online") return `${target.name} is ${text(presence.state).slice(0, 40) || "unknown"}`;
    return presence.inference === "offline" ? `${target.name} is online, but its connection for requests is not` : "";
  }

  async #inquire(exchange, sendAtQos1) {
    const { target } = exchange;
    // A broker that restarted may have forgotten agents that are about to connect again.
    if (this.#presences.has(target.name) || this.#connects > 1) return;
    const key = `${target.isGroup} ${target.name}`;
    if (this.#inquiries.has(key)) return;
    this.#inquiries.set(key, true);
    try {
      sendAtQos1(); // the broker's acknowledgement says whether anybody takes such requests
      const names = await this.#known(target);
      if (names.includes(target.name) || (names.length === 0 && !exchange.noSubscriber)) return;
      for (const each of [...this.#exchanges.values()]) {
        if (each.target.name === target.name && each.target.isGroup === target.isGroup)
          each.fail(absent(target, names));
      }
    } catch {
      // The deadline ends the request.
    } finally {
      this.#inquiries.delete(key);
    }
  }

  #known(target) {
    if (!target.isGroup) return this.agents();
    return this.#names(`${PREFIX}/+/info`, (levels, payload) => {
      if (levels.length !== 4 || levels[3] !== "info") return [];
      const groups = parseObject(payload).capabilities?.groups;
      return Array.isArray(groups) ? groups.filter((name) => DEVICE_NAME.test(text(name))) : [];
    });
  }

  async #models(target) {
    return this.#names(`${PREFIX}/${target.name}/models/+/state`, (levels) =>
      levels.length === 6 && levels[2] === target.name && levels[5] === "state" ? [levels[4]] : [],
    );
  }

  #names(filter, read) {
    // One at a time: the broker sends what it has retained only with a new subscription.
    const listed = this.#listing.then(async () => {
      await this.connect();
      const names = new Set();
      let last = now();
      const listener = (levels, payload) => {
        if (payload.length === 0 || names.size >= MAX_NAMES) return;
        for (const name of read(levels, payload)) {
          names.add(name);
          last = now();
        }
      };
      this.#listeners.add(listener);
      const end = now() + LIST_LIMIT_S;
      try {
        await Promise.race([this.#mqtt?.subscribeAsync(filter, { qos: 0 }), sleep(LIST_LIMIT_S)]);
        last = now();
        while (now() < end && now() - last < QUIET_S) await sleep(0.01);
      } finally {
        this.#listeners.delete(listener);
        await Promise.race([this.#mqtt?.unsubscribeAsync(filter).catch(() => {}), sleep(LIST_LIMIT_S)]);
      }
      return [...names].sort();
    });
    this.#listing = listed.catch(() => {});
    return listed;
  }

  async #unknown(target) {
    const names = await this.#known(target);
    if (!names.includes(target.name)) return absent(target, names);
    return this.#refusal(target, { status: 404, message: `${target.name} has no model ${show(target.model)}` });
  }

  async #refusal(target, { status, message, hint }) {
    const [Kind, usual] = REFUSALS[status] ?? [RefusedError, null];
    let advice = hint || usual;
    if (status === 404 && !target.isGroup) {
      const names = await this.#models(target).catch(() => []);
      advice =
        names.length > 0
          ? `use one of the models of ${target.name}: ${shown(names)}`
          : `no model is deployed to ${target.name}: deploy one with \`edgebundle deploy\``;
    }
    return new Kind(message || `the agent answered with status ${status}`, advice, status);
  }

  #tooLate(exchange) {
    const { target } = exchange;
    const waited = (now() - exchange.sentAt).toFixed(1);
    let why = this.#away(target) || "it is online";
    if (!this.#mqtt?.connected) why = "there is no connection to the broker";
    else if (target.isGroup)
      why = exchange.noSubscriber ? `no member of the group serves ${target.model}` : "no member of the group answered";
    else if (!this.#presences.has(target.name)) why = "no agent of that name is known at the broker";
    return new NoAnswerError(
      `no answer from ${target.name} within ${waited} s: ${why}`,
      `allow more time, or check that the broker's access list lets this user write ${target.topic} and read its answers`,
    );
  }
}

/** The user properties of a step; MQTT's are texts. */
function sessionProperties(session) {
  if (session === null || session === undefined) return {};
  const end = session.session_end ? { session_end: "1" } : {};
  return { session: session.session, session_step: String(session.session_step), ...end };
}

function readAnswer({ payload, properties }, agent) {
  try {
    const user = properties.userProperties ?? {};
    const one = (value) => (Array.isArray(value) ? value[0] : value);
    const said = one(user.__stat);
    if (properties.contentType === RAW) {
      if (!/^[0-9]{1,3}$/.test(said ?? "")) throw new Error(`expected a status such as 200, got ${show(said)}`);
      const tensors = user.tensor === undefined ? [] : [].concat(user.tensor);
      return {
        status: Number(said),
        message: one(user.__stMsg) ?? "",
        version: one(user.model_version) ?? "",
        outputs: rawOutputs(tensors, payload),
      };
    }
    const body = payload.length > 0 ? parseJson(payload, payload.length, MAX_JSON_VALUES) : {};
    if (body === null || typeof body !== "object" || Array.isArray(body)) throw new Error("expected a JSON object");
    const status = Number(said ?? body.status);
    if (!Number.isInteger(status)) throw new Error("expected a status such as 200");
    const outputs = status === 200 ? jsonOutputs(body.outputs ?? []) : new Map();
    return {
      status,
      // The property and `message` repeat the hint.
      message: text(body.error) || one(user.__stMsg) || text(body.message),
      hint: text(body.hint),
      version: text(body.model_version),
      outputs,
    };
  } catch (error) {
    throw new BadAnswerError(`the answer of ${agent} cannot be read: ${String(error.message).slice(0, 400)}`);
  }
}

function jsonOutputs(outputs) {
  const found = new Map();
  if (!Array.isArray(outputs)) throw new Error(`expected outputs, an array, got ${show(outputs)}`);
  for (const output of outputs) {
    const { name, datatype, shape, data } = output ?? {};
    if (typeof name !== "string" || !Array.isArray(shape) || shape.length > MAX_DIMENSIONS || !Array.isArray(data))
      throw new Error("expected a tensor with a name, a shape and data");
    const spec = parseTensor(`${name};${text(datatype)};${shape.map(Number).join(",")}`);
    const flat = data.flat(MAX_DIMENSIONS);
    const types = datatype === "BYTES" ? ["string"] : ["number", "boolean"];
    if (!flat.every((value) => types.includes(typeof value)))
      throw new Error(`expected the values of ${show(name)}, got values of another type`);
    if (flat.length !== spec.count)
      throw new Error(`expected ${spec.count} values of ${show(name)}, got ${flat.length}`);
    const isBig = datatype === "INT64" || datatype === "UINT64";
    const Kind = datatype === "FP16" ? Float32Array : ARRAYS[datatype];
    found.set(name, {
      name,
      datatype,
      shape,
      data: datatype === "BYTES" ? flat : Kind.from(flat, isBig ? BigInt : Number),
    });
  }
  if (found.size !== outputs.length) throw new Error("expected tensors with different names, got equal ones");
  return found;
}

function rawOutputs(tensors, payload) {
  const bytes = Uint8Array.from(payload); // a copy that begins at a multiple of every size
  const view = new DataView(bytes.buffer);
  const found = new Map();
  let offset = 0;
  let texts = 0;
  for (const described of tensors) {
    const { name, datatype, shape, count } = parseTensor(described);
    if (datatype === "BYTES") {
      texts += count;
      if (texts > MAX_TEXTS) throw new Error(`expected at most ${MAX_TEXTS} texts, got ${texts}`);
      const data = [];
      for (let i = 0; i < count; i += 1) {
        const length = view.getUint32(offset, true);
        offset += 4 + length;
        if (offset > bytes.length) throw new Error(`${show(name)} runs past the end of the payload`);
        data.push(decode(bytes.subarray(offset - length, offset)));
      }
      found.set(name, { name, datatype, shape, data });
      continue;
    }
    const Kind = ARRAYS[datatype];
    const end = offset + count * Kind.BYTES_PER_ELEMENT;
    if (end > bytes.length) throw new Error(`${show(name)} runs past the end of the payload`);
    const data = new Kind(bytes.slice(offset, end).buffer);
    found.set(name, { name, datatype, shape, data: datatype === "FP16" ? fromHalves(data) : data });
    offset = end;
  }
  if (offset !== bytes.length) throw new Error(`expected ${offset} bytes of tensors, got ${bytes.length}`);
  if (found.size !== tensors.length) throw new Error("expected tensors with different names, got equal ones");
  return found;
}

function parseTensor(text) {
  const match = TENSOR.exec(text);
  if (match === null || (match[2] !== "BYTES" && ARRAYS[match[2]] === undefined))
    throw new Error(`expected a tensor described as name;FP32;1,3,4, got ${show(text)}`);
  const shape = match[3] === "" ? [] : match[3].split(",").map(Number);
  const count = shape.reduce((product, dim) => product * dim, 1);
  return { name: match[1], datatype: match[2], shape, count };
}

function timingOf(text, total) {
  const found = {};
  if (typeof text === "string" && text.length <= 256) {
    for (const match of text.split(",").map((part) => TIMING.exec(part)))
      if (match !== null) found[match[1]] = Number(match[2]) / 1000;
  }
  const parts = ["queue", "decode", "compute", "encode"].map((name) => found[name]);
  if (parts.includes(undefined))
    return { total, network: null, queue: null, decode: null, compute: null, encode: null };
  return { total, network: Math.max(0, total - parts.reduce((sum, part) => sum + part, 0)), ...found };
}

/** A row of a table: numbers, truth values, texts, or null or NaN for a missing value; by name, or in order. */
function rowRequest(row) {
  if (row === null || typeof row !== "object" || row instanceof DataView) {
    throw new UsageError(
      `a row: expected an object or an array of values, got ${show(row)}`,
      "model({ row: { temperature: 21.5, humidity: 40 } })",
    );
  }
  const value = (place, given) => {
    if (given === null || given === undefined || Number.isNaN(given)) return null;
    if (given === Infinity || given === -Infinity)
      throw new UsageError(`a row: ${show(place)}: expected a finite number, got ${given}`);
    if (["number", "boolean", "string"].includes(typeof given)) return given;
    throw new UsageError(
      `a row: ${show(place)}: expected a number, a truth value or a text, got ${show(typeof given)}`,
    );
  };
  const entries = row instanceof Map ? [...row] : Object.entries(row);
  const values =
    Array.isArray(row) || ArrayBuffer.isView(row)
      ? Array.from(row, (given, place) => value(place, given))
      : Object.fromEntries(entries.map(([name, given]) => [name, value(name, given)]));
  return { contentType: JSON_TYPE, body: encode(JSON.stringify({ row: values })), tensors: [] };
}

async function pictureBytes(image) {
  if (typeof image === "string") {
    if (typeof process === "undefined" || !process.versions?.node)
      throw new UsageError(
        "a path: expected the picture's bytes or a Blob in a browser",
        "give a File, a Blob or a Uint8Array",
      );
    const { readFile } = await import("node:fs/promises");
    return readFile(image);
  }
  if (typeof Blob !== "undefined" && image instanceof Blob) return new Uint8Array(await image.arrayBuffer());
  if (image instanceof ArrayBuffer) return new Uint8Array(image);
  if (ArrayBuffer.isView(image)) return new Uint8Array(image.buffer, image.byteOffset, image.byteLength);
  throw new UsageError(`expected a path, a Blob or the bytes of a picture, got ${show(image)}`);
}

function pictureRequest(body) {
  const begins = (...magic) => magic.every((byte, i) => body[i] === byte);
  if (begins(0xff, 0xd8, 0xff)) return { contentType: "image/jpeg", body, tensors: [] };
  if (begins(0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a)) return { contentType: "image/png", body, tensors: [] };
  throw new UsageError(
    "expected a JPEG or PNG image, got something else",
    "draw it on a canvas, and give what canvas.toBlob makes",
  );
}

function absent(target, names) {
  const kind = target.isGroup ? "group" : "agent";
  const hint =
    names.length > 0
      ? `use one of the ${kind}s at this broker: ${shown(names)}`
      : `the broker knows no ${kind}: check that edge-agent runs with this broker in its configuration`;
  return new UnknownAgentError(`no ${kind} called ${target.name} is known at the broker`, hint);
}

/** Parse JSON, unless it has more bytes or values: each of these marks stands before at most one value. */
function parseJson(payload, maxBytes, maxValues) {
  if (payload.length > maxBytes) throw new Error(`expected at most ${maxBytes} bytes, got ${payload.length}`);
  let values = 0;
  for (let i = 0; i < payload.length; i += 1) {
    const byte = payload[i];
    if (byte === 0x2c || byte === 0x3a || byte === 0x5b || byte === 0x7b) values += 1; // , : [ {
  }
  if (values > maxValues) throw new Error(`expected at most ${maxValues} values in JSON, got about ${values}`);
  return JSON.parse(decode(payload));
}

/** A text of a stranger; empty if it is something else. */
function text(value) {
  return typeof value === "string" ? value.slice(0, 1024) : "";
}

function parseObject(payload) {
  try {
    const value = parseJson(payload, MAX_DOCUMENT_BYTES, MAX_DOCUMENT_VALUES);
    return value !== null && typeof value === "object" ? value : {};
  } catch {
    return {};
  }
}

function fromHalves(halves) {
  const data = new Float32Array(halves.length);
  for (let i = 0; i < data.length; i += 1) data[i] = fromHalf(halves[i]); // `from` takes ten times as long
  return data;
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function concatenated(parts) {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let offset = 0;
  for (const part of parts) {
    whole.set(part, offset);
    offset += part.length;
  }
  return buffer(whole);
}

function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}

/** mqtt.js takes Buffers and strings; in a browser it brings its own Buffer, which is a Uint8Array. */
function buffer(bytes) {
  return typeof Buffer === "undefined" ? bytes : Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}

function encode(text) {
  return buffer(new TextEncoder().encode(text));
}

function decode(bytes) {
  return UTF8.decode(bytes);
}

function randomName(bytes) {
  return Array.from(crypto.getRandomValues(new Uint8Array(bytes)), (byte) => byte.toString(16).padStart(2, "0")).join(
    "",
  );
}

function reason(error) {
  return error?.message || error?.code || error?.errors?.[0]?.message || "no reason given";
}

function show(value) {
  return String(JSON.stringify(value) ?? value).slice(0, 80);
}

function shown(names) {
  const more = names.length > MAX_SHOWN ? ` and ${names.length - MAX_SHOWN} more` : "";
  return names.slice(0, MAX_SHOWN).join(", ") + more;
}

function now() {
  return performance.now() / 1000;
}

function within(seconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("no answer")), 1000 * seconds);
  });
  return Promise.race([promise, late]).finally(() => clearTimeout(timer));
}

function sleep(seconds) {
  return new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
}
