// The members of a group side by side.
import { count, deviation, el, fill, mean, number, seconds, signed, visible } from "./dom.js";
import { choices, ending, groupKey, groupOf, to } from "./filters.js";
import { chosenRows } from "./list.js";
import { store } from "./store.js";

const SHORT = 400; // characters of a text on a card

/** The page. */
export async function groupPage(main, key, params, go) {
  const row = store.row(key);
  if (row === null) return fill(main, el("p", { class: "empty" }, "There is no such rollout."));
  const members = groupOf(store.rows, row);
  const rewards = members.map((one) => one.reward).filter((value) => value !== null);
  const least = Math.min(0, ...rewards);
  const most = Math.max(0, ...rewards);
  const facts = [
    `${row.kind}, step ${row.step}`, count(members.length, "rollout"), row.environment && visible(row.environment),
    `reward ${number(mean(rewards))} ± ${number(deviation(rewards))}`,
    rewards.length > 1 && deviation(rewards) < 1e-6 ? "all rewards are equal: nothing is learned from it" : null,
  ];
  const task = el("div", { class: "task" });
  store.content(key).then((content) => content && fill(task, content.prompt.map((one) => el("p", { class: "text", dir: "auto" }, said(one.blocks)))));
  const cards = members.map((one) => card(one, params, [least, most]));
  fill(
    main,
    el("div", { class: "title" }, el("h1", {}, "Group ", el("span", { class: "id" }, visible(row.group))), el("span", { class: "facts" }, facts.filter(Boolean).join(" · "))),
    task,
    el("div", { class: "cards" }, cards),
  );
  const firsts = new Map();
  for (const one of await chosenRows(params)) if (!firsts.has(groupKey(one))) firsts.set(groupKey(one), one.key);
  const groups = [...firsts.keys()];
  const turn = (by) => {
    const next = groups[groups.indexOf(groupKey(row)) + by];
    if (next !== undefined) go(to(`group/${firsts.get(next)}`, choices(params)));
  };
  return { turn, move: turn, open: () => go(to(`rollout/${key}`, choices(params))), up: to("rollouts", choices(params)) };
}

function card(row, params, [least, most]) {
  const state = ending(row);
  const body = el("div", { class: "brief" }, el("p", { class: "empty" }, "…"));
  store.content(row.key).then((content) => fill(body, content === null ? el("p", { class: "empty" }, "The content is not in this file.") : brief(content)));
  const bar = el("span", { class: "level" });
  const filled = el("span", { class: row.reward < 0 ? "below" : "above" });
  filled.style.width = `${(100 * Math.abs(row.reward ?? 0)) / (most - least || 1)}%`;
  filled.style.marginInlineStart = `${(100 * (Math.min(row.reward ?? 0, 0) - least)) / (most - least || 1)}%`;
  bar.append(filled);
  return el("article", { class: "card" },
    el("a", { class: "head", href: to(`rollout/${row.key}`, choices(params)) },
      el("span", { class: "who" }, `Member ${row.member}`, row.attempt ? ` (attempt ${row.attempt + 1})` : ""), el("span", { class: `badge ${state}` }, state)),
    el("div", { class: "score" }, el("span", {}, "reward ", el("b", {}, number(row.reward))), el("span", { class: row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "" }, `advantage ${signed(row.advantage)}`)),
    bar,
    el("div", { class: "facts" }, [count(row.turns, "turn"), count(row.sampled, "token"), row.failed ? `${row.failed} of ${count(row.calls, "call")} failed` : count(row.calls, "call"), seconds(row.seconds)].join(" · ")),
    body);
}

function shortened(text) {
  return visible(text.length > SHORT ? `${text.slice(0, SHORT)} …` : text);
}

function said(blocks) {
  return shortened(blocks.map((block) => (block.image === undefined ? block.text : "[image]")).join(" ").trim());
}

function brief(content) {
  const turns = content.turns.map((turn) => {
    const text = said(turn.message.blocks);
    const calls = turn.results.map((result) => el("div", { class: `step ${result.failed ? "bad" : ""}` },
      el("span", { class: "tool" }, visible(result.name) || "unreadable call"), " ", el("span", { class: "code" }, shortened(result.arguments.text)), el("div", { class: "answer" }, "→ ", said(result.blocks))));
    const replies = turn.replies.map((one) => el("div", { class: "step" }, el("span", { class: "tool" }, visible(one.role)), " ", el("div", { class: "answer" }, "→ ", said(one.blocks))));
    return [text && el("p", { class: "text", dir: "auto" }, text), calls, replies];
  });
  const failure = content.failure && el("p", { class: "text error" }, shortened(content.failure.text));
  return [turns, failure];
}
