"use strict";
(() => {
// ---- the data ------------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
byId("data").remove(); // many megabytes that nobody reads again

/** The value of each of the 65,536 float16 numbers, by its bits. */
const HALF = Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31, fraction = bits & 1023, sign = bits >> 15 ? -1 : 1;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 25) * (1024 + fraction) : 2 ** -24 * fraction);
});

/** @returns {Float32Array} the numbers of base64 of float16, little endian */
function unpack({ float16 }) {
  const bytes = atob(float16), values = new Float32Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) values[i] = HALF[bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8)];
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

const { size, depth, tokens } = data;
const removed = new Set(data.removed); // positions that the graph was made without
const isGeneration = data.kind === "generation";
const keys = isGeneration ? data.prompt : size; // the tokens that get a number
/** What methods ran on: weights [layer, query, key], into which the residual is mixed, or edges that hold it inside: shares are drawn. */
const graphs = (data.graphs ?? []).map(({ edges, residual, weights }, number) => ({
  edges, number, residual: residual ?? 0, isInside: residual === null,
  weights: residual === null ? unpack(weights) : renormalised(unpack(weights), size),
}));
let graph = graphs[0]; // the one that is looked at
let headWeights = null; // [layer, head, query, key], unpacked when asked for
const heads = data.heads ? data.heads.shape[1] : 0;
const infos = new Map(data.methods.map((each) => [each.name, each])); // what is known of each method
for (const each of data.methods) if (each.rows) { // computed already
  const { values, positions } = each.rows;
  each.rows = { values: unpack(values), width: values.shape[2], places: new Map(positions.map((p, i) => [p, i])) };
}
data.graphs = null;
/** From here on, the graph that a method ran on is looked at. */
function lookAt(method) { graph = graphs[infos.get(method)?.graph ?? 0]; }

const MANY = 64; // tokens above which tables are cut and flow is given for one position
const TABLE_ROWS = 50;
const NORMALISED = {
  sum: "Rows of token attention sum to 1.",
  receptive_field: "Token attention is relative to what attention without preference would give (receptive field); lines in the graph are plain rollout.",
  none: "Token attention is not normalised: flow is the maximum flow itself.",
};
const isRaw = (method) => method === "raw"; // looks one layer down, and at one head if asked
const importance = new Map(data.importance.map((each) => [each.name, each]));
const methods = [...infos.keys(), ...importance.keys()];
const SIDE = { title: "Side by side", meaning: "Every method at this position, each coloured from 0 to its own largest number." };
const about = (method) => (method === "all" ? SIDE : infos.get(method) ?? importance.get(method));
const label = (method) => about(method).title;
const allFinite = (row) => Array.prototype.every.call(row, Number.isFinite);
/** What is known of the row of a method at a node: [layer][place] of a list that it may have. */
const fact = (method, list, { layer, position }) => infos.get(method)?.[list]?.[layer - 1]?.[infos.get(method).rows.places.get(position)];
/** Whether a method at a node hardly differs between tokens, so that colours would show what is not there. */
const isEven = (method, node) => node.layer > 1 && Boolean(fact(method, "even", node));

// ---- token attention: pure functions of the data ---------------------------------------------------------------------

const TINY = 1e-8;

