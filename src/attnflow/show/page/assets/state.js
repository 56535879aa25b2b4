// @ts-check
// ---- what the reader chose, and what follows from it ---------------------------------------------------------------------

const AGAINST = { nothing: "nothing", even: "even attention", others: isGeneration ? "the other tokens" : "other positions" };
const UNIT_NAMES = Object.keys(UNITS);
const hasSubwords = UNITS.word.length < keys;

const state = {
  method: data.first,
  against: data.picture ? "nothing" : isGeneration && tokens.length - keys > 1 ? "others" : "even",
  layer: depth,
  unit: hasSubwords ? "word" : "token",
  position: data.position,
  until: data.position, // the last position of a span of the answer
  pin: /** @type {number | null} */ (null), // a key
  hover: /** @type {number | null} */ (null), // the one under the pointer or the keyboard
  sinks: false, // whether sinks are coloured
  share: Math.round(100 * limits.share), // of the mass, that paths carry
  rows: isGeneration ? "answer" : "layers", // of the matrix
  scale: "row",
  head: /** @type {[number, number] | null} */ (null), // layer and head that are looked at
  theme: /** @type {"light" | "dark" | null} */ (null),
};

const isImportance = () => importance.has(state.method);
const positionsOf = (from, until) => Array.from({ length: Math.abs(until - from) + 1 }, (_, i) => Math.min(from, until) + i);
const explained = () => positionsOf(state.position, state.until);
const isAside = (key) => asides.has(key);
const hasSinks = data.sinks.some(([key]) => key < keys);
const generatedBy = (position) => position + 1; // the token that a position predicted

/** What is compared with, as far as there is something: what others read is not given for all. */
function againstShown(method = state.method, unit = state.unit) {
  if (importance.has(method)) return "nothing";
  return state.against === "others" && !othersOf(method, state.layer, unit, state.sinks) ? "even" : state.against;
}

/** What other rows give a key, in even shares, and how many rows see it: [key] each; null where it is not given. */
function othersOf(method, layer, unit, withSinks) {
  const values = infos.get(method)?.others?.[withSinks ? "with" : "without"][unit], width = UNITS[unit].length;
  if (!values) return null;
  return { mean: values.subarray((layer - 1) * width, layer * width), rows: values.subarray((depth + layer - 1) * width, (depth + layer) * width) };
}

/** By token, word or sentence, how many of its positions count: those that are seen, and not left out. */
function counted(method, layer, positions, unit, withSinks) {
  return UNITS[unit].map((group) => group.filter((key) => (withSinks || !isAside(key)) && positions.some((position) => maySee(method, layer, position, key))).length);
}

/** All that is known of a row: its numbers, what counts in it, how it compares, and whether it says something. */
const lookAt = remembered(500, (method, layer, from, until, unit, against, withSinks) => {
  const positions = positionsOf(from, until), row = meanRow(method, layer, positions, unit);
  if (!row) return null;
  const counts = counted(method, layer, positions, unit, withSinks), visible = counts.reduce((sum, count) => sum + count, 0);
  let most = 0;
  for (let at = 0; at < row.length; at++) if (counts[at]) most = Math.max(most, Math.abs(row[at]));
  if (importance.has(method)) return { row, counts, most, spread: 1, isEven: false, isFull: false, ...compared(new Float64Array(row.length), new Float64Array(row.length), counts) };
  const even = Float64Array.from(counts, (count) => (most > 0 ? count / visible : 0)), others = against === "others" ? othersOf(method, layer, unit, withSinks) : null;
  const rows = positions.map((position) => sharesOfRow(unitRow(method, layer, position, unit), counts));
  const shares = rows.length === 1 ? rows[0] : rows[0].map((_, at) => rows.reduce((sum, each) => sum + each[at], 0) / rows.length);
  const own = () => even.map((value, at) => (value > 0 ? rows.reduce((sum, each) => sum + each[at], 0) / value : 0));
  const expected = others ? expectedOfOthers(shares, even, own(), rows.length, others.mean, others.rows) : even;
  const byToken = unit === "token" ? row : meanRow(method, layer, positions, "token"), tokenCounts = unit === "token" ? counts : counted(method, layer, positions, "token", withSinks);
  // words of many tokens have more of a row that is even over tokens, so both are judged
  const isEven = judgedEven(method, layer, from, until, unit, withSinks) ?? (saysNothing(row, counts) || Boolean(byToken && saysNothing(byToken, tokenCounts)));
  const isFull = !isGeneration && positions.length === 1 && Boolean(infos.get(method)?.saturated?.[layer - 1]?.[infos.get(method).rows.places.get(from)]);
  return { row, counts, spread: spreadOf(row, counts), isEven, isFull, most, ...compared(shares, expected, counts) };
});
const look = (method = state.method, { layer = state.layer, unit = state.unit, from = state.position, until = state.until } = {}) =>
  lookAt(method, layer, from, until, unit, againstShown(method, unit), state.sinks);

