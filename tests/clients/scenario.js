// What the tests do with the JavaScript client, in Node and in a browser: returns plain values to be compared.

export async function run(library, url, options, seven) {
  const { Client } = library;
  const lines = [];
  const client = new Client(url, { progress: (line) => lines.push(line), ...options });
  const digits = client.model("kitchen", "digits");
  const odd = client.model("odd", "digits");
  const result = {};

  const picture = await digits({ image: new Blob([seven]) });
  result.labels = picture.labels;
  result.version = picture.version;
  result.raw = [...(await digits({ image: new Blob([seven]) }, { raw: true })).outputs.keys()];
  result.timing = Object.values(picture.timing);
  const info = await digits.info();
  result.input = info.inputs[0];
  const count = info.inputs[0].shape.reduce((product, dim) => product * dim, 1);
  const zeros = { tensors: { [info.inputs[0].name]: { shape: info.inputs[0].shape, data: new Float32Array(count) } } };
  result.indices = Array.from((await digits(zeros)).outputs.get("indices").data, Number);
  result.agents = await client.agents();

  result.boxes = (await odd({ image: png() })).boxes;
  const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  result.unlisted = (await odd({ image: jpeg(5) })).labels;
  const echoed = await odd(numbers(5), { traceparent });
  result.echo = Array.from(echoed.outputs.get("image").data);
  result.trace = echoed.trace;
  result.order = [];
  for await (const answer of odd.map(
    Array.from({ length: 12 }, (_, i) => numbers(i)),
    { inFlight: 3 },
  )) {
    result.order.push(answer.outputs.get("image").data[0]);
  }
  result.together = await Promise.all([1, 2, 3].map(async (i) => (await odd(numbers(i))).outputs.get("image").data[0]));
  result.twice = [];
  for (let i = 0; i < 3; i += 1) result.twice.push((await odd({ image: jpeg(3) })).version);

  const abort = new AbortController();
  setTimeout(() => abort.abort(), 50);
  result.errors = {};
  const failures = {
    agent: () => client.model("kitchne", "digits")({ image: seven }),
    group: () => client.groupModel("gate", "digits")({ image: seven }),
    model: () => client.model("kitchen", "digit")({ image: seven }),
    shape: () => digits({ tensors: { [info.inputs[0].name]: { shape: [1], data: new Float32Array(1) } } }),
    silent: () => odd({ image: jpeg(1) }, { deadlineS: 0.3 }),
    bad: () => odd({ image: jpeg(2) }),
    status: () => odd({ image: jpeg(4) }),
    abort: () => odd({ image: jpeg(1) }, { signal: abort.signal }),
    text: () => digits({ image: new TextEncoder().encode("text") }),
    nothing: () => digits({}),
    raw: () => digits({ image: seven }, { raw: 1 }),
    count: () => digits({ tensors: { x: { shape: [2], data: new Float32Array(3) } } }),
    name: async () => client.model("a/b", "m"),
    unreachable: () => new Client("ws://127.0.0.1:1").connect(),
    url: async () => new Client("broker"),
  };
  for (const [name, call] of Object.entries(failures)) {
    const began = performance.now();
    try {
      await call();
      result.errors[name] = ["none", "", null, 0];
    } catch (error) {
      result.errors[name] = [error.name, error.message, error.status ?? null, performance.now() - began];
    }
  }
  const open = odd({ image: jpeg(1) }).catch((error) => error.name);
  await new Promise((resolve) => setTimeout(resolve, 50));
  await client.close();
  result.closed = [await open, await digits({ image: seven }).catch((error) => error.name)];
  result.lines = lines;
  return result;
}

function png() {
  return Uint8Array.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
}

function jpeg(what) {
  return Uint8Array.from([0xff, 0xd8, 0xff, what]);
}

function numbers(first) {
  return { tensors: { image: { shape: [1, 1, 2, 3], data: Float32Array.from([first, 1, 2, 3, 4, 5]) } } };
}
