// WCAG 2.2, 1.4.3: texts whose contrast with what is behind them is too low.
(() => {
  const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    pen.clearRect(0, 0, 1, 1);
    for (const colour of colours) { pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1); }
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (c) => c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg")) continue;
    const behind = [];
    for (let each = node; each; each = each.parentElement) behind.unshift(getComputedStyle(each).backgroundColor);
    const back = rgb(behind);
    const [a, b] = [light(rgb([`rgb(${back})`, getComputedStyle(node).color])), light(back)];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    // A symbol is not text: 1.4.11.
    if (contrast < (node.textContent.trim().length > 1 ? 4.5 : 3)) bad.push(`${node.textContent.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return bad.join("; ");
})()
