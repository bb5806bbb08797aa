// The rollouts that the filters choose, in a list of which only what is seen is drawn.
import { el, fill, number, seconds, share, signed, visible } from "./dom.js";
import { changed, choices, choose, ending, to } from "./filters.js";
import { mean } from "./dom.js";
import { nameOf, swatch } from "./overview.js";
import { store } from "./store.js";

const ROW = 32; // pixels, as in the style sheet
const AROUND = 10; // rows drawn above and below what is seen

const HEADS = [
  ["step", "Step", "n"], ["group", "Group", ""], ["member", "Member", "n"], ["outcome", "Ended", ""], ["reward", "Reward", "n"],
  ["advantage", "Advantage", "n"], ["turns", "Turns", "n"], ["sampled", "Tokens", "n"], ["calls", "Calls", "n"], ["seconds", "Time", "n"], ["tools", "Tools", ""],
];

let searched = { text: "", found: null, of: null };

/** The rollouts that the parameters choose; the text is looked for where the rollouts are. */
export async function chosenRows(params) {
  const text = params.get("text") ?? "";
  if (text !== searched.text || (text && searched.of !== store.rows))
    searched = { text, of: store.rows, found: text ? await store.search(text) : null };
  return choose(store.rows, params, searched.found);
}

/** The page. Returns what moves the selection and what opens it. */
export async function rolloutList(main, params, go) {
  const rows = await chosenRows(params);
  const several = store.runs.length > 1;
  let at = Math.max(0, rows.findIndex((row) => row.key === params.get("at")));
  const list = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "rollouts" });
  const space = el("div", { class: "space" });
  space.style.height = `${rows.length * ROW}px`;
  list.append(space);
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - AROUND);
    const last = Math.min(rows.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + AROUND);
    fill(space, rows.slice(first, last).map((row, i) => line(row, first + i, first + i === at, params, several)));
  };
  list.addEventListener("scroll", draw, { passive: true });
  const sort = params.get("sort") ?? "";
  const heads = HEADS.map(([name, title, kind]) => {
    const next = sort === `-${name}` ? name : sort === name ? "" : `-${name}`;
    const mark = sort === name ? " ↑" : sort === `-${name}` ? " ↓" : "";
    return el("button", { type: "button", class: kind, click: () => go(to("rollouts", changed(params, { sort: next, at: "" }))) }, title + mark);
  });
  const hint = store.embedded && params.get("text") ? "The text was looked for in rollouts with content in this file." : null;
  fill(
    main,
    filterBar(params, go),
    el("p", { class: "summary", role: "status" }, summary(rows), hint && el("span", { class: "note" }, hint)),
    el("div", { class: "table" }, el("div", { class: `line heads ${several ? "several" : ""}` }, several && el("span"), heads), list),
    rows.length ? null : el("p", { class: "empty" }, store.rows.length ? "No rollout is like that." : "No rollouts yet. They appear here as they are played."),
  );
  const reveal = () => {
    if (at * ROW < list.scrollTop) list.scrollTop = at * ROW;
    if ((at + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * ROW - list.clientHeight;
    draw();
  };
  new ResizeObserver(draw).observe(list);
  reveal();
  const move = (by) => {
    if (!rows.length) return;
    at = Math.min(rows.length - 1, Math.max(0, at + by));
    history.replaceState(null, "", to("rollouts", changed(params, { at: rows[at].key })));
    params.set("at", rows[at].key);
    reveal();
  };
  return { move, open: () => rows[at] && go(to(`rollout/${rows[at].key}`, choices(params))), row: () => rows[at] };
}

function line(row, place, selected, params, several) {
  const state = ending(row);
  const run = several ? store.run(row.runKey) : null;
  const cells = [
    [number(row.step), "n"], [visible(row.group), "id"], [number(row.member), "n"], [el("span", { class: `badge ${state}` }, state), ""],
    [number(row.reward), "n strong"], [signed(row.advantage), `n ${row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : ""}`], [number(row.turns), "n"], [number(row.sampled), "n"],
    [row.failed ? `${row.failed}/${row.calls} failed` : number(row.calls), `n ${row.failed ? "down" : ""}`], [seconds(row.seconds), "n"], [visible(row.tools.join(", ")), "id"],
  ];
  const element = el("a", { class: `line ${several ? "several" : ""}`, href: to(`rollout/${row.key}`, choices(params)), role: "option", "aria-selected": String(selected) },
    run && el("span", { title: nameOf(run) }, swatch(run)), cells.map(([value, kind]) => el("span", { class: kind }, value)));
  element.style.transform = `translateY(${place * ROW}px)`;
  return element;
}

function summary(rows) {
  const rewards = rows.map((row) => row.reward).filter((value) => value !== null);
  const calls = rows.reduce((sum, row) => sum + row.calls, 0);
  const failed = rows.reduce((sum, row) => sum + row.failed, 0);
  const parts = [`${number(rows.length)} of ${number(store.rows.length)} rollouts`];
  if (rewards.length) parts.push(`reward ${number(mean(rewards))}`);
  if (rows.length) parts.push(`${number(Math.round(mean(rows.map((row) => row.sampled))))} tokens`);
  if (calls) parts.push(`${share(failed / calls)} of calls failed`);
  return parts.join(" · ");
}

function filterBar(params, go) {
  const set = (name, value) => go(to("rollouts", changed(params, { [name]: value, at: "" })), true);
  const distinct = (value) => [...new Set(store.rows.flatMap(value))].sort();
  const select = (name, title, options) =>
    options.length > 1 || params.get(name)
      ? el("label", {}, title, el("select", { name, change: (event) => set(name, event.target.value) },
        el("option", { value: "" }, "all"), options.map(([value, text]) => el("option", { value, selected: params.get(name) === value ? "" : null }, visible(text)))))
      : null;
  const range = (title, low, high) =>
    el("label", {}, title, el("span", { class: "range" }, [low, high].map((name, i) =>
      el("input", { name, type: "number", step: "any", value: params.get(name) ?? "", placeholder: i ? "to" : "from", "aria-label": `${title} ${i ? "to" : "from"}`, change: (event) => set(name, event.target.value) }))));
  const named = (values) => values.map((value) => [value, value]);
  const text = el("input", { name: "text", type: "search", value: params.get("text") ?? "", placeholder: "text  ( / )", "aria-label": "text", change: (event) => set("text", event.target.value) });
  return el("form", { class: "filters", submit: (event) => event.preventDefault() },
    el("label", { class: "text" }, "Text", text),
    select("run", "Run", store.runs.map((run) => [run.key, nameOf(run)])),
    select("kind", "Kind", named(distinct((row) => [row.kind]))),
    select("outcome", "Ended", named(distinct((row) => [ending(row)]))),
    select("tool", "Tool", named(distinct((row) => row.tools))),
    range("Reward", "min", "max"),
    range("Step", "from", "to"),
    el("button", { type: "button", click: () => go("#/rollouts") }, "Clear"));
}
