// The address says all that is chosen: `#/page/part/part?name=value`. Filters are its parameters.

export const CHOICES = ["run", "kind", "from", "to", "outcome", "tool", "min", "max", "text", "sort"];

/** The address as `{page, parts, params}`. */
export function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page, ...parts] = path.split("/");
  return { page: page || "overview", parts, params: new URLSearchParams(query ?? "") };
}

/** The address of a page, with the choices that are given. */
export function to(page, params = new URLSearchParams()) {
  const kept = new URLSearchParams([...params].filter(([, value]) => value !== ""));
  return `#/${page}${kept.size ? `?${kept}` : ""}`;
}

/** Parameters with some of them changed; empty values are left out. */
export function changed(params, changes) {
  const result = new URLSearchParams(params);
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null) result.delete(name);
    else result.set(name, value);
  }
  return result;
}

/** Only the choices among parameters: what a page hands on to the next one. */
export function choices(params) {
  return new URLSearchParams([...params].filter(([name]) => CHOICES.includes(name)));
}

/** How a rollout ended, or how far it is. */
export function ending(row) {
  return row.outcome ?? "playing";
}

/** The rollouts that the parameters choose, in their order. `found` has the keys with the text, or is null. */
export function choose(rows, params, found) {
  const given = (name) => (params.get(name) ? params.get(name) : null);
  const bound = (name) => (given(name) === null || Number.isNaN(Number(given(name))) ? null : Number(given(name)));
  const [run, kind, outcome, tool] = ["run", "kind", "outcome", "tool"].map(given);
  const [from, last, least, most] = ["from", "to", "min", "max"].map(bound);
  const chosen = rows.filter(
    (row) =>
      (run === null || row.runKey === run) &&
      (kind === null || row.kind === kind) &&
      (outcome === null || ending(row) === outcome) &&
      (tool === null || row.tools.includes(tool)) &&
      (from === null || row.step >= from) &&
      (last === null || row.step <= last) &&
      (least === null || (row.reward !== null && row.reward >= least)) &&
      (most === null || (row.reward !== null && row.reward <= most)) &&
      (found === null || found.has(row.key)),
  );
  const sort = given("sort");
  return sort === null ? chosen : sorted(chosen, sort.replace("-", ""), sort.startsWith("-") ? -1 : 1);
}

function sorted(rows, name, direction) {
  const value = (row) => (name === "outcome" ? ending(row) : row[name]);
  const compare = (a, b) => {
    if (a === b) return 0;
    if (a === null || a === undefined) return 1; // what is not known comes last, either way
    if (b === null || b === undefined) return -1;
    return a < b ? -direction : direction;
  };
  return [...rows].sort((a, b) => compare(value(a), value(b)));
}

/** The rollouts of the same group, by member; of those that were tried again, all attempts. */
export function groupOf(rows, row) {
  return rows
    .filter((other) => groupKey(other) === groupKey(row))
    .sort((a, b) => a.member - b.member || a.attempt - b.attempt || a.rank - b.rank || a.id - b.id);
}

export function groupKey(row) {
  return JSON.stringify([row.runKey, row.kind, row.step, row.group]);
}
