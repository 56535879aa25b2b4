// @ts-check
/// <reference path="schema.d.ts" />
// ---- the data, as Python wrote it ------------------------------------------------------------------------------------

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);
/** @type {Page} */
const data = JSON.parse(byId("data").textContent);
byId("data").remove(); // many megabytes that are not read again

/** The value of each of the 65,536 float16 numbers, by its bits. */
const HALF = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
});

/** @param {string} text base64 @returns {Uint8Array} */
function bytesOf(text) {
  const characters = atob(text), bytes = new Uint8Array(characters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = characters.charCodeAt(i);
  return bytes;
}

/** @param {Packed} packed @returns {Promise<Float32Array>} */
async function unpack({ float16, deflated }) {
  if (float16 !== undefined) {
    const bytes = bytesOf(float16), values = new Float32Array(bytes.length / 2);
    for (let i = 0; i < values.length; i++) values[i] = HALF[bytes[2 * i] | (bytes[2 * i + 1] << 8)];
    return values;
  }
  const stream = new Blob([/** @type {BlobPart} */ (bytesOf(deflated ?? ""))]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer()), count = bytes.length / 2, values = new Float32Array(count);
  for (let i = 0; i < count; i++) values[i] = HALF[bytes[i] | (bytes[count + i] << 8)];
  return values;
}

/** Rows of `width` sum to 1 again: what rounding lost would else add up over layers. */
function renormalised(values, width) {
  for (let start = 0; start < values.length; start += width) {
    let sum = 0;
    for (let i = start; i < start + width; i++) sum += values[i];
    if (sum > 0) for (let i = start; i < start + width; i++) values[i] /= sum;
  }
  return values;
}

/** @param {Rows} packed */
async function unpackRows({ positions, values }) {
  return { values: await unpack(values), width: values.shape[2], places: new Map(positions.map((position, place) => [position, place])) };
}

const { size, depth, tokens, names, limits } = data;
const isGeneration = data.kind === "generation";
const keys = isGeneration ? /** @type {number} */ (data.prompt) : size; // the tokens that get a number
const removed = new Set(data.removed); // positions that were taken out of the graph
const asides = new Set(data.asides);
const sinks = new Map(data.sinks);

/** What methods ran on: weights [layer, query, key], into which the residual is mixed, or edges that hold it inside; and bands of layers. */
const graphs = await Promise.all((data.graphs ?? []).map(async ({ edges, residual, weights, tops, bands }, number) => {
  const isInside = residual === null;
  const whole = weights ? await unpack(weights) : null;
  return {
    edges, number, isInside, residual: residual ?? 0,
    weights: whole && !isInside ? renormalised(whole, size) : whole,
    tops: tops ?? null, bands: bands ? await unpack(bands) : null,
  };
}));
data.graphs = undefined;

const infos = new Map(await Promise.all(data.methods.map(async (each) => {
  const { rows, tiles, grouped, others } = each, unpackAll = async (packed) => Object.fromEntries(await Promise.all(Object.entries(packed ?? {}).map(async ([unit, values]) => [unit, await unpack(values)])));
  return /** @type {[string, any]} */ ([each.name, {
    ...each,
    rows: rows ? await unpackRows(rows) : null,
    others: others ? { without: await unpackAll(others.without), with: await unpackAll(others.with) } : null,
    tiles: tiles ? { starts: tiles.starts, values: await unpack(tiles.values) } : null,
    grouped: { word: grouped?.word ? await unpackRows(grouped.word) : null, sentence: grouped?.sentence ? await unpackRows(grouped.sentence) : null },
  }]);
})));
const importance = new Map(data.importance.map((each) => [each.name, each]));
const heads = data.heads ? data.heads.shape[1] : 0;
const headWeights = data.heads ? renormalised(await unpack(data.heads), size) : null; // [layer, head, query, key]
data.heads = undefined;
const graphOf = (method) => graphs[infos.get(method)?.graph ?? -1];
