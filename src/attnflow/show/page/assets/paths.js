// @ts-check
// ---- paths: only what carries the chosen share -----------------------------------------------------------------------------------

const isFlow = () => Boolean(infos.get(state.method)?.flows) || infos.get(state.method)?.method === "flow";
const isRaw = () => infos.get(state.method)?.computed === "raw" || infos.get(state.method)?.method === "raw";
const targetsOf = (key) => UNITS[state.unit][PLACES[state.unit][key]];
const drawnPaths = /** @type {any} */ ({ figure: null, shown: null });

/** What the paths lead to: the token that is pinned; of flow, the one that is read most if none is. */
function pathTargets(key = state.pin) {
  if (key !== null && PLACES[state.unit][key] >= 0) return targetsOf(key);
  const seen = look();
  const best = isFlow() && seen ? largest(seen.row, 1, (at) => seen.counts[at])[0] : undefined;
  return best === undefined ? null : UNITS[state.unit][best];
}

/** The subgraph that is drawn, or why there is none. */
const pathsTo = remembered(40, (method, layer, position, targets, share) => {
  const places = targets === "" ? null : targets.split("+").map(Number), graph = graphOf(method);
  if (isFlow()) return (places && findFlow(method, layer, position, places, share)) ?? null;
  if (!graph) return null;
  if (isRaw()) {
    const row = rowOf(method, layer, position);
    if (!row) return null;
    const edges = Array.from(row, (weight, key) => [0, position, key, weight, weight]).filter((edge) => edge[3] > 0 && (!places || places.includes(edge[2])));
    return { levels: [{ top: layer, bottom: layer - 1 }], ...carrying(edges, position, 1, places ? 0 : share) };
  }
  return findPaths(graph, layer, position, places, share);
});
const pathsOf = (targets) => (removed.has(state.position) || isImportance() ? null : pathsTo(state.method, state.layer, state.position, targets?.join("+") ?? "", state.share / 100));

function pathsFigure(width) {
  const targets = pathTargets(), shown = pathsOf(targets), levels = shown?.levels ?? [], left = data.layers ? 140 : 92;
  const step = Math.min(110, (width - left - 24) / size), gap = Math.max(15, Math.min(54, 400 / Math.max(1, levels.length)));
  const longest = Math.max(...shorts.slice(0, size).map((short) => Array.from(short).length)) * 6.4, style = longest < step - 4 ? "flat" : step >= 13 ? "steep" : "few";
  const x = (place) => left + step * (place + 0.5), y = (level) => 18 + gap * level;
  const height = Math.ceil(y(levels.length) + (style === "flat" ? 34 : Math.min(longest, 80) * 0.87 + 28));
  return { shown, targets, levels, left, step, gap, x, y, style, width, height, draw: (pen) => drawPaths(pen, { shown, levels, left, step, x, y, style, width }, inks().accent, true) };
}

/** Of every node the strongest edge to another position, and of those the strongest: what a small graph looks like at rest. */
const restingOn = remembered(4, (number) => {
  const graph = graphs[number], edges = [];
  for (let layer = 1; layer <= depth; layer++) for (let query = 0; query < size; query++) {
    const row = weightRow(graph, layer, query);
    let best = -1, most = 0.02;
    for (let key = 0; key < size; key++) if (key !== query && row[key] > most) most = row[(best = key)];
    if (best >= 0) edges.push([layer, query, best, most]);
  }
  return edges.sort((a, b) => b[3] - a[3]).slice(0, 700);
});

