// Token ids as a strip of pieces, coloured by what is known of each.
import { el, fill, number, signed, visible } from "./dom.js";

const TOGETHER = 3000; // tokens drawn at once
const LOGPROBS = [-0.05, -0.2, -0.5, -1, -2, -3.5, -6];

export const COLOURS = ["logprob", "mask", "advantage"];

/** The advantage of a turn: one for the whole rollout, or one a turn. */
function advantageOf(content, turn) {
  const values = content.advantages;
  return values.length ? (values.length === 1 ? values[0] : (values[turn] ?? null)) : null;
}

function colourClass(token, colour) {
  if (colour === "mask") return token.sampled ? "m1" : "m0";
  if (!token.sampled) return "m0";
  if (colour === "advantage") {
    if (token.advantage === null) return "unknown";
    const strength = Math.min(4, Math.ceil(Math.abs(token.advantage) * 2));
    return token.advantage < 0 ? `n${strength}` : `p${strength}`;
  }
  if (token.logprob === null) return "unknown";
  const level = LOGPROBS.findIndex((bound) => token.logprob >= bound);
  return `l${level < 0 ? LOGPROBS.length : level}`;
}

/** The tokens of a row with what is known of them. */
function tokensOf(content, number_) {
  const row = content.rows[number_];
  const tokens = row.prompt.map((id, position) => ({ id, position, sampled: false, where: "prompt" }));
  const turns = content.turns.map((turn, i) => ({ ...turn, i })).filter((turn) => turn.row === number_);
  let next = 0;
  row.ids.forEach((id, i) => {
    while (next < turns.length && i >= turns[next].stop) next++;
    const turn = turns[next];
    const inside = turn !== undefined && i >= turn.start;
    tokens.push({
      id,
      position: row.prompt.length + i,
      sampled: row.mask[i] === 1,
      logprob: row.mask[i] === 1 ? row.logprobs[i] : null,
      advantage: inside ? advantageOf(content, turn.i) : null,
      version: inside ? turn.weights_version : null,
      where: inside ? `turn ${turn.i + 1}` : "result",
    });
  });
  return tokens;
}

function piece(token, texts, colour) {
  const text = texts ? visible(texts.pieces[token.id] ?? "�").replaceAll("\n", "↵").replaceAll(" ", "·") : token.id;
  const element = el("span", { class: `token ${colourClass(token, colour)}` }, `${text}`);
  element.token = token;
  return element;
}

function described(token, texts) {
  const parts = [`id ${token.id}`, `position ${token.position}`, token.where, token.sampled ? "sampled" : "not sampled"];
  if (texts) parts.unshift(`“${visible(texts.pieces[token.id] ?? "�").replaceAll("\n", "↵")}”`);
  if (token.sampled) {
    const known = token.logprob !== null;
    parts.push(known ? `logprob ${number(token.logprob)}, p ${number(Math.exp(token.logprob))}` : "logprob not known");
    if (token.advantage !== null) parts.push(`advantage ${signed(token.advantage)}`);
    parts.push(`weights ${token.version}`);
  }
  return parts.join(" · ");
}

function legend(colour) {
  const entry = (kind, text) => el("span", { class: "entry" }, el("span", { class: `token ${kind}` }, "\u2002"), text);
  const rest = entry("m0", "not sampled");
  if (colour === "mask") return [entry("m1", "sampled, trained"), rest];
  if (colour === "advantage") return [entry("n4", "≤ −1.5"), entry("n1", ""), entry("p1", ""), entry("p4", "≥ +1.5"), rest];
  const levels = LOGPROBS.map((bound, i) => entry(`l${i}`, `≥ ${String(bound).replace("-", "−")}`));
  return [...levels, entry(`l${LOGPROBS.length}`, "less"), rest];
}

/** The strips of a rollout. */
export function tokenStrips(content, texts, colour) {
  const detail = el("output", { class: "detail" }, "Point at a token.");
  const strips = content.rows.map((_, i) => {
    const tokens = tokensOf(content, i);
    const strip = el("div", { class: "strip", tabindex: 0 });
    const more = el("button", { type: "button", class: "more" });
    let drawn = 0;
    const draw = () => {
      let group = null;
      let where = drawn ? tokens[drawn - 1].where : null;
      for (const token of tokens.slice(drawn, drawn + TOGETHER)) {
        if (group === null || token.where !== where) {
          where = token.where;
          group = el("span", { class: "span" }, el("span", { class: "where" }, where));
          strip.append(group);
        }
        group.append(piece(token, texts, colour));
      }
      drawn = Math.min(tokens.length, drawn + TOGETHER);
      more.textContent = `${number(tokens.length - drawn)} more tokens`;
      more.hidden = drawn === tokens.length;
    };
    more.addEventListener("click", draw);
    strip.addEventListener("pointerover", (event) => {
      if (event.target.token) fill(detail, described(event.target.token, texts));
    });
    draw();
    const heading = content.rows.length > 1 ? el("h3", {}, i ? `Row ${i + 1}, forked` : "Row 1") : null;
    return [heading, strip, more];
  });
  return [el("div", { class: "legend" }, legend(colour)), detail, strips];
}
