// One rollout: its conversation, its tokens, its ids, the exact text, and what it had to do.
import { el, fill, moment, number, seconds, signed, visible } from "./dom.js";
import { changed, choices, ending, to } from "./filters.js";
import { COLOURS, tokenStrips } from "./tokens.js";
import { chosenRows } from "./list.js";
import { conversation, prose } from "./conversation.js";
import { nameOf, swatch } from "./overview.js";
import { store } from "./store.js";

const TABS = [["conversation", "Conversation"], ["tokens", "Tokens"], ["ids", "Ids"], ["exact", "Exact text"], ["task", "Task and rewards"]];
const IDS = 50_000; // shown at once

/** The page. */
export async function rolloutPage(main, key, params, go) {
  const row = store.row(key);
  const content = row && (await store.content(key, params.has("full")));
  if (row === null) return fill(main, el("p", { class: "empty" }, "There is no such rollout."));
  const tab = TABS.some(([name]) => name === params.get("tab")) ? params.get("tab") : "conversation";
  const here = (changes) => to(`rollout/${key}`, changed(params, changes));
  const rows = await chosenRows(params);
  const at = rows.findIndex((one) => one.key === key);
  const beside = (by) => rows[at + by] && at >= 0 ? to(`rollout/${rows[at + by].key}`, changed(params, { full: "" })) : null;
  const tabs = TABS.map(([name, title]) => el("a", { href: here({ tab: name }), "aria-current": name === tab ? "page" : null }, title));
  const body = el("div", { class: "body" });
  const place = at >= 0 ? `${number(at + 1)} of ${number(rows.length)}` : "not among the rollouts chosen";
  fill(
    main,
    el("div", { class: "title" },
      el("h1", {}, "Rollout ", el("span", { class: "id" }, row.rank ? `${row.rank}:${row.id}` : String(row.id))),
      el("span", { class: `badge ${ending(row)}` }, ending(row), row.limit && ending(row) !== "playing" ? ` (${row.limit})` : ""),
      el("span", { class: "spread" }),
      el("nav", { class: "steps" },
        el("a", { href: to(`group/${key}`, choices(params)) }, "Group"),
        [["‹ Previous", -1], ["Next ›", 1]].map(([text, by]) => beside(by) ? el("a", { href: beside(by) }, text) : el("span", { class: "off" }, text)),
        el("span", { class: "facts" }, place))),
    facts(row),
    el("nav", { class: "tabs" }, tabs),
    body,
  );
  if (content === null) fill(body, el("p", { class: "empty" }, "The content of this rollout is not in this file, which holds that of the last ones only."));
  else await show(body, tab, row, content, params, here);
  return {
    turn: (by) => {
      const next = TABS[TABS.findIndex(([name]) => name === tab) + by];
      if (next) go(here({ tab: next[0] }), true);
    },
    move: (by) => beside(by) && go(beside(by)),
    group: to(`group/${key}`, choices(params)),
    up: to("rollouts", changed(choices(params), { at: key })),
    changing: row.outcome === null,
  };
}

function facts(row) {
  const run = store.run(row.runKey);
  const entries = [
    ["Reward", number(row.reward)], ["Advantage", signed(row.advantage)], ["Step", `${number(row.step)}, ${row.kind}`], ["Group, member", `${row.group}, ${row.member}`],
    ["Turns", number(row.turns)], ["Sampled", `${number(row.sampled)} tokens`], ["Calls", row.failed ? `${row.calls}, ${row.failed} failed` : number(row.calls)],
    ["Time", timing(row)], ["Weights", number(row.weights_version)], ["Began", moment(row.started)],
    row.environment && ["Environment", row.environment], row.attempt && ["Attempt", number(row.attempt + 1)],
  ].filter(Boolean);
  const named = run && store.runs.length > 1 ? [el("dt", {}, "Run"), el("dd", {}, swatch(run), visible(nameOf(run)))] : [];
  const pairs = [named, ...entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, visible(value))])].filter((pair) => pair.length);
  return el("dl", { class: "factsheet" }, pairs.map((pair) => el("div", {}, pair)));
}