/** How much sits at each position, one layer further down. */
function stepDown(mass, layer) {
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
function stepEvenly(mass, layer) {
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
function masses(layer, position, step = stepDown) {
  const found = [];
  found[layer] = new Float64Array(size);
  found[layer][position] = 1;
  for (let l = layer; l > 0; l--) found[l - 1] = step(found[l], l);
  return found;
}
const massesOn = remembered(60, (number, layer, position) => masses(layer, position));
const massesOf = (layer, position) => massesOn(graph.number, layer, position);

function rollout(layer, position) {
  const row = massesOf(layer, position)[0];
  if (data.normalize !== "receptive_field") return row;
  const field = masses(layer, position, stepEvenly)[0];
  const relative = row.map((value, key) => (field[key] > 1e-12 ? value / field[key] : 0));
  return renormalised(relative, size);
}

/** One row of the model's weights: fused, or of one head. */
function rawRow(layer, position, head) {
  if (head === null) return graph.weights.subarray(((layer - 1) * size + position) * size).subarray(0, size);
  headWeights ??= renormalised(unpack(data.heads), size);
  return headWeights.subarray((((layer - 1) * heads + head) * size + position) * size).subarray(0, size);
}

/** @returns {ArrayLike<number>|null} one number a key; null where there is none */
const rowOf = remembered(400, (...node) => {
  const row = numbersOf(...node);
  return row && allFinite(row) ? row : null;
});

function numbersOf(method, layer, position, head) {
  if (importance.has(method)) return importance.get(method).values;
  const { rows, computed } = infos.get(method), place = rows?.places.get(position);
  if (place !== undefined && head === null) {
    const start = ((layer - 1) * rows.places.size + place) * rows.width;
    return rows.values.subarray(start, start + rows.width);
  }
  if (!graph || removed.has(position)) return null;
  lookAt(method);
  if (computed === "rollout") return rollout(layer, position).subarray(0, keys);
  return computed === "raw" || (isRaw(method) && head !== null) ? rawRow(layer, position, head).subarray(0, keys) : null;
}

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

/** The places of the k largest numbers, largest first, whatever their sign; of those that pass. */
function largest(values, k, passes = () => true) {
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

/** The strongest edges [layer, query, key, weight] by which what starts at a node comes down to `bottom`. */
function pathsOf(mass, layer, bottom, widest) {
  const edges = [];
  for (let l = layer; l > bottom; l--) {
    for (const query of largest(mass[l], widest)) {
      const row = edgeRow(l, query);
      for (const key of largest(row, widest)) edges.push([l, query, key, mass[l][query] * row[key]]);
    }
  }
  return edges.filter((edge) => edge[3] >= 0.004).sort((a, b) => b[3] - a[3]).slice(0, 500).reverse();
}

/** One row of the graph: the weights with the residual; for raw attention the weights alone. */
function edgeRow(layer, query) {
  const row = rawRow(layer, query, headShown()).slice();
  if (isRaw(state.method)) return row;
  for (let key = 0; key < size; key++) row[key] *= 1 - graph.residual;
  row[query] += graph.residual;
  return row;
}

/** Of every node the strongest edge to another position, and of those the strongest: what the graph looks like at rest. */
const restingOn = remembered(4, (number, count) => {
  const edges = [];
  for (let layer = 1; layer <= depth; layer++) {
    for (let query = 0; query < size; query++) {
      const row = ((layer - 1) * size + query) * size;
      let best = -1, most = 0.02;
      for (let key = 0; key < size; key++) if (key !== query && graph.weights[row + key] > most) most = graph.weights[row + (best = key)];
      if (best >= 0) edges.push([layer, query, best, most]);
    }
  }
  return edges.sort((a, b) => b[3] - a[3]).slice(0, count);
});

// ---- words and colours -----------------------------------------------------------------------------------------------

/** At most so many characters of a text. */
function shortened(text, most) {
  const characters = Array.from(text.slice(0, 4 * most));
  return characters.length > most ? characters.slice(0, most - 1).join("") + "…" : characters.join("");
}

const { names } = data; // as a person reads them: what cannot be seen is escaped by Python
const shorts = names.map((name) => shortened(name, 12));
const isolated = (text) => `\u2068${shortened(text, 40)}\u2069`; // right-to-left text moves nothing around it
const quoted = (place) => `“${isolated(names[place])}”`;
const layerName = (layer) => (data.layers ? data.layers[layer - 1] : String(layer));
const layerPhrase = (layer) => (data.layers ? layerName(layer) : `layer ${layer}`);

/** As many digits as the largest number beside it asks for. */
const number = (value, most = 1) => (most !== 0 && (most < 5e-5 || most >= 1e4)
  ? value.toExponential(2)
  : value.toFixed(most >= 0.05 || most === 0 ? 3 : most >= 0.005 ? 4 : most >= 0.0005 ? 5 : 6));
const chance = (probability) => (probability >= 0.9995 && probability < 1 ? "above 0.999" : number(probability));

const RAMPS = data.colours; // orange is against the target: no kind of colour blindness takes it for blue
const INKS = {
  light: { paper: "#ffffff", ink: "#1b2430", muted: "#55606e", faint: "#d9e0e7", accent: "#1c64a8" },
  dark: { paper: "#11161c", ink: "#e4eaf1", muted: "#a3b0be", faint: "#2b3642", accent: "#7db8ea" },
};
const darkMedia = matchMedia("(prefers-color-scheme: dark)");
const theme = () => state.theme ?? (darkMedia.matches ? "dark" : "light");

/** 64 colours of the scale, each with the text colour, black or white, that stands out more. */
const scaleOf = remembered(4, (name) => Array.from({ length: 64 }, (_, i) => {
  const stops = RAMPS[name], at = (i / 63) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
  const part = (stop, place) => parseInt(stops[stop].slice(2 * place + 1, 2 * place + 3), 16);
  const rgb = [0, 1, 2].map((place) => Math.round(part(low, place) + (at - low) * (part(low + 1, place) - part(low, place))));
  const linear = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return { fill: `rgb(${rgb.join()})`, text: (luminance + 0.05) ** 2 > 0.0525 ? "#000" : "#fff" };
}));
const shade = (share) => scaleOf(theme() + (share < 0 ? "Against" : ""))[Math.min(63, Math.round(63 * Math.abs(share)))];

// ---- state -----------------------------------------------------------------------------------------------------------

const state = {
  method: data.first,
  layer: depth, position: data.position, head: null,
  common: true, special: true, // whether such tokens are coloured
  pinned: false, home: null, // where Escape leads back to
  hover: null, // the node under the pointer or the keyboard
  input: null, // the position of the input under the pointer
  cursor: { layer: depth, position: data.position },
  rows: "layers", theme: null,
};
const current = () => ({ layer: state.layer, position: state.position });
const focus = () => (state.pinned ? current() : state.hover ?? current());
const isOff = (key) => (!state.common && data.common[key]) || (!state.special && data.special[key]);
const isOn = (key) => !isOff(key);
const headShown = () => (isRaw(state.method) ? state.head : null); // one head is looked at on its own tab only
const focusRow = (method, node) => rowOf(method, node.layer, node.position, isRaw(method) ? headShown() : null);
const titled = (method) => label(method) + (isRaw(method) && headShown() !== null ? ` (head ${headShown()})` : "");
const mainMethod = () => (state.method !== "all" ? state.method : data.first);

// where CLS or SEP would outshine the words, the page opens without them; a switch shows them
const opening = isGeneration ? null : rowOf(state.method, depth, data.position, null);
if (opening && data.special[largest(opening, 1)[0]] && !data.special.slice(0, keys).every(Boolean)) state.special = false;

/** The largest number of a row, whatever its sign, among the tokens that are on. */
function mostOf(row) {
  let most = 0;
  for (let key = 0; key < row.length; key++) if (isOn(key)) most = Math.max(most, Math.abs(row[key]));
  return most;
}

// ---- tokens as coloured text -------------------------------------------------------------------------------------------

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tokenElement(place) {
  const made = element("span", "token", names[place]);
  made.title = tokens[place];
  return made;
}

let strips = []; // {method, elements}: what is coloured
let chooser = []; // the elements by which a position is chosen
const positionOf = (choice) => (isGeneration ? data.prompt - 1 + choice : choice);

function buildStrips() {
  const side = state.method === "all";
  const range = (from, to) => Array.from({ length: to - from }, (_, i) => tokenElement(from + i));
  const strip = (elements, title) => {
    const box = element("div", elements.length > 150 ? "strip dense" : "strip"), group = element("div");
    if (title) group.append(element("p", "strip-name", title));
    box.append(...elements);
    group.append(box);
    byId("strips").append(group);
    return box;
  };
  byId("strips").replaceChildren();
  strips = (side ? methods : [state.method]).map((method) => {
    const elements = range(0, keys);
    const box = strip(elements, side ? label(method) : isGeneration ? "Prompt" : "");
    return { method, elements, box };
  });
  chooser = isGeneration ? range(data.prompt, tokens.length) : side ? [] : strips[0].elements;
  if (!chooser.length) return;
  const box = isGeneration ? strip(chooser, "Generated: choose a token to see what of the prompt it looked at") : strips[0].box;
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", isGeneration ? "Generated tokens" : "Tokens: choose the position to explain");
  chooser.forEach((each, choice) => {
    each.setAttribute("role", "option");
    each.dataset.choice = choice;
    if (isGeneration) each.title += `  (probability ${number(data.probabilities[choice])})`;
  });
}

function paintStrips(node) {
  for (const { method, elements } of strips) {
    const row = focusRow(method, node), most = row && !isEven(method, node) ? mostOf(row) : 0;
    elements.forEach((each, key) => {
      const colour = most > 0 && isOn(key) ? shade(row[key] / most) : null;
      each.style.background = colour?.fill ?? "";
      each.style.color = colour?.text ?? "";
      each.classList.toggle("off", Boolean(isOff(key)));
    });
  }
}

function paintChoice() {
  const chosen = chooser.findIndex((_, choice) => positionOf(choice) === state.position);
  chooser.forEach((each, choice) => {
    each.setAttribute("aria-selected", choice === chosen);
    each.tabIndex = choice === Math.max(0, chosen) ? 0 : -1;
  });
}

function nodePhrase({ layer, position }) {
  const read = isGeneration && position >= data.prompt - 1 ? `, predicting ${quoted(position + 1)}` : "";
  return `${layerPhrase(layer)}, position ${position} ${quoted(position)}${read}`;
}

function paintTitle(node) {
  const method = mainMethod(), each = importance.get(state.method), row = focusRow(method, node), most = row ? mostOf(row) : 0;
  byId("tokens-title").textContent = each ? label(state.method) : `${titled(state.method)}: ${nodePhrase(node)}`;
  byId("most").textContent = state.method === "all" ? "largest" : number(most, most);
  byId("least").textContent = each?.signed ? number(-most, most) : "0";
  byId("least").parentElement.classList.toggle("signed", Boolean(each?.signed));
  byId("least").parentElement.hidden = isEven(state.method, node);
  const sides = each?.signed ? " Blue tokens speak for it, orange ones against it." : "";
  const watched = each ? ` Watched: ${isolated(each.target)}, probability ${chance(each.probability)}.${sides}` : "";
  byId("meaning").textContent = about(state.method).meaning + watched;
  const note = noteOf(node);
  byId("note").hidden = !note;
  if (byId("note").textContent !== note) byId("note").textContent = note;
}

/** What has to be said about a method at a node. */
function noteOf(node) {
  const { layer, position } = node, shown = state.method === "all" ? methods : [state.method];
  const unsound = shown.find((method) => { const row = numbersOf(method, layer, position, headShown()); return row && !allFinite(row); });
  if (unsound) return `${label(unsound)} cannot be drawn here: some of its numbers are not finite.`;
  if (removed.has(position)) return `Position ${position} ${quoted(position)} was taken out of the graph.`;
  const missing = shown.find((method) => !rowOf(method, layer, position, null));
  if (missing) return isGeneration
    ? `${label(missing)} is given for the positions that predicted a generated token.`
    : `${label(missing)} is given for position ${data.position} ${quoted(data.position)} only${size > MANY ? `: this text has more than ${MANY} tokens` : ""}.`;
  const even = shown.find((method) => isEven(method, node));
  if (even) {
    const spread = fact(even, "spread", node), by = number(spread, spread);
    return `${label(even)} hardly differs between tokens here (spread ${by}, where 0 is even and 1 is all on one token), so it is not coloured: it says nothing. Look at a lower layer or at rollout.`;
  }
  const full = shown.find((method) => fact(method, "saturated", node));
  return full ? `${label(full)} is at the bound that is the same for every source here: it says nothing about this position. Look at a lower layer or at rollout.` : "";
}

// ---- pens: one drawing, on canvas or as SVG -------------------------------------------------------------------------------

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

class CanvasPen {
  constructor(context) { this.context = context; }
  fillWith(colour) { if (this.fill !== colour) this.context.fillStyle = this.fill = colour; } // parsing a colour takes longer than filling
  curve(x1, y1, x2, y2, stroke, width, alpha) {
    const c = this.context, middle = (y1 + y2) / 2;
    c.globalAlpha = alpha; c.strokeStyle = stroke; c.lineWidth = width;
    c.beginPath(); c.moveTo(x1, y1); c.bezierCurveTo(x1, middle, x2, middle, x2, y2); c.stroke();
    c.globalAlpha = 1;
  }
  dot(x, y, radius, fill, stroke = null, width = 1) {
    const c = this.context;
    c.beginPath(); c.arc(x, y, radius, 0, 7); this.fillWith(fill); c.fill();
    if (stroke) { c.strokeStyle = stroke; c.lineWidth = width; c.stroke(); }
  }
  rect(x, y, width, height, fill) { this.fillWith(fill); this.context.fillRect(x, y, width, height); }
  text(x, y, text, fill, anchor = "start", angle = 0, weight = 400) {
    const c = this.context;
    c.save(); c.translate(x, y); c.rotate((angle * Math.PI) / 180);
    c.font = `${weight} 11px ${FONT}`; c.textAlign = { start: "left", middle: "center", end: "right" }[anchor]; c.fillStyle = fill;
    c.direction = "ltr"; c.fillText(text, 0, 0); c.restore();
  }
}

class SvgPen {
  constructor(svg) { this.svg = svg; }
  add(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, typeof value === "number" ? +value.toFixed(2) : value);
    if (text !== undefined) made.textContent = text;
    this.svg.append(made);
  }
  curve(x1, y1, x2, y2, stroke, width, alpha) {
    const middle = (y1 + y2) / 2, points = [x1, y1, x1, middle, x2, middle, x2, y2].map((v) => +v.toFixed(1));
    const d = `M${points[0]} ${points[1]}C${points.slice(2).join(" ")}`;
    this.add("path", { d, fill: "none", stroke, "stroke-width": width, "stroke-opacity": alpha });
  }
  dot(x, y, radius, fill, stroke = "none", width = 1) {
    this.add("circle", { cx: x, cy: y, r: radius, fill, stroke: stroke ?? "none", "stroke-width": width });
  }
  rect(x, y, width, height, fill) { this.add("rect", { x, y, width, height, fill }); }
  text(x, y, text, fill, anchor = "start", angle = 0, weight = 400) {
    const turn = angle ? { transform: `rotate(${angle} ${x.toFixed(1)} ${y.toFixed(1)})` } : {};
    this.add("text", { x, y, fill, "text-anchor": anchor, "font-weight": weight, ...turn }, text);
  }
}

function newSvg({ width, height }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 11 })) svg.setAttribute(name, value);
  return svg;
}

