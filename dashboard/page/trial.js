// A picture, a recording or a camera's frames on a model: drop, choose or paste one, and see what the model says.

import { droppable, element } from "./elements.js";
import { colour, draw } from "./drawing.js";
import { drawSound, recording } from "./sound.js";
import { digits, latency } from "./words.js";

const CAMERA_WIDTH = 640;
const MAX_BYTES = 60 << 20;
const KINDS = {
  image: { accept: "image/*,.json", noun: "a picture", text: "Drop or paste a picture here, or a .json request.", label: "the picture with what the model found" },
  audio: { accept: "audio/*,.wav,.json", noun: "a recording", text: "Drop a recording here (WAV, or what this browser plays), or a .json request.", label: "the recording with what the model heard" },
  tensors: { accept: ".json", noun: "a request", text: "This model takes tensors: drop a .json request here (docs/mqtt.md), or use `edgebundle infer`.", label: "" },
};
const SMALL = 128; // pixels: a smaller picture is shown enlarged, with its pixels

export class Trial {
  /** Makes the section for one model; one that takes neither pictures nor sound is given requests in JSON. */
  constructor(link, agent, model) {
    this.link = link;
    this.agent = agent;
    this.model = model.name;
    this.rate = model.audio === null ? null : model.audioRate;
    this.stream = null;
    const takesPictures = model.image !== null;
    const kind = KINDS[takesPictures ? "image" : this.rate !== null ? "audio" : "tensors"];
    this.canvas = element("canvas", { hidden: true, role: "img", "aria-label": kind.label });
    this.words = element("div", { "aria-live": "polite" });
    this.result = element("div", { class: "result" }, this.canvas, this.words);
    this.file = element("input", { type: "file", accept: kind.accept, hidden: true, on: { change: () => this.take(this.file.files[0]) } });
    this.cameraButton = element("button", { type: "button", text: "Use the camera", hidden: !takesPictures, on: { click: () => (this.stream ? this.stop() : this.start()) } });
    this.node = element("div", { class: "drop", data: { drop: "picture" } },
      element("p", { text: kind.text }),
      element("div", { class: "buttons" },
        element("button", { type: "button", class: "main", text: `Choose ${kind.noun}\u2026`, data: { key: "choose" }, on: { click: () => this.file.click() } }),
        this.cameraButton, this.file),
      this.result);
    droppable(this.node, (file) => this.take(file));
    this.onPaste = (event) => { if (event.clipboardData?.files[0]) this.take(event.clipboardData.files[0]); };
    addEventListener("paste", this.onPaste);
  }

  /** End it: the camera goes off. */
  close() {
    this.stop();
    removeEventListener("paste", this.onPaste);
  }

  async take(file) {
    if (!file) return;
    this.stop();
    this.file.value = "";
    try {
      if (file.size > MAX_BYTES) throw new Error("expected a file of at most 60 MB");
      if (file.type === "application/json" || file.name.endsWith(".json")) {
        this.canvas.hidden = true;
        this.say("asking\u2026");
        this.show(await this.ask(file, "application/json"));
        return;
      }
      if (this.rate !== null) {
        await this.listen(file);
        return;
      }
      let picture;
      try {
        picture = await createImageBitmap(file);
      } catch {
        throw new Error("expected a picture, got a file that this browser cannot show");
      }
      this.canvas.hidden = false;
      this.result.classList.toggle("small", picture.width < SMALL);
      if (picture.width < SMALL) this.canvas.style.width = `${Math.min(320, picture.width * 8)}px`;
      else this.canvas.style.width = "";
      draw(this.canvas, picture, picture.width, picture.height, null);
      this.say("asking\u2026");
      // A device reads JPEG and PNG; the browser turns all else into one.
      const body = ["image/jpeg", "image/png"].includes(file.type) ? file : await this.encoded(this.canvas, "image/png");
      const answer = await this.ask(body, body.type);
      draw(this.canvas, picture, picture.width, picture.height, answer);
      this.show(answer);
    } catch (error) {
      this.fail(error);
    }
  }

  async listen(file) {
    const sound = await recording(file, this.rate);
    this.result.classList.remove("small");
    this.canvas.style.width = "";
    this.canvas.hidden = false;
    drawSound(this.canvas, sound, null);
    this.say("asking\u2026");
    const answer = await this.ask(sound.body, "audio/wav");
    drawSound(this.canvas, sound, answer.segments);
    this.show(answer);
  }