/** By what a row is ranked: its numbers; compared with others, how many times as much as they it reads, like the colours. */
const rankingOf = (seen, against) => (against === "others" ? seen.ratio.map((ratio, at) => (seen.shares[at] > 0 && ratio > 1 ? Math.log2(ratio) : 0)) : seen.row);

/** The token of an answer by which most of the prompt stands out: a story opens there. */
function mostTelling() {
  let best = state.position, most = 0;
  for (let choice = 0; choice < tokens.length - keys; choice++) {
    const position = keys - 1 + choice, seen = look(state.method, { from: position, until: position });
    const away = seen && !seen.isEven ? seen.scaled.reduce((sum, tone) => sum + Math.max(0, tone), 0) : 0;
    if (away > most && !data.special[keys + choice] && /[\p{L}\p{N}]/u.test(names[keys + choice]) && !names[keys + choice].startsWith("\\")) [best, most] = [position, away];
  }
  return best;
}

/** From -1 to 1, the place of a token, word or sentence on the scale; null where it has no colour. */
function toneOf(seen, at, against, most = seen.most) {
  if (!seen || !seen.counts[at] || seen.isEven) return null;
  return against === "nothing" ? (most > 0 ? seen.row[at] / most : null) : seen.scaled[at];
}

/** Why a method says nothing here; empty where it does. */
function reasonOf(method, seen) {
  if (!seen) return whyMissing(method);
  if (seen.isFull) return `${label(method)} is at the bound that is the same for every source here: it says nothing about this position`;
  if (seen.isEven) return `${label(method)} hardly differs between ${state.unit}s here (spread ${number(seen.spread, seen.spread)}, the largest share ${times(peakOf(seen.row, seen.counts))} the even one): it says nothing`;
  return "";
}

function whyMissing(method) {
  const numbers = numbersOf(method, state.layer, state.position);
  if (numbers && !Array.prototype.every.call(numbers, Number.isFinite)) return `${label(method)} cannot be drawn here: some of its numbers are not finite`;
  if (removed.has(state.position)) return `Position ${state.position} ${quoted(state.position)} was taken out of the graph`;
  if (rowOf(method, state.layer, state.position)) return `${label(method)} of whole ${state.unit}s is ${isGeneration ? "not given in a story" : `given for ${homePhrase()} only`}: choose tokens`;
  return `${label(method)} is given for ${homePhrase()} only`;
}

/** What the explanation is of, in words: one position, or several together. */
function homePhrase() {
  const span = data.span;
  if (!span || span.length < 2) return `position ${data.position} ${quoted(data.position)}`;
  const isRange = span[span.length - 1] - span[0] === span.length - 1;
  return `positions ${isRange ? `${span[0]}–${data.position}` : span.join(", ")} together, ${quoted(span[0])} to ${quoted(data.position)}`;
}

/** Where the reader stands, in words. */
function placePhrase() {
  const here = explained();
  if (isGeneration) return here.length > 1 ? `${here.length} tokens of the answer, ${quoted(generatedBy(here[0]))} to ${quoted(generatedBy(here[here.length - 1]))}` : `${quoted(generatedBy(here[0]))}, token ${here[0] - keys + 1} of the answer`;
  return state.position === data.position ? homePhrase() : `position ${state.position} ${quoted(state.position)}`;
}

// ---- the state in the address -----------------------------------------------------------------------------------------------

const KEPT = ["method", "against", "layer", "unit", "position", "until", "pin", "sinks", "share", "rows", "scale"];

/** What the address says, as far as it makes sense. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const whole = (name, low, high) => { const value = Number(given.get(name)); return given.get(name) && Number.isInteger(value) && value >= low && value <= high ? { [name]: value } : {}; };
  const oneOf = (name, values) => (values.includes(given.get(name)) ? { [name]: given.get(name) } : {});
  const [low, high] = isGeneration ? [keys - 1, tokens.length - 2] : [0, size - 1];
  Object.assign(state,
    oneOf("method", [...infos.keys(), ...importance.keys()]), oneOf("against", Object.keys(AGAINST)), oneOf("unit", UNIT_NAMES),
    whole("layer", 1, depth), whole("position", low, high), whole("pin", 0, keys - 1), whole("share", 1, 100),
    oneOf("rows", ["layers", "positions", "methods", "answer"]), oneOf("scale", ["row", "common"]), given.has("sinks") ? { sinks: given.get("sinks") === "true" } : {});
  state.until = whole("until", low, high).until ?? state.position;
}

if (isGeneration) state.position = state.until = mostTelling();
const opening = { ...state };
function writeAddress() {
  const changed = KEPT.filter((name) => state[name] !== opening[name]);
  const text = changed.map((name) => `${name}=${encodeURIComponent(String(state[name]))}`).join("&");
  try { history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]); } catch { /* a frame in a notebook has no address */ }
}