function canvasOf({ width, height, draw }, canvas, scale) {
  const context = canvas.getContext("2d"), across = Math.round(width * scale), down = Math.round(height * scale);
  if (canvas.width !== across || canvas.height !== down) {
    Object.assign(canvas, { width: across, height: down });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(new CanvasPen(context));
  return canvas;
}

// ---- the two drawings ----------------------------------------------------------------------------------------------------

const SVG_EDGES = 2000; // a graph with more edges is drawn on canvas
const [LEFT, ROW_NAME] = data.layers ? [132, 17] : importance.size || isGeneration ? [108, 15] : [76, 9], RIGHT = 28; // pixels, characters, pixels

/** Where columns stand: x of each token, and how its label is written. */
function columnsOf(count, room) {
  const least = count <= 96 ? 15 : 2;
  const step = Math.min(128, Math.max(least, (room - LEFT - RIGHT) / count));
  const longest = Math.max(...shorts.slice(0, count).map((short) => Array.from(short).length)) * 6.4;
  const style = longest < step - 4 ? "flat" : step >= 12 ? "steep" : "few";
  return { step, style, width: Math.ceil(LEFT + step * count + RIGHT), x: (place) => LEFT + step * (place + 0.5), labels: style === "flat" ? 22 : longest * 0.87 + 18 };
}

/** The tokens below their columns; where they would overlap, those of the largest numbers. */
function drawLabels(pen, columns, y, row, marked) {
  const { ink, muted } = INKS[theme()], best = new Set(largest(row ?? [], 4, isOn)), free = [];
  const order = columns.style === "few" ? [...(marked < 0 ? [] : [marked]), ...largest(row ?? [], 60, isOn)] : Array.from({ length: columns.count }, (_, i) => i);
  for (const place of order) {
    const x = columns.x(place);
    if (columns.style === "few" && free.some((other) => Math.abs(other - x) < 13)) continue;
    free.push(x);
    const strong = place === marked || best.has(place), colour = strong ? ink : muted;
    if (columns.style === "flat") pen.text(x, y + 14, shorts[place], colour, "middle", 0, strong ? 600 : 400);
    else pen.text(x + 4, y + 8, shorts[place], colour, "end", -60, strong ? 600 : 400);
    if (columns.style === "few" && free.length >= 40) break;
  }
}

function graphFigure(room, node) {
  const columns = { ...columnsOf(size, room), count: size };
  const gap = columns.gap = Math.max(22, Math.min(56, 420 / depth)), top = 18, bottom = top + gap * depth;
  const y = (layer) => bottom - gap * layer;
  return { columns, gap, top, bottom, y, width: columns.width, height: Math.ceil(bottom + 10 + columns.labels), rest: (pen) => drawResting(pen, columns, y), draw: (pen) => drawLit(pen, columns, y, node) };
}

const isSpacious = (step) => step >= 9; // room for a dot a token
const radiusFor = (step) => Math.max(1.5, Math.min(6, step / 3));

/** The graph at rest, the same for every node. */
function drawResting(pen, { x, step }, y) {
  lookAt(mainMethod());
  const { muted, faint, paper } = INKS[theme()], spacious = isSpacious(step);
  if (!spacious) for (let layer = 0; layer <= depth; layer++) pen.rect(x(0), y(layer) - 0.5, x(size - 1) - x(0), 1, faint);
  for (const [layer, query, key, weight] of restingOn(graph.number, spacious ? 700 : 1500)) {
    pen.curve(x(query), y(layer), x(key), y(layer - 1), muted, 1, spacious ? 0.08 + 0.25 * weight : 0.03 + 0.12 * weight);
  }
  if (spacious) for (let layer = 0; layer <= depth; layer++) for (let p = 0; p < size; p++) pen.dot(x(p), y(layer), radiusFor(step), paper, faint);
}

/** What a node reads, down to the input. */
function drawLit(pen, columns, y, node) {
  lookAt(mainMethod());
  const { ink, muted, accent } = INKS[theme()], { x, step } = columns;
  const oneDown = isRaw(state.method), spacious = isSpacious(step), radius = radiusFor(step), bar = shade(0.6).fill;
  for (let layer = 0; layer <= depth; layer++) {
    const isHere = layer === node.layer, name = layer === 0 ? "input" : shortened(layerPhrase(layer), ROW_NAME);
    pen.text(LEFT - 14, y(layer) + 4, name, isHere ? ink : muted, "end", 0, isHere ? 600 : 400);
  }
  const bottom = oneDown ? node.layer - 1 : 0;
  const mass = oneDown ? rawMasses(node) : massesOf(node.layer, node.position);
  for (const [layer, query, key, weight] of pathsOf(mass, node.layer, bottom, spacious ? 10 : 14)) {
    pen.curve(x(query), y(layer), x(key), y(layer - 1), accent, 0.6 + 7 * Math.sqrt(weight) * (spacious ? 1 : 0.6), 0.25 + 0.6 * Math.sqrt(weight));
  }
  const row = focusRow(mainMethod(), node);
  for (let layer = bottom; layer < node.layer; layer++) {
    const isInput = layer === 0 && !oneDown, values = isInput ? row ?? [] : mass[layer], most = isInput ? mostOf(values) : Math.max(...values);
    if (!(most > 0)) continue;
    for (let p = 0; p < values.length; p++) {
      const share = values[p] / most, high = Math.sqrt(Math.abs(share)) * 0.7 * columns.gap;
      if (high < 0.75 || (isInput && isOff(p))) continue;
      if (!spacious) pen.rect(x(p) - step / 2, y(layer) - high, Math.max(1, step), high, bar); // too many for dots
      else if (Math.abs(share) >= 0.04) pen.dot(x(p), y(layer), radius, shade(share).fill, accent, 0.75);
    }
  }
  pen.dot(x(node.position), y(node.layer), Math.max(5, radius), accent, ink, state.pinned ? 2.5 : 1);
  drawLabels(pen, columns, y(0) + 8, row, node.position);
}

/** Raw attention looks one layer down: what sits there. */
function rawMasses({ layer, position }) {
  const found = [];
  found[layer] = new Float64Array(size);
  found[layer][position] = 1;
  found[layer - 1] = rawRow(layer, position, state.head);
  return found;
}

/** The rows of the heat map, topmost first: [{name, values, layer?, position?}]. */
function mapRows() {
  const head = headShown();
  if (state.method === "all") return methods.map((method) => ({ name: label(method), method, values: focusRow(method, current()) }));
  if (importance.has(state.method)) return [...importance.keys()].map((method) => ({ name: label(method), values: rowOf(method, 1, 0, null) }));
  if (isGeneration && state.rows === "generated") {
    return Array.from({ length: tokens.length - keys }, (_, i) => ({ name: shorts[keys + i], position: keys - 1 + i, values: rowOf(state.method, state.layer, keys - 1 + i, head) }));
  }
  return Array.from({ length: depth }, (_, i) => depth - i).map((layer) => ({ name: layerPhrase(layer), layer, values: rowOf(state.method, layer, state.position, head) }));
}

function mapFigure(room) {
  const rows = mapRows(), columns = { ...columnsOf(keys, room), count: keys }, high = rows.length > 12 ? 16 : 22, top = 4;
  const height = Math.ceil(top + rows.length * high + columns.labels + 6);
  return { rows, columns, high, top, width: columns.width, height, draw: (pen) => drawMap(pen, rows, columns, high, top) };
}

function drawMap(pen, rows, columns, high, top) {
  const { ink, muted, accent } = INKS[theme()], { x, step } = columns, inset = step >= 9 ? 1 : 0;
  let here = null;
  rows.forEach(({ name, values, layer, position, method = state.method }, index) => {
    const isHere = layer === undefined ? position === state.position : layer === state.layer, y = top + index * high;
    if (isHere) { here = values; pen.rect(LEFT - 10, y + 1, 3, high - 2, accent); }
    pen.text(LEFT - 14, y + high / 2 + 4, shortened(name, ROW_NAME), isHere ? ink : muted, "end", 0, isHere ? 600 : 400);
    const most = values && !isEven(method, { layer: layer ?? state.layer, position: position ?? state.position }) ? mostOf(values) : 0;
    if (most > 0) for (let key = 0; key < keys; key++) {
      if (isOn(key)) pen.rect(x(key) - step / 2, y + inset / 2, step - inset, high - inset, shade(values[key] / most).fill);
    }
  });
  drawLabels(pen, columns, top + rows.length * high, here ?? rows[0]?.values, -1);
}

// ---- figures on the page ---------------------------------------------------------------------------------------------------

const drawn = { graph: null, map: null }; // geometry of what is on the page
const room = (name) => byId(name).clientWidth;

function paintGraph(node) {
  if (!graph) return;
  const figure = (drawn.graph = graphFigure(room("graph"), node)), stage = byId("graph").firstElementChild;
  if (depth * size * size <= SVG_EDGES) {
    const svg = newSvg(figure);
    svg.setAttribute("aria-hidden", "true");
    const pen = new SvgPen(svg);
    figure.rest(pen);
    figure.draw(pen);
    stage.querySelector("svg")?.remove();
    stage.prepend(svg);
  } else {
    if (!stage.querySelector("canvas")) stage.prepend(canvasElement(), canvasElement());
    const [below, above] = stage.querySelectorAll("canvas"), scale = devicePixelRatio || 1, look = [figure.width, figure.height, scale, theme(), infos.get(mainMethod())?.graph ?? 0].join();
    if (below.dataset.look !== look) canvasOf({ ...figure, draw: figure.rest }, below, scale); // thousands of lines, drawn once
    below.dataset.look = look;
    canvasOf(figure, above, scale);
  }
  placeCursor();
}

/** A canvas that screen readers pass over: the tables say it. */
function canvasElement() {
  const canvas = element("canvas");
  canvas.setAttribute("aria-hidden", "true");
  return canvas;
}

function paintMap() {
  const figure = (drawn.map = mapFigure(room("map"))), stage = byId("map").firstElementChild;
  canvasOf(figure, stage.querySelector("canvas") ?? stage.appendChild(canvasElement()), devicePixelRatio || 1);
  const attention = !importance.has(state.method) && state.method !== "all", byToken = isGeneration && state.rows === "generated";
  const over = attention ? (byToken ? `generated tokens, ${layerPhrase(state.layer)}` : `all layers, position ${state.position} ${quoted(state.position)}`) : "methods";
  byId("map-title").textContent = `Heat map: ${attention ? titled(state.method).toLowerCase() + ", " : ""}${over}`;
  byId("map-caption").textContent = "Each row is coloured from 0 to its own largest number." + (attention ? " A click on a row goes there." : "");
}

function placeCursor() {
  const { layer, position } = state.cursor, button = byId("cursor");
  button.style.left = `${drawn.graph.columns.x(position)}px`;
  button.style.top = `${drawn.graph.y(layer)}px`;
  button.setAttribute("aria-pressed", state.pinned && layer === state.layer && position === state.position);
  button.setAttribute("aria-label", sentence(state.cursor));
}

/** "layer 4, key: 0.312 the, 0.201 to, ..." */
function sentence(node) {
  const method = mainMethod();
  if (node.layer === 0) {
    const row = focusRow(method, focus());
    return `input, ${isolated(names[node.position])}` + (row && node.position < keys ? `: ${number(row[node.position])} at ${nodePhrase(focus())}` : "");
  }
  const row = focusRow(method, node);
  const best = row ? largest(row, 5, isOn).map((key) => `${number(row[key], row[key])} ${isolated(names[key])}`).join(", ") : "no numbers";
  return `${layerPhrase(node.layer)}, ${isolated(names[node.position])}: ${best}`;
}

function paintNumbers(node) {
  const row = focusRow(mainMethod(), node), best = row ? largest(row, 10, isOn) : [], most = best.length ? Math.abs(row[best[0]]) : 0;
  byId("numbers-title").textContent = importance.has(state.method) ? label(state.method) : `${titled(mainMethod())}, ${nodePhrase(node)}`;
  byId("numbers-list").replaceChildren(...best.map((key) => {
    const item = element("li", row[key] < 0 ? "against" : ""), name = element("span", "name", names[key]);
    name.title = tokens[key];
    item.style.setProperty("--share", `${(100 * Math.abs(row[key])) / most}%`);
    item.append(name, element("span", "value", number(row[key], most)));
    return item;
  }));
  byId("numbers-hint").textContent = state.input !== null ? sentence({ layer: 0, position: state.input }) : state.pinned ? "Pinned. Escape, or a click on it, lets it go." : "A click pins a node.";
}

// ---- tables ---------------------------------------------------------------------------------------------------------------

/** columns: [{name, values}], of which the numbers at `places` are shown. */
function fillTable(id, caption, columns, places) {
  const digits = columns.map(({ values }) => (values ? Math.max(...places.map((place) => Math.abs(values[place]))) : 1));
  const top = element("tr"), body = element("tbody"), thead = element("thead");
  ["position", "token", ...columns.map((each) => each.name)].forEach((name) => { const cell = element("th", "", name); cell.scope = "col"; top.append(cell); });
  thead.append(top);
  for (const place of places) {
    const line = element("tr"), name = element("th", "name", names[place]);
    name.scope = "row";
    name.title = tokens[place];
    const cells = columns.map(({ values }, i) => element("td", "", values ? number(values[place], digits[i]) : "–"));
    line.append(element("td", "", String(place)), name, ...cells);
    body.append(line);
  }
  byId(id).replaceChildren(element("caption", "", caption), thead, body);
}

function paintTables() {
  if (!byId("tables").open) return;
  const row = focusRow(mainMethod(), current()), all = Array.from({ length: keys }, (_, i) => i).filter(isOn);
  const places = keys <= MANY ? all : row ? largest(row, TABLE_ROWS, isOn) : all.slice(0, TABLE_ROWS);
  byId("tables-caption").textContent = places.length < all.length ? `The ${places.length} largest of ${all.length} tokens, by ${label(mainMethod()).toLowerCase()}.` : "";
  const columns = methods.map((method) => ({ name: titled(method), values: focusRow(method, current()) }));
  fillTable("methods-table", `All methods: ${nodePhrase(current())}`, columns, places);
  byId("map-table").parentElement.hidden = state.method === "all"; // it would be the same again
  fillTable("map-table", byId("map-title").textContent, mapRows(), places);
}

// ---- painting -------------------------------------------------------------------------------------------------------------

/** What follows the pointer. */
function paintFocus() {
  const node = focus();
  paintStrips(node);
  paintTitle(node);
  paintNumbers(node);
  paintGraph(node);
  Object.assign(document.body.dataset, { focus: `${node.layer},${node.position}` });
}

/** The scales of the legend: the colours of the tokens. */
function paintLegend() {
  const up = RAMPS[theme()], against = [...RAMPS[theme() + "Against"]].reverse();
  const scale = (name, colours) => document.documentElement.style.setProperty(name, `linear-gradient(90deg, ${colours.join()})`);
  scale("--ramp", up);
  scale("--ramp-signed", [...against, ...up]);
}

/** Everything. */
function paint() {
  paintChoice();
  paintFocus();
  paintMap();
  paintTables();
  byId("layer").value = state.layer;
  byId("layer-name").textContent = layerName(state.layer);
  byId("layer").setAttribute("aria-valuetext", layerPhrase(state.layer));
  byId("layer").disabled = importance.has(state.method);
  byId("position").value = state.position;
  byId("head-field").hidden = !heads || !isRaw(state.method);
  byId("rows-field").hidden = !isGeneration || state.method === "all";
  byId("graph-caption").textContent = isRaw(state.method)
    ? "Lines: the weights by which the node reads the layer below. Hover a node for its numbers; a click pins it; arrow keys move."
    : `Lines: how much of the node's rollout takes each edge${infos.get(state.method)?.computed || !infos.has(state.method) ? "" : `; the input shows its ${label(state.method).toLowerCase()}`}. Hover a node for its numbers; a click pins it; arrow keys move.`;
  for (const tab of byId("tabs").children) {
    const chosen = tab.dataset.method === state.method;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen) byId("panel").setAttribute("aria-labelledby", tab.id);
  }
  const { method, layer, position, head, pinned, common, special } = state;
  Object.assign(document.body.dataset, { method, layer, position, head: head ?? "mean", pinned, common, special, theme: theme() });
  paintLegend();
  byId("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`);
}

let asked = false;
function paintSoon() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; paintFocus(); });
}

