// @ts-check
// ---- token attention: pure functions of the data -----------------------------------------------------------------------

const TINY = 1e-8;

/** The function with its last results kept, by its arguments. */
function remembered(limit, compute) {
  const kept = new Map();
  return (...args) => {
    const name = args.join();
    if (!kept.has(name)) {
      if (kept.size >= limit) kept.delete(kept.keys().next().value);
      kept.set(name, compute(...args));
    }
    return kept.get(name);
  };
}

/** How much sits at each position, one layer further down. */
function stepDown(graph, mass, layer) {
  const below = new Float64Array(size);
  for (let query = 0; query < size; query++) {
    const amount = mass[query];
    if (amount < TINY) continue;
    const share = (1 - graph.residual) * amount, row = ((layer - 1) * size + query) * size, end = data.causal ? query + 1 : size;
    for (let key = 0; key < end; key++) below[key] += share * graph.weights[row + key];
    below[query] += graph.residual * amount;
  }
  return graph.isInside ? renormalised(below, size) : below;
}

/** The same if every query spread evenly over the keys that it may see. */
function stepEvenly(graph, mass, layer) {
  const below = new Float64Array(size), changes = new Float64Array(size + 1), window = data.window[layer - 1] ?? size;
  for (let query = 0; query < size; query++) {
    const first = Math.max(0, query - window + 1), end = data.causal ? query + 1 : Math.min(size, query + window);
    const share = ((1 - graph.residual) * mass[query]) / (end - first);
    changes[first] += share;
    changes[end] -= share;
  }
  for (let key = 0, sum = 0; key < size; key++) below[key] = (sum += changes[key]) + graph.residual * mass[key];
  return below;
}

/** What starts as 1 at a node, at every position of every layer below: masses[l][position]. */
function masses(graph, layer, position, step) {
  const found = [];
  found[layer] = new Float64Array(size);
  found[layer][position] = 1;
  for (let l = layer; l > 0; l--) found[l - 1] = step(graph, found[l], l);
  return found;
}
const massesOn = remembered(60, (number, layer, position) => masses(graphs[number], layer, position, stepDown));

function rollout(graph, layer, position) {
  const row = massesOn(graph.number, layer, position)[0];
  if (data.normalize !== "receptive_field") return row;
  const field = masses(graph, layer, position, stepEvenly)[0];
  const relative = row.map((value, key) => (field[key] > 1e-12 ? value / field[key] : 0));
  return renormalised(relative, size);
}

/** One row of the model's weights: fused, or of one head. */
function weightRow(graph, layer, position, head = null) {
  const weights = head === null ? graph.weights : headWeights, row = head === null ? (layer - 1) * size : ((layer - 1) * heads + head) * size;
  return weights.subarray((row + position) * size, (row + position + 1) * size);
}

function storedRow({ values, width, places }, layer, position) {
  const place = places.get(position);
  return place === undefined ? null : values.subarray(((layer - 1) * places.size + place) * width, ((layer - 1) * places.size + place + 1) * width);
}

/** One number a key; null where there is none. */
const rowOf = remembered(600, (method, layer, position) => {
  const row = numbersOf(method, layer, position);
  return row && Array.prototype.every.call(row, Number.isFinite) ? row : null;
});

function numbersOf(method, layer, position) {
  if (importance.has(method)) return importance.get(method).values;
  const { rows, computed } = infos.get(method), stored = rows && storedRow(rows, layer, position), graph = graphOf(method);
  if (stored) return stored;
  if (!graph?.weights || removed.has(position) || !computed) return null;
  return (computed === "rollout" ? rollout(graph, layer, position) : weightRow(graph, layer, position)).subarray(0, keys);
}

// ---- words and sentences -------------------------------------------------------------------------------------------------

