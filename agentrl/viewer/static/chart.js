// Lines over steps, and bars of shares.
import { el, svg, number, fill } from "./dom.js";

const HEIGHT = 132;
const [LEFT, RIGHT, TOP, BOTTOM] = [44, 8, 8, 20];

/** Up to four round values that span a range. */
function ticks(low, high) {
  const rough = (high - low) / 3 || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  const values = [];
  for (let n = Math.ceil(low / size - 1e-9) || 0; n * size <= high + size * 1e-9; n++) values.push(n * size);
  return values;
}

/** A tick's value without zeros that say nothing. */
function short(value) {
  return (Math.abs(value) < 1e-3 && value ? value.toExponential(0) : String(Number(value.toPrecision(4)))).replace("-", "−");
}

/** A chart of series `{name, number, points: [[x, y], ...]}`; `note` explains what is shown. */
export function lineChart(title, series, { format = number, note = null } = {}) {
  series = series.filter((one) => one.points.length);
  const last = series.map((one) => format(one.points.at(-1)[1])).slice(0, 4).join("  ");
  const value = el("span", { class: "value" }, last);
  const place = el("div", { class: "plot" });
  const figure = el("figure", { class: "chart" }, el("figcaption", { title: note }, el("b", {}, title), value), place);
  if (!series.length) {
    fill(place, el("p", { class: "empty" }, "nothing yet"));
    return figure;
  }
  new ResizeObserver(() => {
    if (place.clientWidth) fill(place, plot(place.clientWidth, title, series, format, value, last));
  }).observe(place);
  return figure;
}

function plot(width, title, series, format, value, last) {
  const points = series.flatMap((one) => one.points);
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [x0, x1] = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
  let [y0, y1] = [ys.reduce((a, b) => Math.min(a, b)), ys.reduce((a, b) => Math.max(a, b))];
  if (y0 >= 0 && y0 < y1 / 2) y0 = 0;
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) / 2, y1 + Math.abs(y1) / 2];
  const x = (v) => LEFT + ((v - x0) / (x1 - x0 || 1)) * (width - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const grid = ticks(y0, y1).map((v) => [
    svg("line", { x1: LEFT, x2: width - RIGHT, y1: y(v), y2: y(v), class: "grid" }),
    svg("text", { x: LEFT - 6, y: y(v) + 3.5, class: "tick", "text-anchor": "end" }, format === number ? short(v) : format(v)),
  ]);
  const steps = [...new Set([x0, x1])].map((v, i) =>
    svg("text", { x: x(v), y: HEIGHT - 5, class: "tick", "text-anchor": i ? "end" : "start" }, number(v)),
  );
  const lines = series.map((one) =>
    one.points.length > 1
      ? svg("polyline", { points: one.points.map((p) => `${x(p[0])},${y(p[1])}`).join(" "), class: `line s${one.number % 8}` })
      : svg("circle", { cx: x(one.points[0][0]), cy: y(one.points[0][1]), r: 3, class: `dot s${one.number % 8}` }),
  );
  const rule = svg("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "rule", visibility: "hidden" });
  const label = `${title}: ${series.map((one) => `${one.name} ${format(one.points.at(-1)[1])}`).join(", ")}`;
  const picture = svg("svg", { width, height: HEIGHT, role: "img", "aria-label": label }, grid, steps, lines, rule);
  picture.addEventListener("pointermove", (event) => {
    const at = x0 + ((event.offsetX - LEFT) / (width - LEFT - RIGHT)) * (x1 - x0);
    const near = (one) => one.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    const found = series.map(near);
    rule.setAttribute("x1", x(found[0][0]));
    rule.setAttribute("x2", x(found[0][0]));
    rule.setAttribute("visibility", "visible");
    value.textContent = `step ${found[0][0]}: ${found.slice(0, 4).map((p) => format(p[1])).join("  ")}`;
  });
  picture.addEventListener("pointerleave", () => {
    rule.setAttribute("visibility", "hidden");
    value.textContent = last;
  });
  return picture;
}

/** A bar of parts `{name, size, kind}`; `show` makes the text of a size. */
export function stackedBar(parts, show) {
  const whole = parts.reduce((sum, part) => sum + part.size, 0);
  const label = parts.map((part) => `${part.name} ${show(part.size)}`).join(", ");
  const bar = el("span", { class: "stacked", role: "img", "aria-label": label, title: label });
  for (const part of parts) {
    if (part.size <= 0) continue;
    const piece = el("span", { class: `part ${part.kind}` });
    piece.style.flexGrow = part.size / whole;
    bar.append(piece);
  }
  return bar;
}