async function show(body, tab, row, content, params, here) {
  const whole = store.embedded || params.has("full") ? null : el("p", { class: "note" }, "Long texts are cut. ", el("a", { href: here({ full: "1" }) }, "Show all of them"));
  const isCut = JSON.stringify(content, (name, value) => (name === "rows" ? undefined : value)).match(/"more":[1-9]/);
  const note = isCut ? (whole ?? el("p", { class: "note" }, "Long texts are cut in this file.")) : null;
  if (tab === "conversation") return fill(body, note, conversation(content, row));
  if (tab === "ids") return fill(body, content.rows.map(ids));
  if (tab === "task") return fill(body, note, task(content));
  fill(body, el("p", { class: "empty" }, "…"));
  const texts = await store.tokens(row.key);
  const none = el("p", { class: "note" }, store.embedded ? "No tokenizer was at hand when this file was written." : "No tokenizer of this run is on this machine; name one with --tokenizer.");
  if (tab === "exact") {
    const parts = texts?.exact.map((text, i) => [content.rows.length > 1 && el("h3", {}, `Row ${i + 1}`), el("pre", { class: "exact" }, visible(text))].filter(Boolean));
    return fill(body, texts === null ? none : [el("p", { class: "note" }, "The ids of the row as text: what the model read and wrote, special tokens included."), parts]);
  }
  const colour = COLOURS.includes(params.get("colour")) ? params.get("colour") : "logprob";
  const links = COLOURS.map((name) => el("a", { href: here({ colour: name }), "aria-current": name === colour ? "page" : null }, name));
  return fill(body, texts === null ? none : null, el("nav", { class: "tabs small" }, el("span", {}, "Colour by"), links), tokenStrips(content, texts, colour));
}

function ids(part, i) {
  const list = (values) => el("pre", { class: "ids" }, values.slice(0, IDS).join(" ") + (values.length > IDS ? ` … ${number(values.length - IDS)} more` : ""));
  return [
    el("h3", {}, i ? `Prompt of row ${i + 1}, forked` : "Prompt", el("span", { class: "facts" }, `${number(part.prompt.length)} ids`)), list(part.prompt),
    el("h3", {}, "Completion", el("span", { class: "facts" }, `${number(part.ids.length)} ids, ${number(part.mask.reduce((a, b) => a + b, 0))} of them sampled`)), list(part.ids),
  ];
}

function task(content) {
  const table = (entries) => el("dl", { class: "columns" }, entries.map(([name, value]) => [el("dt", {}, visible(name)), el("dd", {}, value)]));
  const rewards = Object.entries(content.rewards).map(([name, value]) => [name, value === null ? "does not apply" : number(value)]);
  const given = content.environment_reward;
  const advantages = content.advantages.map((value, i) => [content.advantages.length > 1 ? `turn ${i + 1}` : "of every token", signed(value)]);
  const texts = (part) => Object.entries(part).map(([name, value]) => [name, prose(value, "code")]);
  const section = (title, entries, without) => [el("h3", {}, title), entries.length ? table(entries) : el("p", { class: "note" }, without)];
  return [
    section("Rewards, before weighting", rewards, given === null ? "Not known yet, or nothing rewarded it." : `The environment gave ${number(given)}; sources have not been added yet.`),
    section("Advantages", advantages, "Not known yet, or not trained on."),
    section("Task", [["seed", content.seed], ...texts(content.columns)], ""),
    Object.keys(content.extra).length ? section("Further fields", texts(content.extra), "") : [],
  ];
}

/** Where the time of a rollout went, of what is known. */
function timing(row) {
  const parts = [["sampling", row.sampling], ["prefill", row.prefill], ["tools", row.calling], ["reset", row.resetting], ["reward", row.rewarding]];
  const known = parts.filter(([, value]) => value !== null).map(([name, value]) => (name === "prefill" ? `of it ${seconds(value)} before the first tokens` : `${seconds(value)} ${name}`));
  return `${seconds(row.seconds)}: ${known.join(", ")}`;
}
