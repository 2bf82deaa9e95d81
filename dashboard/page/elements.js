// Elements from plain values. Every text becomes a text node: nothing that comes from a device is ever parsed
// as markup, and the page's Content-Security-Policy (Trusted Types) forbids it as well.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `attributes`: `on` has listeners, `text` its text, `data` data attributes. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, { on = {}, text, data = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  for (const [name, value] of Object.entries(data)) node.dataset[name] = String(value);
  for (const [name, listener] of Object.entries(on)) node.addEventListener(name, listener);
  if (text != null) node.textContent = String(text);
  node.append(...children.filter((child) => child != null && child !== false));
  return node;
}

/** Give a file that is dropped on a node to `take`; the innermost such node gets it. */
export function droppable(node, take) {
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    node.addEventListener(kind, (event) => {
      event.preventDefault();
      event.stopPropagation();
      node.classList.toggle("over", kind === "dragenter" || kind === "dragover");
      if (kind === "drop") take(event.dataTransfer.files[0]);
    });
  }
}

const shownKeys = new WeakMap();

/** Replace the children of a node when `value` has changed; the focus stays on the element with its key. */
export function show(node, value, build) {
  const key = JSON.stringify(value) ?? "";
  if (shownKeys.get(node) === key) return;
  shownKeys.set(node, key);
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  node.replaceChildren(...[build(value)].flat().filter((child) => child != null && child !== false));
  if (focused !== undefined) {
    const again = [...node.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused);
    again?.focus({ preventScroll: true });
  }
}

/** Forget what a node shows: the next `show` builds it. */
export function forget(node) {
  shownKeys.delete(node);
}