/** The positions of each token, word or sentence that gets a number. */
const UNITS = {
  token: Array.from({ length: keys }, (_, key) => [key]),
  word: data.units.word.filter((group) => group[0] < keys),
  sentence: data.units.sentence.filter((group) => group[0] < keys),
};
/** By unit, the place of the group that each key is in. */
const PLACES = Object.fromEntries(Object.entries(UNITS).map(([unit, groups]) => {
  const places = new Int32Array(keys).fill(-1);
  groups.forEach((group, place) => group.forEach((key) => { places[key] = place; }));
  return [unit, places];
}));
const sumsUp = (method) => importance.has(method) || (!infos.get(method).saturated && data.normalize !== "receptive_field");

/** One number a token, word or sentence; null where there is none. */
function unitRow(method, layer, position, unit) {
  const each = importance.get(method);
  if (each && unit === "word" && each.words?.length === UNITS.word.length) return each.words;
  const grouped = infos.get(method)?.grouped[unit];
  if (grouped) { const row = storedRow(grouped, layer, position); if (row) return row; }
  const row = rowOf(method, layer, position);
  if (!row || unit === "token") return row;
  if (!sumsUp(method) && UNITS[unit].some((group) => group.length > 1)) return null;
  return summed(row, unit);
}

const summed = (row, unit) => unit === "token" ? row : Float64Array.from(UNITS[unit], (group) => group.reduce((sum, key) => sum + row[key], 0));

/** The mean of the rows of several positions. */
function meanRow(method, layer, positions, unit) {
  const rows = positions.map((position) => unitRow(method, layer, position, unit));
  if (rows.some((row) => !row)) return null;
  return rows.length === 1 ? rows[0] : Float64Array.from(rows[0], (_, at) => rows.reduce((sum, row) => sum + row[at], 0) / rows.length);
}

/** The largest distance at which a position may read through the layers of a row. */
function reachOf(method, layer) {
  const windows = data.window.slice(infos.get(method)?.computed === "raw" ? layer - 1 : 0, layer);
  return windows.includes(null) ? Infinity : windows.reduce((sum, window) => sum + /** @type {number} */ (window) - 1, 0);
}

/** Whether a row may see a key. */
function maySee(method, layer, position, key) {
  if (removed.has(key)) return false;
  if (isGeneration || importance.has(method)) return true;
  return (!data.causal || key <= position) && Math.abs(key - position) <= reachOf(method, layer);
}

/** The numbers that count, as shares of their sum. */
function sharesOfRow(row, counts) {
  let sum = 0;
  for (let at = 0; at < row.length; at++) if (counts[at]) sum += row[at];
  return Float64Array.from(row, (value, at) => (counts[at] && sum > 0 ? value / sum : 0));
}

/** Shares beside what was expected: their ratio, and its logarithm from -1, an eighth or less, to 1, eight times or more. */
function compared(shares, expected, counts) {
  const ratio = shares.map((share, at) => (expected[at] > 0 ? share / expected[at] : NaN));
  const scaled = shares.map((share, at) => !counts[at] ? 0 : expected[at] > 0 ? Math.max(-1, Math.min(1, Math.log2(ratio[at]) / limits.doublings)) : share > 0 ? 1 : 0);
  return { shares, expected, ratio, scaled };
}

/**
 * What other rows would give each key: the mean of how many times its even share they give it, times the even share here.
 * `mean` and `rows` are those of all rows, `own` the times of the rows that are looked at.
 */
function expectedOfOthers(shares, even, own, count, mean, rows) {
  const sees = Float64Array.from(even, (value, at) => (value > 0 && rows[at] > count ? 1 : 0));
  const raw = even.map((value, at) => (sees[at] ? (value * Math.max(0, mean[at] * rows[at] - own[at])) / (rows[at] - count) : 0));
  const whole = raw.reduce((sum, value) => sum + value, 0), comparable = shares.reduce((sum, share, at) => sum + (sees[at] ? share : 0), 0);
  return shares.map((share, at) => (!sees[at] ? share : whole > 0 ? (comparable * raw[at]) / whole : 0));
}