const announce = (text) => { byId("live").textContent = text; };

// ---- what the reader does ------------------------------------------------------------------------------------------------

function choose(changes) {
  const rebuild = "method" in changes && changes.method !== state.method;
  Object.assign(state, changes);
  if ("layer" in changes || "position" in changes) state.cursor = current();
  if (rebuild) buildStrips();
  paint();
  if ("position" in changes) showNode();
}

/** Scroll the graph so that the explained node is in it. */
function showNode() {
  if (!graph) return;
  const box = byId("graph"), x = drawn.graph.columns.x(state.position);
  if (x < box.scrollLeft + LEFT || x > box.scrollLeft + box.clientWidth - RIGHT) box.scrollLeft = x - box.clientWidth / 2;
}

function pin(node) {
  if (node.layer === 0) return;
  if (state.pinned && node.layer === state.layer && node.position === state.position) return unpin();
  const home = state.pinned ? state.home : current();
  choose({ ...node, pinned: true, home, hover: null });
  announce(`Pinned ${sentence(node)}`);
}

function unpin() {
  if (!state.pinned) return;
  choose({ ...state.home, pinned: false, home: null });
  announce("Let go");
}

function moveCursor(layers, positions) {
  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
  state.cursor = { layer: clamp(state.cursor.layer + layers, 0, depth), position: clamp(state.cursor.position + positions, 0, size - 1) };
  state.hover = state.cursor.layer > 0 ? state.cursor : null;
  paintFocus();
  byId("cursor").scrollIntoView({ block: "nearest", inline: "nearest" });
  announce(sentence(state.cursor));
}

