// @ts-check
// ---- the data, as Python wrote it ------------------------------------------------------------------------------------

/**
 * Numbers of 16 bits in base64: as they are, or deflated with all high bytes before all low ones.
 * @typedef {{ shape: number[], float16?: string, deflated?: string }} Packed
 * @typedef {{ positions: number[], values: Packed }} PackedRows  values [layer, query, key]
 * @typedef {{ target: number[], value: number, edges: [number, number, number, number, number][] }} Flow
 *   edges: layer, query, key, amount, 1 if in the cut
 *
 * @typedef {object} Method
 * @property {string} name
 * @property {string} title
 * @property {string} meaning
 * @property {string} method  without its edges
 * @property {string} edges
 * @property {"raw" | "rollout" | null} [computed]  by the page itself
 * @property {number | null} graph  its number
 * @property {PackedRows} [rows]
 * @property {{ without?: Record<string, Packed>, with?: Record<string, Packed> }} [others]  by what is left out and by unit [2, layer, key]:
 *   how many times its even share other rows give a key, on average, and how many rows see it
 * @property {{ starts: number[], values: Packed } | null} [tiles]
 * @property {{ word?: PackedRows, sentence?: PackedRows }} [grouped]  where a word is not the sum of its tokens
 * @property {number[][]} [saturated]
 * @property {Flow[]} [flows]
 * @property {boolean} [sumsToOne]
 *
 * @typedef {{ name: string, title: string, meaning: string, target: string, probability: number, signed: boolean, values: number[], words: number[] | null }} Importance
 * @typedef {{ edges: string, residual: number | null, weights?: Packed, tops?: number[], bands?: Packed }} PackedGraph
 *
 * @typedef {object} PageData
 * @property {"explanation" | "generation"} kind
 * @property {string} text
 * @property {string} model
 * @property {string} summary
 * @property {[string, number] | null} prediction
 * @property {number} position
 * @property {number} [prompt]  tokens of the prompt of a generation
 * @property {number[]} [probabilities]
 * @property {string | null} normalize
 * @property {Method[]} methods
 * @property {string} first
 * @property {[number, number][]} sinks  position, share
 * @property {number[]} asides  positions that shares leave out: sinks, special tokens, the explained one
 * @property {Record<string, number>} agreement  with blank-out
 * @property {Importance[]} importance
 * @property {{ down: number, across: number, patches: number[], source: string | null, width: number, height: number } | null} picture
 * @property {{ target: number } | null} parts
 * @property {string[]} notes
 * @property {string} source
 * @property {PackedGraph[]} [graphs]
 * @property {Packed} [heads]
 * @property {number[]} starts
 * @property {{ word: number[][], sentence: number[][] }} units
 * @property {string[]} [segments]  what the sentences are called: the turns of a chat
 * @property {string[]} tokens
 * @property {string[]} names
 * @property {number[]} special
 * @property {Record<string, string[]>} colours
 * @property {Record<string, number>} limits
 * @property {number[]} removed
 * @property {number} depth
 * @property {number} size
 * @property {boolean} causal
 * @property {(number | null)[]} window
 * @property {string[] | null} layers
 */

/** @param {string} id @returns {any} */
const byId = (id) => document.getElementById(id);
/** @type {PageData} */
const data = JSON.parse(byId("data").textContent);
byId("data").remove(); // many megabytes that nobody reads again

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

/** @param {PackedRows} packed */
async function unpackRows({ positions, values }) {
  return { values: await unpack(values), width: values.shape[2], places: new Map(positions.map((position, place) => [position, place])) };
}

const { size, depth, tokens, names, limits } = data;
const isGeneration = data.kind === "generation";
const keys = isGeneration ? /** @type {number} */ (data.prompt) : size; // the tokens that get a number
const removed = new Set(data.removed); // positions that the graph was made without
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
