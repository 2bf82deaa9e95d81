// An answer on its picture: class map, masks, boxes, key points, labels; in the picture's own pixels.
//
// The colours are those of `edgebundle run --draw` (builder/running/drawing.py): a class keeps its colour.

const COLOURS = ["#e63c3c", "#3ca0ff", "#46c85a", "#ffaa1e", "#be5af0", "#00c8c8",
  "#ff64b4", "#aad228", "#7878ff", "#ffdc46", "#00966e", "#c88250"];
const OPACITY = 0.45;
const VISIBLE = 0.25; // confidence from which a key point is drawn
// The limbs of a person with the 17 key points of COCO.
const COCO_POINTS = 17;
const LIMBS = [[0, 1], [0, 2], [1, 3], [2, 4], [3, 5], [4, 6], [5, 6], [5, 7], [7, 9], [6, 8], [8, 10], [5, 11],
  [6, 12], [11, 12], [11, 13], [13, 15], [12, 14], [14, 16]];
const MAX_PIXELS = 1 << 24;

export function colour(index) {
  return COLOURS[((Number(index) % COLOURS.length) + COLOURS.length) % COLOURS.length];
}

function channels(ink) {
  return [1, 3, 5].map((at) => Number.parseInt(ink.slice(at, at + 2), 16));
}

/** Draw a picture (anything that `drawImage` takes) and an answer, or null, on a canvas. */
export function draw(canvas, picture, width, height, answer) {
  canvas.width = width;
  canvas.height = height;
  const pen = canvas.getContext("2d");
  pen.drawImage(picture, 0, 0, width, height);
  if (!answer) return;
  if (answer.map) drawMap(pen, answer.map);
  for (const box of [...answer.boxes].reverse()) if (box.mask) drawMask(pen, box.mask, colour(box.index));
  const line = Math.max(1, Math.round(Math.min(width, height) / 180));
  const size = Math.max(10, Math.round(Math.min(width, height) / 28));
  pen.font = `600 ${size}px system-ui, sans-serif`;
  // The best object is drawn last, on top.
  for (const box of [...answer.boxes].reverse()) drawBox(pen, box, line, size, width);
}

function drawBox(pen, { box: [x0, y0, x1, y1], label, score, index, points }, line, size, width) {
  const ink = colour(index);
  pen.strokeStyle = ink;
  pen.lineWidth = line;
  pen.strokeRect(Math.min(x0, x1), Math.min(y0, y1), Math.abs(x1 - x0), Math.abs(y1 - y0));
  const seen = (points ?? []).map(([x, y, confidence = 1]) =>
    x !== null && y !== null && confidence >= VISIBLE);
  for (const [first, last] of seen.length === COCO_POINTS ? LIMBS : []) {
    if (!seen[first] || !seen[last]) continue;
    pen.beginPath();
    pen.moveTo(points[first][0], points[first][1]);
    pen.lineTo(points[last][0], points[last][1]);
    pen.stroke();
  }
  for (const [x, y] of (points ?? []).filter((_, place) => seen[place])) {
    pen.fillStyle = ink;
    pen.beginPath();
    pen.arc(x, y, line * 1.8, 0, 7);
    pen.fill();
  }
  const text = `${label} ${score === null ? "" : score.toFixed(2)}`;
  const wide = Math.min(pen.measureText(text).width + 8, width);
  const left = Math.max(0, Math.min(Math.min(x0, x1), width - wide));
  const top = Math.max(0, Math.min(y0, y1) - size - 6);
  pen.fillStyle = ink;
  pen.fillRect(left, top, wide, size + 6);
  pen.fillStyle = "#000";
  pen.fillText(text, left + 4, top + size, wide - 6);
}

/** Decode COCO's compressed run lengths to a list of runs, which begin with a run of zeros. */
export function runLengths(code, pixels) {
  const runs = [];
  let value = 0;
  let shift = 0;
  let total = 0;
  for (const character of code) {
    const bits = character.charCodeAt(0) - 48;
    if (bits < 0 || bits > 63 || shift > 30) return null;
    value |= (bits & 0x1f) << shift;
    shift += 5;
    if (bits & 0x20) continue;
    if (bits & 0x10) value -= 2 ** shift;
    const run = value + (runs.length > 2 ? runs[runs.length - 2] : 0);
    total += run;
    if (run < 0 || total > pixels) return null;
    runs.push(run);
    value = shift = 0;
  }
  return total === pixels ? runs : null;
}

function drawMask(pen, { size: [height, width], area, runs: code }, ink) {
  if (width * height > MAX_PIXELS) return;
  const runs = runLengths(code, width * height);
  if (!runs) return;
  const image = new ImageData(width, height);
  const rgb = channels(ink);
  let at = 0;
  runs.forEach((run, i) => {
    if (i % 2) {
      for (let pixel = at; pixel < at + run; pixel++) { // columns first, as COCO counts
        const place = 4 * ((pixel % height) * width + Math.floor(pixel / height));
        image.data.set(rgb, place);
        image.data[place + 3] = 255 * OPACITY;
      }
    }
    at += run;
  });
  stretch(pen, image, area, true);
}

function drawMap(pen, { size: [height, width], area, values }) {
  const classes = Uint8Array.from(atob(values), (character) => character.charCodeAt(0));
  if (classes.length !== width * height) return;
  const image = new ImageData(width, height);
  const inks = COLOURS.map(channels);
  for (let pixel = 0; pixel < classes.length; pixel++) {
    if (classes[pixel] === 0) continue; // usually the background
    image.data.set(inks[(classes[pixel] - 1) % inks.length], 4 * pixel);
    image.data[4 * pixel + 3] = 255 * OPACITY;
  }
  stretch(pen, image, area, false);
}

function stretch(pen, image, [x0, y0, x1, y1], smooth) {
  const layer = new OffscreenCanvas(image.width, image.height);
  layer.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = smooth;
  pen.drawImage(layer, x0, y0, x1 - x0, y1 - y0);
}