/** The node nearest to the pointer, or null. */
function nodeAt(event) {
  const box = byId("graph").firstElementChild.getBoundingClientRect(), { columns, gap, bottom } = drawn.graph;
  const layer = Math.round((bottom - (event.clientY - box.top)) / gap), position = Math.round((event.clientX - box.left - LEFT) / columns.step - 0.5);
  return layer >= 0 && layer <= depth && position >= 0 && position < size ? { layer, position } : null;
}

function listenToGraph() {
  const box = byId("graph"), cursor = byId("cursor");
  box.addEventListener("pointermove", (event) => {
    if (event.pointerType === "touch") return;
    const node = nodeAt(event), hover = node?.layer > 0 ? node : null, input = node?.layer === 0 ? node.position : null;
    if (input === state.input && hover?.layer === state.hover?.layer && hover?.position === state.hover?.position) return;
    Object.assign(state, { hover, input });
    paintSoon();
  });
  box.addEventListener("pointerleave", () => { state.hover = state.input = null; paintSoon(); });
  box.addEventListener("click", (event) => {
    const node = event.target === cursor ? state.cursor : nodeAt(event);
    if (node) pin(node);
  });
  cursor.addEventListener("focus", () => { if (state.cursor.layer > 0) { state.hover = state.cursor; paintSoon(); } });
  cursor.addEventListener("blur", () => { state.hover = null; paintSoon(); });
  cursor.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -size], End: [0, size], PageUp: [depth, 0], PageDown: [-depth, 0] };
    if (!moves[event.key] || event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own keys stay its own
    event.preventDefault();
    moveCursor(...moves[event.key]);
  });
}

