// The runs, compared: a table, charts over steps, and where the time went.
import { deviation, el, fill, mean, moment, number, seconds, share, visible } from "./dom.js";
import { changed, ending, to } from "./filters.js";
import { lineChart, stackedBar } from "./chart.js";
import { store } from "./store.js";

const GOOD = ["finished", "env_done"];
const ENDINGS = [...GOOD, "truncated", "timeout", "env_failure", "cancelled", "playing"];

/** What trainers log that says most about how training goes: title, names in the order of preference, what it is. */
const LOGGED = [
  ["Entropy", ["entropy"], "of the distribution that tokens were drawn from, in nats"],
  ["Ratio", ["sampling/importance_sampling_ratio/mean"], "weight of the sampler's correction; 1 is exact"],
  ["Logprob difference, largest", ["sampling/sampling_logp_difference/max"], "between generator and trainer"],
  ["Clipped share", ["clip_ratio/region_mean", "cispo_clip_ratio"], "of the tokens, or rollouts, at the ratio's bounds"],
  ["KL", ["kl"], "to the reference"],
  ["Loss", ["loss"], "mean since the last log"],
  ["Gradient norm", ["grad_norm"], "before clipping"],
  ["Groups without a spread", ["frac_reward_zero_std"], "share of rollouts from whose rewards nothing can be learned"],
  ["Learning rate", ["learning_rate"], ""],
  ["Seconds of a step", ["step_time"], "rollouts included"],
];

/** The page. */
export function overview(main, params) {
  if (!store.runs.length) return fill(main, el("p", { class: "empty" }, "There is no run in this journal yet."));
  const kinds = [...new Set(store.rows.map((row) => row.kind))].sort((a, b) => (b === "train") - (a === "train"));
  const kind = params.get("kind") ?? kinds[0] ?? "train";
  const rows = store.rows.filter((row) => row.kind === kind);
  const byRun = new Map(store.runs.map((run) => [run.key, []]));
  for (const row of rows) byRun.get(row.runKey)?.push(row);
  const shown = store.runs.filter((run) => byRun.get(run.key).length || store.logs.has(run.key));
  const tabs = kinds.map((one) =>
    el("a", { href: to("", changed(params, { kind: one })), "aria-current": one === kind ? "page" : null }, visible(one)),
  );
  fill(
    main,
    el("div", { class: "title" }, el("h1", {}, store.runs.length > 1 ? `${store.runs.length} runs` : "Run"), kinds.length > 1 && el("nav", { class: "tabs" }, tabs)),
    runTable(store.runs, byRun, kind),
    rows.length || shown.length ? null : el("p", { class: "empty" }, "No rollouts yet. They appear here as they are played."),
    el("div", { class: "charts" }, played(shown, byRun), logged(shown)),
    el("h2", {}, "Where the time went"),
    times(shown, byRun),
    store.runs.map((run) => configuration(run)),
  );
}

/** The name of a run: its folder, and its number where there are several in it. */
export function nameOf(run) {
  const folder = run.folder.split("/").filter((part) => part && !part.endsWith(".db")).at(-1) ?? run.folder;
  return store.runs.filter((other) => other.source === run.source).length > 1 ? `${folder} #${run.run}` : folder;
}

export function swatch(run) {
  return el("span", { class: `swatch s${run.number % 8}` });
}

