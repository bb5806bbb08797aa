// The conversation of a rollout: prompt, turns, calls with their answers.
import { count, el, number, seconds, signed, visible } from "./dom.js";
import { stackedBar } from "./chart.js";
import { store } from "./store.js";

/** A text that may have been cut. */
export function prose(part, kind = "text") {
  const cut = part.more ? el("p", { class: "cut" }, `… ${number(part.more)} more characters`) : null;
  return el("div", { class: kind, dir: "auto" }, visible(part.text), cut);
}

function block(part, source) {
  if (part.image === undefined) return part.text === "" ? null : prose(part);
  const picture = el("img", { src: store.image(source, part.image), alt: `image ${part.image.slice(0, 12)}`, loading: "lazy" });
  picture.addEventListener("error", () => picture.replaceWith(el("p", { class: "note" }, "an image that cannot be shown")));
  return picture;
}

function message(one, source) {
  const blocks = one.blocks.map((part) => block(part, source)).filter(Boolean);
  const reasoning = one.reasoning && el("details", { open: "" }, el("summary", {}, "reasoning"), prose(one.reasoning));
  return [reasoning, blocks];
}

function answer(result, source) {
  const state = result.timed_out ? "timed out" : result.failed ? "failed" : null;
  const facts = [seconds(result.seconds), result.reward === null ? null : `reward ${signed(result.reward)}`];
  if (result.done) facts.push("ended the episode");
  return el(
    "div",
    { class: `call ${result.failed ? "bad" : ""}` },
    el(
      "div",
      { class: "signature" },
      el("span", { class: "tool" }, visible(result.name) || "unreadable call"),
      state && el("span", { class: "badge bad" }, state),
      el("span", { class: "facts" }, facts.filter(Boolean).join(" · ")),
    ),
    prose(result.arguments, "code"),
    result.error && prose(result.error, "text error"),
    el("div", { class: "answer" }, result.blocks.map((part) => block(part, source))),
  );
}

/** A message of the prompt, or what a program that owns its loop said after a turn. */
function given(one, source) {
  return el("section", { class: `message ${one.role === "assistant" ? "model" : ""}` },
    el("h3", {}, visible(one.role)), message(one, source), one.calls.map((call) => prose(call, "code")));
}

/** The turns of a rollout, below its prompt. */
export function conversation(content, row) {
  const prompt = content.prompt.map((one) => given(one, row.source));
  let before = row.started;
  const turns = content.turns.map((turn, i) => {
    const calling = Math.max(0, ...turn.results.map((result) => result.seconds));
    const rest = turn.at === null ? 0 : Math.max(0, turn.at - before - turn.seconds - calling);
    before = turn.at;
    const parts = [
      { name: "sampling", size: turn.seconds, kind: "sampling" },
      { name: "tools", size: calling, kind: "calling" },
      { name: "waiting and the rest", size: rest, kind: "rest" },
    ];
    const advantage = content.advantages.length > 1 ? content.advantages[i] : null;
    const facts = [
      count(turn.stop - turn.start, "token"),
      `sampled in ${seconds(turn.seconds)}`,
      turn.finish === "stop" ? null : "cut by its length",
      `weights ${turn.weights_version}`,
      turn.reward === null ? null : `reward ${signed(turn.reward)}`,
      advantage === null || advantage === undefined ? null : `advantage ${signed(advantage)}`,
    ];
    const unseen = turn.results.length && !turn.shown;
    const read = turn.results.length === 0 ? turn.message.calls.map((call) => prose(call, "code")) : null;
    const section = el(
      "section",
      { class: "message model" },
      el("h3", {}, `Turn ${i + 1}`, el("span", { class: "facts" }, facts.filter(Boolean).join(" · ")), stackedBar(parts, seconds)),
      message(turn.message, row.source),
      read,
      turn.results.map((result) => answer(result, row.source)),
      unseen ? el("p", { class: "note" }, "There was no room for these answers: the model did not see them.") : null,
    );
    return [section, turn.replies.map((one) => given(one, row.source))];
  });
  const end = content.turns.length === 0 ? el("p", { class: "empty" }, "No turn was finished.") : null;
  return el("div", { class: "conversation" }, prompt, turns, end, content.failure && failure(content.failure));
}

function failure(part) {
  return el("section", { class: "message bad" }, el("h3", {}, "The environment broke"), prose(part, "code"));
}
