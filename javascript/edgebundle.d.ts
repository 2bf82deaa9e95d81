/** The client of edgebundle: ask models on devices over MQTT, from Node and from browsers. docs/clients.md */

export type Datatype =
  | "BOOL"
  | "UINT8"
  | "UINT16"
  | "UINT32"
  | "UINT64"
  | "INT8"
  | "INT16"
  | "INT32"
  | "INT64"
  | "FP16"
  | "FP32"
  | "FP64"
  | "BYTES";

export type TensorData =
  | Uint8Array
  | Uint16Array
  | Uint32Array
  | BigUint64Array
  | Int8Array
  | Int16Array
  | Int32Array
  | BigInt64Array
  | Float32Array
  | Float64Array;

/** One tensor of an answer. FP16 is widened to Float32Array; BYTES are strings. */
export interface Output {
  name: string;
  datatype: Datatype;
  shape: number[];
  data: TensorData | string[];
}

/** One row of a top-k list. */
export interface Label {
  label: string;
  score: number;
  index: number;
}

/** One detected object, in pixels of the picture as it was sent, after its Exif rotation. */
export interface Box extends Label {
  x0: number;
  y0: number;
  x1: number;
  y1: number;
}

/** Seconds; the device's parts and the rest are null if the agent does not say. */
export interface Timing {
  total: number;
  network: number | null;
  queue: number | null;
  decode: number | null;
  compute: number | null;
  encode: number | null;
}

export class Answer {
  readonly agent: string;
  readonly model: string;
  readonly version: string;
  readonly outputs: Map<string, Output>;
  readonly timing: Timing;
  /** How often the request was sent. */
  readonly attempts: number;
  readonly trace: { traceparent?: string; tracestate?: string };
  /** The first top-k list, best first. */
  get labels(): Label[];
  /** The first list of detected objects, best first. */
  get boxes(): Box[];
}

/** A value of a row; null or NaN if it is missing. */
export type Value = number | boolean | string | null;

/** A picture or a WAV (a path in Node, bytes, or a Blob such as a File), a row of a table, or tensors by name. */
export type Input =
  | { image: string | Blob | ArrayBuffer | ArrayBufferView }
  | { audio: string | Blob | ArrayBuffer | ArrayBufferView; contentType?: string }
  | { row: Record<string, Value> | Map<string, Value> | Value[] | TensorData }
  | { tensors: Record<string, { shape: number[]; data: TensorData | ArrayLike<number>; datatype?: Datatype }> };

export interface Options {
  /** Seconds until an answer is of no use; 30 by default. */
  deadlineS?: number;
  /** Answer with the model's own outputs, without the postprocess that its bundle declares. */
  raw?: boolean;
  traceparent?: string;
  tracestate?: string;
  /** Called with one line when the request has to wait. */
  progress?: (line: string) => void;
  signal?: AbortSignal;
}

export interface TensorInfo {
  name: string;
  datatype: Datatype;
  shape: number[];
  /** A quantised tensor: integers stand for `(integer - zero) * scale`; an input takes a Float32Array, too. */
  quantisation?: { scale: number; zero: number };
}

export interface ModelInfo {
  agent: string;
  name: string;
  version: string;
  inputs: TensorInfo[];
  outputs: TensorInfo[];
  imageInput: string | null;
  audioInput: string | null;
  audioRate: number | null;
  /** Whether tensors need a session. */
  hasState: boolean;
  /** The columns of a row, in order; none if the model takes no rows. */
  columns: { name: string; datatype: Datatype }[];
  postprocess: string[];
  ready: boolean;
  state: string;
  message: string;
}

export interface Model {
  (input: Input, options?: Options): Promise<Answer>;
  readonly agent: string;
  readonly model: string;
  info(): Promise<ModelInfo>;
  /** Calls whose state goes on; a random name by default. */
  session(name?: string): Session;
  /** Answers in the order of the items, `inFlight` (4) at a time. */
  map(items: Iterable<Input> | AsyncIterable<Input>, options?: Options & { inFlight?: number }): AsyncGenerator<Answer>;
}

/** Calls whose state, or whose recording, goes on from one to the next. */
export interface Session {
  (input: Input, options?: Options & { end?: boolean }): Promise<Answer>;
  readonly session: string;
  /** The next call begins again. */
  reset(): void;
  /** End a recording: hear what is left of it. */
  finish(options?: Options): Promise<Answer>;
  /** End the session, so that the device has its place for others. */
  close(): Promise<void>;
}

export interface ClientOptions {
  username?: string;
  password?: string;
  mqttVersion?: 5 | "3.1.1";
  progress?: (line: string) => void;
  /** Anything else goes to `connect` of mqtt.js: `ca`, `cert`, `key`, ... */
  [option: string]: unknown;
}

export class Client {
  constructor(url: string, options?: ClientOptions);
  model(agent: string, model: string): Model;
  groupModel(group: string, model: string): Model;
  connect(): Promise<void>;
  agents(): Promise<string[]>;
  close(): Promise<void>;
}

export class ClientError extends Error {
  readonly hint: string | null;
}
export class UsageError extends ClientError {}
export class BrokerError extends ClientError {}
export class UnknownAgentError extends ClientError {}
export class NoAnswerError extends ClientError {}
export class BadAnswerError extends ClientError {}
export class ClosedError extends ClientError {}
export class RefusedError extends ClientError {
  readonly status: number;
}
export class InputError extends RefusedError {}
export class UnknownModelError extends RefusedError {}
export class DeadlineError extends RefusedError {}
export class SessionStepError extends RefusedError {}
export class SessionGoneError extends RefusedError {}
export class PayloadError extends RefusedError {}
export class MediaTypeError extends RefusedError {}
export class ExecutionError extends RefusedError {}
export class OverloadedError extends RefusedError {}