function runTable(runs, byRun, kind) {
  const heads = ["Run", "Algorithm", "Model", "Began", "Steps", "Rollouts", "Reward, last step", "Endings"];
  const body = runs.map((run) => {
    const rows = byRun.get(run.key);
    const steps = perStep(rows);
    const latest = steps.length ? mean(known(steps.at(-1)[1], "reward")) : null;
    const parts = ENDINGS.map((name) => ({ name, size: rows.filter((row) => ending(row) === name).length, kind: name }));
    return el("tr", {},
      el("td", {}, el("a", { href: to("rollouts", new URLSearchParams({ run: run.key, kind })) }, swatch(run), visible(nameOf(run)))),
      el("td", {}, visible(run.algorithm) || "–"),
      el("td", { class: "wide" }, visible(run.model) || "–"),
      el("td", {}, moment(run.started)),
      el("td", { class: "n" }, number(steps.length ? steps.at(-1)[0] + 1 : 0)),
      el("td", { class: "n" }, number(rows.length)),
      el("td", { class: "n" }, number(latest)),
      el("td", { class: "bar" }, rows.length ? stackedBar(parts, (size) => number(size)) : "–"));
  });
  const seen = ENDINGS.filter((name) => runs.some((run) => byRun.get(run.key).some((row) => ending(row) === name)));
  const legend = seen.map((name) => el("span", { class: "entry" }, el("span", { class: `swatch ${name}` }), name));
  return [
    el("div", { class: "scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { class: i > 3 && i < 7 ? "n" : null }, head)))), el("tbody", {}, body))),
    seen.length ? el("div", { class: "legend right" }, legend) : null,
  ];
}

/** The rollouts of each step, in order. */
function perStep(rows) {
  const steps = new Map();
  for (const row of rows) {
    if (!steps.has(row.step)) steps.set(row.step, []);
    steps.get(row.step).push(row);
  }
  return [...steps].sort((a, b) => a[0] - b[0]);
}

function known(rows, name) {
  return rows.map((row) => row[name]).filter((value) => value !== null);
}

/** Charts of what was played. */
function played(runs, byRun) {
  const steps = new Map(runs.map((run) => [run.key, perStep(byRun.get(run.key))]));
  const chart = (title, value, options) =>
    lineChart(title, runs.map((run) => ({
      name: nameOf(run),
      number: run.number,
      points: steps.get(run.key).map(([step, rows]) => [step, value(rows)]).filter(([, y]) => y !== null),
    })), options);
  const calls = (rows) => rows.reduce((sum, row) => sum + row.calls, 0);
  const anyCalls = runs.some((run) => calls(byRun.get(run.key)));
  const bad = (rows) => {
    const ended = rows.filter((row) => row.outcome !== null);
    return ended.length ? ended.filter((row) => !GOOD.includes(row.outcome)).length / ended.length : null;
  };
  return [
    chart("Reward", (rows) => mean(known(rows, "reward")), { note: "mean total reward of a step's rollouts" }),
    chart("Reward, deviation", (rows) => deviation(known(rows, "reward")), { note: "over a step's rollouts" }),
    chart("Sampled tokens", (rows) => mean(rows.map((row) => row.sampled)), { note: "mean of a step's rollouts" }),
    chart("Turns", (rows) => mean(rows.map((row) => row.turns)), { note: "mean of a step's rollouts" }),
    chart("Cut or broken", bad, { format: share, note: "truncated, timed out, environment broke, cancelled" }),
    anyCalls && chart("Failed calls", (rows) => (calls(rows) ? rows.reduce((sum, row) => sum + row.failed, 0) / calls(rows) : null), { format: share, note: "share of the calls" }),
  ].filter(Boolean);
}

/** Charts of what trainers logged. */
function logged(runs) {
  return LOGGED.map(([title, names, note]) => {
    const name = names.find((one) => runs.some((run) => store.logs.get(run.key)?.[one]));
    if (name === undefined) return null;
    const points = (run) => store.logs.get(run.key)?.[name] ?? [];
    const series = runs.map((run) => ({ name: nameOf(run), number: run.number, points: points(run) }));
    return lineChart(title, series, { note: `${name}: ${note}` });
  }).filter(Boolean);
}

function times(runs, byRun) {
  const bars = runs.map((run) => {
    const rows = byRun.get(run.key).filter((row) => row.seconds !== null);
    return [["of a step", ofStep(run)], ["of a rollout", rows.length ? ofRollout(rows) : []]].filter(([, parts]) => parts.length).map(([what, parts], i) =>
      el("div", { class: "time" }, i ? el("span") : el("span", {}, swatch(run), visible(nameOf(run))), el("span", { class: "facts" }, what),
        stackedBar(parts, seconds), el("span", { class: "facts" }, parts.map((part) => el("span", { class: "entry" }, el("span", { class: `swatch ${part.kind}` }), `${part.name} ${seconds(part.size)}`)))));
  });
  return el("div", { class: "times" }, bars, el("p", { class: "note" }, "Means. Of a turn's calls the slowest counts: they run side by side."));
}

/** Where the time of an optimizer step went, as its trainer measured it. */
function ofStep(run) {
  const logged = store.logs.get(run.key) ?? {};
  return [["rollouts", "rollouts"], ["rewards", "rewarding"], ["sync", "syncing", "handing weights over"], ["training", "training"]]
    .filter(([name]) => logged[`step_time/${name}`])
    .map(([name, kind, title]) => ({ name: title ?? name, size: mean(logged[`step_time/${name}`].map(([, y]) => y)), kind }));
}

/** Where the time of a rollout went; its `seconds` begin after `reset`. */
function ofRollout(rows) {
  const total = (value) => rows.reduce((sum, row) => sum + value(row), 0) / rows.length;
  const told = rows.some((row) => row.prefill !== null);
  const inModel = told
    ? [
        { name: "prefill and its wait", size: total((row) => row.prefill ?? 0), kind: "prefill" },
        { name: "decode", size: total((row) => row.sampling - (row.prefill ?? 0)), kind: "sampling" },
      ]
    : [{ name: "prefill and decode", size: total((row) => row.sampling), kind: "sampling" }];
  return [
    { name: "reset", size: total((row) => row.resetting ?? 0), kind: "resetting" },
    ...inModel,
    { name: "tools", size: total((row) => row.calling), kind: "calling" },
    { name: "reward", size: total((row) => row.rewarding ?? 0), kind: "rewarding" },
    { name: "waiting and the rest", size: total((row) => Math.max(0, row.seconds - row.sampling - row.calling - (row.rewarding ?? 0))), kind: "rest" },
  ];
}

function configuration(run) {
  const names = Object.keys(run.config).sort();
  if (!names.length) return null;
  const list = el("dl", { class: "columns" }, names.map((name) => [el("dt", {}, visible(name)), el("dd", {}, visible(run.config[name]))]));
  return el("details", {}, el("summary", {}, "Configuration of ", visible(nameOf(run))), list);
}