/** From 0, where a row is even and says nothing, to 1, all on one: half the distance from even, over its largest value. */
function spreadOf(row, counts) {
  let sum = 0, count = 0, distance = 0;
  for (let at = 0; at < row.length; at++) if (counts[at]) { sum += row[at]; count++; }
  if (!(sum > 0) || count < 2) return 0;
  for (let at = 0; at < row.length; at++) if (counts[at]) distance += Math.abs(row[at] / sum - 1 / count);
  return distance / 2 / (1 - 1 / count);
}

/** The largest of the numbers that count, in even shares. */
function peakOf(row, counts) {
  let sum = 0, count = 0, most = 0;
  for (let at = 0; at < row.length; at++) if (counts[at]) { sum += row[at]; count++; most = Math.max(most, row[at]); }
  return sum > 0 ? (most * count) / sum : 0;
}

/** Whether a row hardly tells apart what counts, by the rule of core/evenness.py, whose limits come with the data. */
const saysNothing = (row, counts) => counts.filter(Boolean).length >= limits.few && spreadOf(row, counts) < limits.even && peakOf(row, counts) < limits.peak;

/** What Python judged of a row, as the page opens; undefined of other positions, of several, and with what is left out. */
function judgedEven(method, layer, from, until, unit, withSinks) {
  const place = isGeneration ? from - keys + 1 : from === data.position ? 0 : -1;
  if (from !== until || (withSinks && asides.size) || place < 0) return undefined;
  const flag = infos.get(method)?.even?.[unit]?.[layer - 1]?.[place];
  return flag === undefined ? undefined : Boolean(flag);
}

/** The places of the k largest numbers, largest first, whatever their sign; of those that pass. */
function largest(values, k, passes = (_) => true) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    const value = Math.abs(values[i]);
    if (!(value > 0) || !passes(i)) continue;
    if (best.length === k && value <= Math.abs(values[best[k - 1]])) continue;
    let at = best.length;
    while (at > 0 && Math.abs(values[best[at - 1]]) < value) at--;
    best.splice(at, 0, i);
    if (best.length > k) best.pop();
  }
  return best;
}

// ---- paths: the subgraph that carries a share ---------------------------------------------------------------------------

/** The levels of a graph that are drawn, from the top down: each leads from layer `top` to layer `bottom`. */
function levelsOf(graph, layer) {
  const tops = graph.bands ? graph.tops : Array.from({ length: depth }, (_, i) => i + 1);
  const below = tops.filter((top) => top < layer), levels = [];
  let top = layer;
  for (const bottom of [...below].reverse()) { levels.push({ top, bottom }); top = bottom; }
  return [...levels, { top, bottom: 0 }];
}

/** The edges [query, key] of a level, one row at a time; null where the page has none of them. */
function edgeRows(graph, { top, bottom }, source) {
  if (graph.bands) {
    const band = graph.tops.indexOf(top);
    if (band >= 0) return (query) => graph.bands.subarray((band * size + query) * size, (band * size + query + 1) * size);
    const partial = graph.weights && massesOn(graph.number, top, source)[bottom]; // only the source stands above
    return partial ? () => partial : null;
  }
  return (query) => {
    const row = weightRow(graph, top, query).slice();
    for (let key = 0; key < size; key++) row[key] *= 1 - graph.residual;
    row[query] += graph.residual;
    return row;
  };
}

/**
 * The fewest of the strongest edges whose paths carry a share of what travels from a node to the input, or to some of its tokens:
 * edges [level, query, key, amount]. Amounts of a level sum to 1.
 */