function listenToMap() {
  const stage = byId("map").firstElementChild;
  const cellAt = (event) => {
    const box = stage.getBoundingClientRect(), { columns, high, top, rows } = drawn.map;
    const row = rows[Math.floor((event.clientY - box.top - top) / high)], key = Math.floor((event.clientX - box.left - LEFT) / columns.step);
    return { row, key: key >= 0 && key < keys ? key : null };
  };
  stage.addEventListener("pointermove", (event) => {
    const { row, key } = cellAt(event);
    byId("cell").textContent = row?.values && key !== null ? `${row.name}, ${key} ${quoted(key)}: ${number(row.values[key], row.values[key])}` : "";
  });
  stage.addEventListener("click", (event) => {
    const { row } = cellAt(event);
    if (row?.layer !== undefined) choose({ layer: row.layer });
    else if (row?.position !== undefined) choose({ position: row.position });
  });
}

/** Arrow keys among the elements of a group, of which one can be reached by Tab. */
function rove(box, items, act) {
  box.addEventListener("keydown", (event) => {
    const all = items(), at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (at < 0 || to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const target = all[Math.max(0, Math.min(all.length - 1, to))];
    all.forEach((each) => { each.tabIndex = each === target ? 0 : -1; });
    target.focus();
    act?.(target);
  });
}

function listenToTokens() {
  const box = byId("strips");
  const pick = (target) => {
    const choice = target.closest("[data-choice]")?.dataset.choice;
    if (choice === undefined) return;
    choose({ position: positionOf(Number(choice)) });
    announce(sentence(current()));
  };
  box.addEventListener("click", (event) => pick(event.target));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(event.target);
  });
  rove(box, () => chooser);
}