function drawPaths(pen, { shown, levels, left, step, x, y, style, width }, colour, withNames) {
  const { ink, muted, faint, paper, cut } = inks(), radius = Math.max(1.5, Math.min(6, step / 3)), graph = graphOf(state.method);
  if (withNames) {
    levels.forEach(({ top, bottom }, at) => pen.text(left - 12, y(at) + 4, fitted(top - bottom > 1 ? `${data.layers ? layerName(top) : `layers ${bottom + 1}–${top}`}` : layerPhrase(top), left - 16), at === 0 ? ink : muted, "end", 0, at === 0 ? 600 : 400));
    const last = levels.length ? levels[levels.length - 1].bottom : 0;
    pen.text(left - 12, y(levels.length) + 4, last === 0 ? "input" : fitted(layerPhrase(last), left - 16), muted, "end");
    for (let at = 0; at <= levels.length; at++) pen.rect(x(0), y(at) - 0.5, x(size - 1) - x(0) + 1, 1, faint, 0.6);
    if (size <= limits.resting && graph?.weights && !graph.bands && levels.length === state.layer) {
      for (const [layer, query, key, weight] of restingOn(graph.number)) if (layer <= state.layer) pen.curve(x(query), y(state.layer - layer), x(key), y(state.layer - layer + 1), muted, 1, 0.06 + 0.2 * weight);
      for (let at = 0; at <= levels.length; at++) for (let p = 0; p < size; p++) pen.dot(x(p), y(at), radius, paper, faint);
    }
  }
  if (!shown) return;
  const most = Math.max(...shown.edges.map((edge) => edge[3]), 1e-9), used = new Map();
  for (const [level, query, key, amount] of shown.edges) {
    const share = Math.sqrt(amount / most);
    pen.curve(x(query), y(level), x(key), y(level + 1), colour, 0.6 + 6 * share, 0.25 + 0.55 * share);
    if (level === levels.length - 1) used.set(key, (used.get(key) ?? 0) + amount);
    pen.dot(x(key), y(level + 1), Math.min(radius, 1 + 4 * share), colour);
  }
  const widest = Math.max(...(shown.cut ?? []).map((edge) => edge[3]), 1e-9);
  for (const [level, query, key, amount] of shown.cut ?? []) {
    const part = amount / widest; // most edges of a cut are thin: the wide ones limit the flow
    if (part >= 0.02) pen.curve(x(query), y(level), x(key), y(level + 1), cut, 0.8 + 2.2 * part, 0.25 + 0.75 * part, "5 3");
  }
  pen.dot(x(state.position), y(0), Math.max(5, radius), colour, ink, 1.5);
  if (!withNames) return;
  const order = style === "few" ? [state.position, ...[...used.keys()].sort((a, b) => used.get(b) - used.get(a))] : Array.from({ length: size }, (_, i) => i), free = [];
  const strongest = new Set([...used.keys()].sort((a, b) => used.get(b) - used.get(a)).slice(0, 10));
  for (const place of order) {
    if (style === "few" && free.some((other) => Math.abs(other - x(place)) < 13)) continue;
    free.push(x(place));
    const isUsed = strongest.has(place), base = y(levels.length) + 8;
    if (style === "flat") pen.text(x(place), base + 14, shorts[place], isUsed ? ink : muted, "middle", 0, isUsed ? 600 : 400);
    else pen.text(x(place) + 4, base + 8, shorts[place], isUsed ? ink : muted, "end", -60, isUsed ? 600 : 400);
  }
}

function paintPaths() {
  const figure = (drawnPaths.figure = pathsFigure(room("paths"))), { shown, targets } = figure;
  byId("paths").parentElement.hidden = !shown;
  byId("share-field").hidden = !shown || isRaw();
  byId("share").value = String(state.share);
  byId("share-name").textContent = `${state.share} %`;
  byId("paths-caption").textContent = pathsCaption(shown, targets);
  byId("edge").textContent = "";
  if (shown) paintOn("paths", figure);
  paintPathsMark();
  paintEdgeTable(shown);
}

function pathsCaption(shown, targets) {
  const name = targets ? `“${isolated(joined(targets))}”` : "", where = targets && state.pin === null ? " (read most; pin another)" : "";
  if (isImportance()) return "Importance has no paths: choose a method.";
  if (!shown && isFlow()) return `The maximum flow ${name ? `to ${name} ` : ""}is not in this page: it has those of the ${limits.flows} tokens, words and sentences that ${homePhrase()} reads most in the top layer; af.max_flow(graph, source=(${state.layer}, ${data.span ? `[${data.span}]` : state.position}), target=(0, ${targets ? `[${targets}]` : "…"})) finds it.`;
  if (!shown) return "The graph of this method is not in this page.";
  if (isRaw()) return "Raw attention reads one layer down; there are no longer paths.";
  const kept = `${shown.edges.length} edges carry ${percent(shown.carried)}`;
  if (isFlow()) return `The maximum flow to ${name}${where} is ${number(shown.value, shown.value)}; ${kept} of it. Dashed: the cut, ${shown.cut.length} edges that limit it.`;
  const wide = shown.isAll ? "" : ` The paths are spread widely: ${limits.edges} edges are drawn at most.`;
  const bands = graphOf(state.method)?.bands ? " Layers are merged into bands." : "";
  const own = infos.get(state.method).method === "rollout" ? "" : " Shares are those of rollout on the same edges.";
  return `${targets ? `Paths to ${name}: ${kept} of what arrives there` : `${kept} of what arrives here`}.${wide}${bands}${own} A click on an edge names its heads.`;
}