function findPaths(graph, layer, position, targets, share) {
  const levels = levelsOf(graph, layer), rows = levels.map((level) => edgeRows(graph, level, position));
  if (rows.some((row) => !row)) return null;
  const only = (places) => { const mass = new Float64Array(size); places.forEach((place) => { mass[place] = 1; }); return mass; };
  const down = [only([position])], up = [];
  levels.forEach((_, at) => {
    const below = new Float64Array(size);
    for (let query = 0; query < size; query++) if (down[at][query] > TINY) {
      const row = rows[at](query);
      for (let key = 0; key < size; key++) below[key] += down[at][query] * row[key];
    }
    down.push(renormalised(below, size));
  });
  up[levels.length] = targets ? only(targets) : new Float64Array(size).fill(1);
  for (let at = levels.length - 1; at > 0; at--) {
    up[at] = new Float64Array(size).fill(targets ? 0 : 1);
    if (targets) for (let query = 0; query < size; query++) if (down[at][query] > TINY) {
      const row = rows[at](query);
      for (let key = 0; key < size; key++) up[at][query] += row[key] * up[at + 1][key];
    }
  }
  // amounts, first counted by their size, so that only the strongest are kept
  const leaving = levels.map(() => new Float64Array(size)), sums = levels.map(() => 0), counts = new Int32Array(200);
  const bin = (amount) => Math.min(199, Math.max(0, Math.floor(-8 * Math.log2(amount))));
  const visit = (act) => levels.forEach((_, at) => {
    for (let query = 0; query < size; query++) if (down[at][query] > TINY) {
      const row = rows[at](query);
      for (let key = 0; key < size; key++) {
        const amount = down[at][query] * row[key] * up[at + 1][key];
        if (amount > 0) act(at, query, key, amount);
      }
    }
  });
  visit((at, query, key, amount) => { leaving[at][query] += amount; sums[at] += amount; });
  if (sums.some((sum) => !(sum > 0))) return { levels, edges: [], carried: 0, isAll: false };
  visit((at, query, key, amount) => { counts[bin(amount / sums[at])]++; });
  let last = 0;
  for (let kept = 0; last < 199 && kept + counts[last] <= 4 * limits.edges; last++) kept += counts[last];
  const edges = [];
  visit((at, query, key, amount) => { if (bin(amount / sums[at]) <= last) edges.push([at, query, key, amount / sums[at], amount / leaving[at][query]]); });
  return { levels, ...carrying(edges, position, levels.length, share) };
}

/** Of edges [level, query, key, amount, part of what leaves the query], the fewest of the strongest whose paths carry the share. */
function carrying(edges, position, levels, share) {
  edges.sort((a, b) => b[3] - a[3]);
  const carried = (count) => {
    let here = new Map([[position, 1]]);
    const byLevel = Array.from({ length: levels }, () => /** @type {any[]} */ ([]));
    for (let i = 0; i < count; i++) byLevel[edges[i][0]].push(edges[i]);
    for (const level of byLevel) {
      const below = new Map();
      for (const [, query, key, , part] of level) { const mass = here.get(query); if (mass) below.set(key, (below.get(key) ?? 0) + mass * part); }
      here = below;
    }
    return [...here.values()].reduce((sum, mass) => sum + mass, 0);
  };
  let low = 1, high = Math.min(edges.length, limits.edges);
  if (carried(high) >= share) while (low < high) { const middle = (low + high) >> 1; if (carried(middle) >= share) high = middle; else low = middle + 1; }
  const reached = carried(high);
  return { edges: edges.slice(0, high).reverse(), carried: reached, isAll: reached >= share - 1e-9 };
}

/** The maximum flow to some tokens that Python found, as the same kind of subgraph; null where it is not given. */
function findFlow(method, layer, position, targets, share) {
  if (layer !== depth || position !== data.position) return null;
  const flow = infos.get(method).flows?.find((each) => each.target.join() === targets.join());
  if (!flow) return null;
  const levels = Array.from({ length: depth }, (_, at) => ({ top: depth - at, bottom: depth - at - 1 }));
  const leaving = new Map();
  for (const [layer, query, , amount] of flow.edges) leaving.set(`${layer},${query}`, (leaving.get(`${layer},${query}`) ?? 0) + amount);
  const edges = flow.edges.filter((edge) => edge[3] > 0).map(([layer, query, key, amount]) => [depth - layer, query, key, amount / flow.value, amount / leaving.get(`${layer},${query}`)]);
  const cut = flow.edges.filter((edge) => edge[4]).map(([layer, query, key, amount]) => [depth - layer, query, key, amount / flow.value]);
  return { levels, value: flow.value, cut, ...carrying(edges, position, levels.length, share) };
}