function listenToControls() {
  const on = (id, event, act) => byId(id).addEventListener(event, (e) => act(e.target));
  on("layer", "input", (input) => choose({ layer: Number(input.value) }));
  on("position", "change", (select) => choose({ position: Number(select.value) }));
  on("head", "change", (select) => choose({ head: select.value === "mean" ? null : Number(select.value) }));
  on("common", "change", (box) => choose({ common: box.checked }));
  on("special", "change", (box) => choose({ special: box.checked }));
  on("rows", "change", (select) => choose({ rows: select.value }));
  on("theme", "click", () => {
    state.theme = document.documentElement.dataset.theme = theme() === "dark" ? "light" : "dark";
    paint();
  });
  byId("tabs").addEventListener("click", (event) => { if (event.target.dataset.method) choose({ method: event.target.dataset.method }); });
  rove(byId("tabs"), () => [...byId("tabs").children], (tab) => choose({ method: tab.dataset.method }));
  byId("tables").addEventListener("toggle", paintTables);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") unpin(); });
  darkMedia.addEventListener("change", paint);
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; paint(); } });
  for (const buttons of document.querySelectorAll(".saves")) {
    buttons.addEventListener("click", (event) => { if (event.target.dataset.save) save(buttons.dataset.figure, event.target.dataset.save); });
  }
}

