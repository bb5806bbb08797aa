// Runs before every page's own scripts: all chance is drawn from the episode's seed, and pages find `agentrl`, where they
// leave their instruction and their check of success. The agent sees pixels only and cannot call any of it.
((seed) => {
  let state = seed >>> 0;
  const random = () => {  // mulberry32
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
  const integer = (low, high) => low + Math.floor(random() * (high - low + 1));
  const shuffle = (items) => {
    const shuffled = [...items];
    for (let last = shuffled.length - 1; last > 0; last--) {
      const other = integer(0, last);
      [shuffled[last], shuffled[other]] = [shuffled[other], shuffled[last]];
    }
    return shuffled;
  };
  Math.random = random;
  const agentrl = {random, integer, shuffle, pick: (items) => items[integer(0, items.length - 1)]};
  agentrl.instruction = "";
  agentrl.success = () => false;
  Object.defineProperty(window, "agentrl", {value: agentrl});
})(SEED);