  async start() {
    try {
      if (!navigator.mediaDevices) throw new Error("this browser gives the camera only to pages of localhost: use ssh -L");
      this.stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: CAMERA_WIDTH }, facingMode: "environment" } });
    } catch (error) {
      this.fail(error.name === "NotAllowedError" ? new Error("the browser was not allowed to use the camera") : error);
      return;
    }
    this.cameraButton.textContent = "Stop the camera";
    this.canvas.style.width = "";
    this.result.classList.remove("small");
    const video = document.createElement("video");
    video.muted = true;
    video.playsInline = true;
    video.srcObject = this.stream;
    await video.play().catch(() => {});
    await this.frames(video, this.stream);
  }

  // One frame after the other: the next one is taken when the last is answered, so nothing queues up.
  async frames(video, stream) {
    const frame = document.createElement("canvas");
    let rate = 0;
    while (this.stream === stream && stream.active) {
      const began = performance.now();
      const scale = Math.min(1, CAMERA_WIDTH / (video.videoWidth || CAMERA_WIDTH));
      frame.width = Math.max(1, Math.round(video.videoWidth * scale));
      frame.height = Math.max(1, Math.round(video.videoHeight * scale));
      frame.getContext("2d").drawImage(video, 0, 0, frame.width, frame.height);
      try {
        const answer = await this.ask(await this.encoded(frame, "image/jpeg"), "image/jpeg");
        if (this.stream !== stream) return;
        this.canvas.hidden = false;
        draw(this.canvas, frame, frame.width, frame.height, answer);
        rate = 0.8 * rate + 0.2 * (1000 / Math.max(1, performance.now() - began));
        this.show(answer, `${digits(rate)} frames a second`);
      } catch (error) {
        this.stop();
        this.fail(error);
        return;
      }
      await new Promise(requestAnimationFrame);
    }
  }

  stop() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.stream = null;
    this.cameraButton.textContent = "Use the camera";
  }

  encoded(canvas, type) {
    return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the picture is empty"))), type, 0.85));
  }

  ask(body, type) {
    const place = new URLSearchParams({ agent: this.agent, model: this.model });
    return this.link.ask(`/api/ask?${place}`, { body, type });
  }

  say(text) {
    this.words.replaceChildren(element("p", { class: "muted", text }));
  }

  fail(error) {
    this.words.replaceChildren(
      element("p", { class: "bad", text: error.message }), error.hint && element("p", { class: "hint", text: error.hint }) || "");
  }

  show(answer, more = "") {
    const parts = Object.entries(answer.parts).map(([name, seconds]) => `${name} ${latency(seconds)}`).join(", ");
    const found = answer.segments
      ? answer.segments.slice(0, 40).map(({ label, score, index, start, end }) => [`${label || "speech"} ${start.toFixed(2)} to ${end.toFixed(2)} s`, score, colour(index)])
      : answer.boxes.length
      ? answer.boxes.slice(0, 40).map((box) => [box.label, box.score, colour(box.index)])
      : answer.map ? answer.map.labels.map((label, i) => [label, answer.map.shares[i] ?? null, answer.map.classes[i] ? colour(answer.map.classes[i] - 1) : null])
        : answer.labels.map((each) => [each.label, each.score, null]);
    const rows = found.map(([label, score, ink]) => {
      const mark = element("span", { text: "\u25a0 " });
      if (ink) mark.style.color = ink;
      return element("tr", {}, element("td", {}, ink ? mark : "", label),
        element("td", { class: "number", text: score === null ? "" : score.toFixed(4) }));
    });
    const isPlain = !rows.length && !answer.text && !answer.segments;
    const tensors = answer.tensors.map((each) => element("p", { class: "number",
      text: `${each.name} ${each.datatype} [${each.shape.join(",")}]  ${each.values.map((value) => (typeof value === "number" ? digits(value) : value ?? "NaN")).join(", ")}` }));
    this.words.replaceChildren(...[
      answer.text && element("p", {}, element("strong", { text: answer.text })),
      rows.length > 0 && element("table", { class: "found" }, element("tbody", {}, ...rows)),
      answer.segments?.length === 0 && element("p", { text: "nothing heard" }),
      isPlain && answer.boxes.length === 0 && answer.tensors.some((each) => each.name.endsWith("boxes")) && element("p", { text: "nothing found" }),
      ...(isPlain ? tensors : []),
      element("p", { class: "muted", text: `${latency(answer.latency)}${parts ? ` (${parts})` : ""}, version ${answer.version}${more ? `, ${more}` : ""}` }),
    ].filter(Boolean));
  }
}