/** The paths to the token under the pointer, over the others. */
function paintPathsMark() {
  const figure = drawnPaths.figure, key = state.hover, edges = depth * size * size;
  if (!figure?.shown) return;
  paintOn("paths", { width: figure.width, height: figure.height, draw: (pen) => {
    if (key === null) return;
    const shown = !isRaw() && (isFlow() || (graphOf(state.method)?.bands?.length ?? edges) <= limits.hover) ? pathsOf(pathTargets(key)) : null;
    const at = { ...figure, shown };
    if (shown) drawPaths(pen, at, shade(0.95).fill, false);
    for (const place of targetsOf(key) ?? []) pen.dot(figure.x(place), figure.y(figure.levels.length), 5, shade(0.95).fill, inks().ink);
  } }, 1);
}

/** The heads of an edge, strongest first, where they were kept. */
function headsOf(layer, query, key, count = 4) {
  if (!headWeights) return "";
  const weights = Float32Array.from({ length: heads }, (_, head) => weightRow(null, layer, query, head)[key]);
  return largest(weights, count).map((head) => `head ${head} ${number(weights[head])}`).join(", ");
}

function edgePhrase([level, query, key, amount], levels) {
  const { top, bottom } = levels[level], through = top - bottom > 1 ? `layers ${bottom + 1}–${top}` : layerPhrase(top);
  const named = top - bottom === 1 ? headsOf(top, query, key) : "";
  return `${through}: ${quoted(query)} reads ${quoted(key)}, ${percent(amount)}${named ? ` (${named})` : heads ? "" : "; heads were not kept"}`;
}

function paintEdgeTable(shown) {
  if (!byId("edges").open) return;
  const rows = shown ? [...shown.edges].reverse().slice(0, limits.table) : [];
  byId("edge-list").replaceChildren(...rows.map((edge) => element("li", "", edgePhrase(edge, shown.levels))));
}

function listenToPaths() {
  const stage = byId("paths");
  stage.addEventListener("pointermove", (event) => {
    const { figure } = drawnPaths;
    if (!figure) return;
    const box = stage.getBoundingClientRect(), y = event.clientY - box.top, place = Math.floor((event.clientX - box.left - figure.left) / figure.step);
    hover(y > figure.y(figure.levels.length) - figure.gap / 2 && place >= 0 && place < keys ? place : null);
  });
  stage.addEventListener("pointerleave", () => hover(null));
  stage.addEventListener("click", (event) => {
    const { figure } = drawnPaths, box = stage.getBoundingClientRect(), px = event.clientX - box.left, py = event.clientY - box.top;
    if (state.hover !== null) return pin(state.hover);
    let best = null, least = 8;
    for (const edge of figure.shown.edges) {
      const [level, query, key] = edge, t = (py - figure.y(level)) / figure.gap;
      if (t < 0 || t > 1) continue;
      const bend = 3 * (1 - t) * t * t + t * t * t, away = Math.abs(figure.x(query) + (figure.x(key) - figure.x(query)) * bend - px); // nearly: y is taken as even in t
      if (away <= least) [best, least] = [edge, away];
    }
    byId("edge").textContent = best ? edgePhrase(best, figure.levels) : "";
  });
  byId("share").addEventListener("input", (event) => choose({ share: Number(event.target.value) }));
  byId("edges").addEventListener("toggle", () => paintEdgeTable(drawnPaths.figure?.shown ?? null));
}