// ---- saving -----------------------------------------------------------------------------------------------------------------

function save(name, kind) {
  const figure = name === "graph" ? graphFigure(room(name), focus()) : mapFigure(room(name)), { paper } = INKS[theme()];
  const whole = { ...figure, draw: (pen) => { pen.rect(0, 0, figure.width, figure.height, paper); figure.rest?.(pen); figure.draw(pen); } };
  const file = `attnflow-${name}-${state.method.replace(/[^\w-]+/g, "-")}.${kind}`;
  if (kind === "png") return canvasOf(whole, element("canvas"), 2).toBlob((blob) => download(blob, file), "image/png");
  const svg = newSvg(whole), pen = new SvgPen(svg);
  pen.add("title", {}, byId(name === "graph" ? "tokens-title" : "map-title").textContent);
  whole.draw(pen);
  download(new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" }), file);
}

function download(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// ---- start ------------------------------------------------------------------------------------------------------------------

function option(value, text) {
  const made = element("option", "", text);
  made.value = value;
  return made;
}

function buildHeader() {
  const counts = isGeneration ? `${keys} prompt tokens, ${tokens.length - keys} generated` : `${size} tokens`;
  byId("kicker").textContent = ["attnflow", data.model, counts, `${depth} layers`].filter(Boolean).join(" · ");
  const [name, probability] = data.prediction ?? [isGeneration ? "What each generated token looked at" : "Token attention", null];
  byId("title").textContent = shortened(name, 80) + (probability === null ? "" : " ");
  if (probability !== null) byId("title").append(element("small", "", `with probability ${chance(probability)}`));
  byId("subtitle").textContent = data.text && shortened(data.text, 400);
  document.title = `attnflow: ${shortened(data.text || name, 60)}`;
  const notes = [...data.notes, ...(isGeneration ? [] : [NORMALISED[data.normalize] ?? NORMALISED.none]), ...graphs.map(({ edges, residual, isInside }) => isInside ? `The ${edges} edges hold the residual.` : `Residual of ${edges}: ${residual}.`), `Numbers are right to 0.001; they travel in this file as 16-bit floats.`, data.source];
  byId("notes").replaceChildren(...notes.map((note) => element("li", "", note)));
}

function buildControls() {
  byId("tabs").append(...[...methods, "all"].map((method, place) => {
    const tab = element("button", "", shortened(label(method), 40));
    Object.assign(tab, { type: "button", id: /^\w+$/.test(method) ? `tab-${method}` : `tab-${place}` }); // a name may hold spaces
    tab.dataset.method = method;
    for (const [name, value] of [["role", "tab"], ["aria-controls", "panel"]]) tab.setAttribute(name, value);
    return tab;
  }));
  byId("layer").max = depth;
  byId("position-label").textContent = isGeneration ? "Generated token" : "Position";
  const choices = Array.from({ length: isGeneration ? tokens.length - keys : size }, (_, choice) => choice);
  byId("position").append(...choices.map((choice) => option(positionOf(choice), `${choice}  ${shortened(names[isGeneration ? keys + choice : choice], 24)}`)));
  byId("head").append(option("mean", "mean of all"), ...Array.from({ length: heads }, (_, head) => option(head, String(head))));
  byId("special").checked = state.special;
  byId("special").parentElement.hidden = !data.special.slice(0, keys).some(Boolean);
  byId("graph-section").hidden = !graph;
}

buildHeader();
buildControls();
buildStrips();
listenToControls();
listenToTokens();
listenToMap();
if (graph) listenToGraph();
paint();
showNode();
document.body.dataset.ready = Math.round(performance.now());
})();
