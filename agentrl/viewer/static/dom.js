// Elements and text. Text becomes text nodes only: nothing here, or anywhere, reads markup out of data.

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f]/g;
// Marks that change the direction of text, or are not seen.
const UNSEEN = /[\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Text with every character that is not seen made visible. */
export function visible(text) {
  const hex = (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`;
  const picture = (c) => (c < " " ? String.fromCharCode(0x2400 + c.charCodeAt(0)) : c === "\x7f" ? "␡" : hex(c));
  return String(text).replace(CONTROLS, picture).replace(UNSEEN, hex);
}

/** An element; of the attributes, functions are listeners. Children may be elements, texts, lists of them, or null. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  setAll(element, attributes, children);
  return element;
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes, children);
  return element;
}

function setAll(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child || child === 0));
}

/** A number for reading: three digits, or whole from a thousand on. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u2009");
  if (size < 0.001) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3).replace("-", "−");
}

/** A number with its noun. */
export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** A number with its sign. */
export function signed(value) {
  if (value === null || value === undefined) return "–";
  return `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;
}

/** Seconds for reading. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** A time in seconds since 1970 for reading. */
export function moment(value) {
  return new Date(value * 1000).toLocaleString("sv").slice(0, 16);
}

export function share(value) {
  return `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;
}

export function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

export function deviation(values) {
  const middle = mean(values);
  return values.length ? Math.sqrt(mean(values.map((value) => (value - middle) ** 2))) : null;
}

/** Take the place of what an element holds. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child || child === 0));
}
