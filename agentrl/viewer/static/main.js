// Which page is shown, the keys, and the theme.
import { el, fill } from "./dom.js";
import { address, choices, to } from "./filters.js";
import { groupPage } from "./group.js";
import { overview } from "./overview.js";
import { rolloutList } from "./list.js";
import { rolloutPage } from "./rollout.js";
import { store } from "./store.js";

const main = document.getElementById("main");
const help = document.getElementById("help");
let here = null; // what the page that is shown can do
let drawing = 0;

/** Go to an address; `same` replaces the one that is left in the browser's history. */
function go(hash, same = false) {
  if (!same) location.hash = hash;
  else {
    history.replaceState(null, "", hash);
    draw();
  }
}

async function draw() {
  const turn = ++drawing;
  const { page, parts, params } = address();
  const focused = main.contains(document.activeElement) ? document.activeElement.getAttribute("name") : null;
  const scrolled = main.querySelector(".list")?.scrollTop;
  const key = parts.join("/");
  const target = document.createElement("div");
  target.className = `page ${page}`;
  const before = here;
  // Pages draw into an element in the document, since they measure themselves; it takes the place of the old one at once.
  const pages = {
    overview: () => overview(target, params),
    rollouts: () => rolloutList(target, params, go),
    group: () => groupPage(target, key, params, go),
    rollout: () => rolloutPage(target, key, params, go),
  };
  const waiting = (pages[page] ?? (() => fill(target, el("p", { class: "empty" }, "There is no such page."))))();
  const done = (await waiting) ?? {};
  if (turn !== drawing) return;
  const samePlace = before?.place === `${page}/${key}`;
  here = { ...done, page, key, params, place: `${page}/${key}` };
  fill(main, target);
  const list = main.querySelector(".list");
  if (list && samePlace && scrolled) list.scrollTop = scrolled;
  else if (list) here.move?.(0);
  if (focused) main.querySelector(`[name="${CSS.escape(focused)}"]`)?.focus();
  if (!samePlace) window.scrollTo(0, 0);
  document.getElementById("to-overview").toggleAttribute("aria-current", page === "overview");
  document.getElementById("to-rollouts").toggleAttribute("aria-current", page !== "overview");
  document.getElementById("to-rollouts").href = to("rollouts", choices(params));
  document.title = `${key || page} – agentrl`;
  const state = document.getElementById("state");
  state.textContent = store.embedded ? "one file" : store.lost ? "not connected" : "live";
  state.className = store.lost ? "lost" : "";
  document.documentElement.dataset.ready = String(turn);
  performance.mark("drawn"); // for benchmarks/viewer.py
}

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
}

function setTheme(name) {
  if (name !== "dark" && name !== "light") return;
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // A page that may not keep anything shows the theme all the same.
  }
}

function storedTheme() {
  try {
    return localStorage.getItem("theme");
  } catch {
    return null;
  }
}

function search() {
  const field = () => main.querySelector("input[name=text]");
  if (field()) return field().focus();
  go(here?.up ?? "#/rollouts");
  const wait = setInterval(() => {
    if (field()) {
      field().focus();
      clearInterval(wait);
    }
  }, 30);
  setTimeout(() => clearInterval(wait), 2000);
}

const ACTIONS = {
  j: () => here?.move?.(1),
  k: () => here?.move?.(-1),
  ArrowDown: () => here?.page === "rollouts" && here.move?.(1),
  ArrowUp: () => here?.page === "rollouts" && here.move?.(-1),
  Enter: () => here?.open?.(),
  ArrowRight: () => here?.turn?.(1),
  ArrowLeft: () => here?.turn?.(-1),
  g: () => (here?.group ? go(here.group) : here?.row?.() && go(to(`group/${here.row().key}`, choices(here.params)))),
  u: () => go(here?.up ?? "#/"),
  Escape: () => go(here?.up ?? "#/"),
  o: () => go("#/"),
  r: () => go("#/rollouts"),
  t: theme,
  "/": search,
  "?": () => help.showModal(),
};

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select, textarea, dialog");
  if (field && event.key === "Escape" && field.tagName !== "DIALOG") return event.target.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  const action = ACTIONS[event.key];
  if (action === undefined) return;
  if (event.key.startsWith("Arrow") && here?.page === "overview") return;
  event.preventDefault();
  action();
});

document.getElementById("theme").addEventListener("click", theme);
document.getElementById("keys").addEventListener("click", () => help.showModal());
window.addEventListener("hashchange", draw);
setTheme(storedTheme());
store.refresh().then(draw, (error) => fill(main, el("p", { class: "empty" }, `The data cannot be read: ${error.message}`)));
store.follow(() => {
  if (store.lost || here?.page === "overview" || here?.page === "rollouts" || here?.changing) draw();
});
