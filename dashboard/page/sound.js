// A recording for a model that takes sound: read, brought to the model's rate, drawn with what was heard in it.

import { colour } from "./drawing.js";

const WIDTH = 720;
const HEIGHT = 120;
const RIFF = 0x52494646; // "RIFF", "WAVE" and "fmt " at the beginning of a WAV file
const WAVE = 0x57415645;
const FORMAT = 0x666d7420;

/** Read a file of sound: `samples` (mono, at `rate`), `seconds`, and the WAV file to send as `body`. */
export async function recording(file, rate) {
  const content = await file.arrayBuffer();
  const own = rateOf(content);
  let heard;
  try {
    heard = await new OfflineAudioContext(1, 1, rate).decodeAudioData(content);
  } catch {
    throw new Error("expected a recording, got a file that this browser cannot play");
  }
  const samples = heard.getChannelData(0);
  for (let channel = 1; channel < heard.numberOfChannels; channel++) {
    const other = heard.getChannelData(channel);
    for (let i = 0; i < samples.length; i++) samples[i] += (other[i] - samples[i]) / (channel + 1);
  }
  // A WAV at the model's rate goes as it is: then the answer is that of any other client.
  return { samples, seconds: samples.length / rate, body: own === rate ? file : wav(samples, rate) };
}

/** Draw samples, and the segments `{ start, end, index }` that a model found, in seconds. */
export function drawSound(canvas, { samples, seconds }, segments) {
  canvas.width = WIDTH;
  canvas.height = HEIGHT;
  const pen = canvas.getContext("2d");
  for (const { start, end, index } of segments ?? []) {
    pen.fillStyle = colour(index);
    pen.globalAlpha = 0.45;
    pen.fillRect((start / seconds) * WIDTH, 0, Math.max(1, ((end - start) / seconds) * WIDTH), HEIGHT);
  }
  pen.globalAlpha = 1;
  pen.fillStyle = getComputedStyle(canvas).color;
  for (let x = 0; x < WIDTH; x++) {
    let low = 0;
    let high = 0;
    for (let i = Math.floor((x / WIDTH) * samples.length); i < ((x + 1) / WIDTH) * samples.length; i++) {
      low = Math.min(low, samples[i]);
      high = Math.max(high, samples[i]);
    }
    pen.fillRect(x, (HEIGHT / 2) * (1 - high), 1, Math.max(1, (HEIGHT / 2) * (high - low)));
  }
}

/** The samples a second of a WAV file; null if it is none. */
function rateOf(content) {
  if (content.byteLength < 44) return null;
  const view = new DataView(content);
  return view.getUint32(0) === RIFF && view.getUint32(8) === WAVE && view.getUint32(12) === FORMAT ? view.getUint32(24, true) : null;
}

/** Samples as a WAV file of 16 bits. */
function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  view.setUint32(0, RIFF);
  view.setUint32(4, 36 + 2 * samples.length, true);
  view.setUint32(8, WAVE);
  view.setUint32(12, FORMAT);
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  view.setUint32(36, 0x64617461); // "data"
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, Math.max(-32768, Math.min(32767, Math.round(32767 * sample))), true));
  return new Blob([view], { type: "audio/wav" });
}
