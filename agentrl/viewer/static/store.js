// The data: from the server, or out of the page itself where it is one file.

const POLL_MS = 2000;

class Store {
  constructor() {
    const embedded = document.getElementById("data");
    this.embedded = embedded === null ? null : JSON.parse(embedded.textContent);
    this.runs = [];
    this.rows = [];
    this.logs = new Map();
    this.known = new Map();
    this.marks = new Map();
    this.lost = false;
  }

  /** Read what is new; says whether anything is. */
  async refresh() {
    const runs = this.embedded ? this.embedded.runs : await get("runs");
    const sources = [...new Set(runs.map((run) => run.source))];
    const parts = await Promise.all(sources.map((source) => this.changes(source)));
    const logs = await Promise.all(sources.map((source) => this.embedded?.logs[source] ?? get(`logs/${source}`)));
    const length = JSON.stringify(logs).length;
    const news = parts.some(Boolean) || runs.length !== this.runs.length || length !== this.logLength;
    this.runs = runs.map((run, number) => ({ ...run, number }));
    this.logLength = length;
    for (const [i, source] of sources.entries())
      for (const [run, metrics] of Object.entries(logs[i])) this.logs.set(`${source}.${run}`, metrics);
    if (news) {
      const order = (a, b) => a.source - b.source || a.run - b.run || a.step - b.step || a.rank - b.rank || a.id - b.id;
      this.rows = [...this.known.values()].filter((row) => row.state !== "superseded").sort(order);
    }
    return news;
  }

  async changes(source) {
    const mark = this.marks.get(source) ?? { epoch: "", version: 0 };
    const part = this.embedded
      ? this.embedded.rollouts[source]
      : await get(`rollouts/${source}?epoch=${mark.epoch}&version=${mark.version}`);
    this.marks.set(source, part);
    if (part.epoch !== mark.epoch)
      for (const [key, row] of this.known) if (row.source === source) this.known.delete(key);
    for (const values of part.rows) {
      const row = { source };
      part.columns.forEach((name, i) => (row[name] = values[i]));
      row.key = `${source}/${row.rank}/${row.id}`;
      row.runKey = `${source}.${row.run}`;
      row.seconds = row.ended === null ? null : row.ended - row.started;
      this.known.set(row.key, row);
    }
    return part.rows.length > 0 || part.epoch !== mark.epoch;
  }

  row(key) {
    return this.known.get(key) ?? null;
  }

  run(key) {
    return this.runs.find((run) => run.key === key);
  }

  /** The content of a rollout, null where it is not at hand. */
  async content(key, full = false) {
    if (this.embedded) return this.embedded.contents[key] ?? null;
    return get(`rollout/${key}${full ? "?full" : ""}`);
  }

  /** The texts of a rollout's ids, null without a tokenizer. */
  async tokens(key) {
    if (this.embedded) return this.embedded.tokens[key] ?? null;
    return get(`tokens/${key}`);
  }

  image(source, digest) {
    return this.embedded ? (this.embedded.images[`${source}/${digest}`] ?? "") : `/api/image/${source}/${digest}`;
  }

  /** The keys of the rollouts that have a text. */
  async search(text) {
    if (this.embedded) {
      const wanted = text.toLowerCase();
      const has = (value) => textOf(value).toLowerCase().includes(wanted);
      return new Set(Object.keys(this.embedded.contents).filter((key) => has(this.embedded.contents[key])));
    }
    const sources = [...new Set(this.runs.map((run) => run.source))];
    const found = await Promise.all(
      sources.map(async (source) =>
        ((await get(`search/${source}?text=${encodeURIComponent(text)}`)) ?? []).map((key) => [source, ...key].join("/")),
      ),
    );
    return new Set(found.flat());
  }

  /** Call `then` whenever there is something new. */
  follow(then) {
    if (this.embedded) return;
    const poll = async () => {
      if (!document.hidden) {
        try {
          const news = await this.refresh();
          if (this.lost || news) then();
          this.lost = false;
        } catch {
          if (!this.lost) {
            this.lost = true;
            then();
          }
        }
      }
      setTimeout(poll, POLL_MS);
    };
    setTimeout(poll, POLL_MS);
  }
}

/** All text of a rollout: prompt, messages, calls, results, failure. */
function textOf(content) {
  const texts = (value) =>
    value && typeof value === "object" ? Object.values(value).flatMap(texts) : typeof value === "string" ? [value] : [];
  return texts([content.prompt, content.turns, content.failure]).join("\n");
}

async function get(path) {
  const answer = await fetch(`/api/${path}`);
  if (answer.status === 404) return null;
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

export const store = new Store();
