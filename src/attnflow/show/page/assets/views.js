// @ts-check
// ---- layers: the top tokens as lines ---------------------------------------------------------------------------------------------

const DASHES = ["", "6 3", "2 3", "9 3 2 3", "4 2", "1 2", ""];

/** Heights as near as can be to those wanted, at least `gap` apart, none below `last`. */
function spaced(wanted, gap, last) {
  const order = wanted.map((_, at) => at).sort((a, b) => wanted[a] - wanted[b]), found = [...wanted];
  order.forEach((at, place) => { if (place) found[at] = Math.max(found[at], found[order[place - 1]] + gap); });
  for (let place = order.length - 1, most = last; place >= 0; place--) most = (found[order[place]] = Math.min(found[order[place]], most)) - gap;
  return found;
}

function layersFigure(width) {
  const seen = look(), unit = state.unit, best = seen ? largest(rankingOf(seen, againstShown()), limits.lines, (at) => seen.counts[at]) : [];
  const rows = Array.from({ length: depth }, (_, i) => meanRow(state.method, i + 1, explained(), unit)), left = 52, right = 118, top = 10, high = 190;
  const most = Math.max(1e-9, ...best.flatMap((at) => rows.map((row) => (row ? Math.abs(row[at]) : 0))));
  const x = (layer) => left + ((width - left - right) * (layer - 1)) / Math.max(1, depth - 1), y = (value) => top + high * (1 - value / most);
  return { best, rows, width, height: top + high + 30, draw: (pen) => {
    const { ink, muted, faint } = inks(), key = state.hover ?? state.pin, marked = key === null ? -1 : PLACES[unit][key];
    for (const part of [0, 0.5, 1]) { pen.rect(left, y(part * most), width - left - right, 1, faint); pen.text(left - 6, y(part * most) + 4, number(part * most, most), muted, "end"); }
    const every = Math.ceil(depth / 12);
    for (let layer = 1; layer <= depth; layer++) if ((layer - 1) % every === 0 || layer === depth) pen.text(x(layer), top + high + 16, data.layers ? String(layer) : layerName(layer), layer === state.layer ? ink : muted, "middle", 0, layer === state.layer ? 600 : 400);
    pen.rect(x(state.layer) - 0.5, top, 1, high, muted, 0.5);
    const lines = best.map((at, place) => ({ at, place, points: rows.flatMap((row, i) => (row ? [[x(i + 1), y(Math.abs(row[at]))]] : [])) })).filter(({ points }) => points.length);
    const ends = spaced(lines.map(({ points }) => points[points.length - 1][1] + 4), 13, top + high + 4);
    lines.forEach(({ at, place, points }, line) => {
      const colour = lineColour(place), label = ends[line];
      pen.line(points, colour, at === marked ? 4 : 2, DASHES[place]);
      pen.text(width - right + 8, label, fitted(unitName(unit, at), right - 10), at === marked ? ink : muted, "start", 0, at === marked ? 700 : 400);
      pen.line([[points[points.length - 1][0] + 2, points[points.length - 1][1]], [width - right + 6, label - 4]], colour, 1, "1 2");
    });
  } };
}

function paintLayers() {
  byId("layers-section").hidden = isImportance() || depth < 2;
  if (byId("layers-section").hidden) return;
  paintOn("layers", layersFigure(room("layers")));
}

// ---- importance beside the method, as paired bars ---------------------------------------------------------------------------------

function barsFigure(width) {
  const unit = state.unit, method = isImportance() ? data.first : state.method, seen = look(method), watched = isImportance() ? state.method : [...importance.keys()][0];
  const scores = unitRow(watched, 1, 0, unit), chosen = new Set([...(seen ? largest(seen.row, 6, (at) => seen.counts[at]) : []), ...largest(scores, 6, (at) => !seen || seen.counts[at])]);
  const places = [...chosen].sort((a, b) => UNITS[unit][a][0] - UNITS[unit][b][0]), high = 20, middle = 110, half = (width - middle - 96) / 2;
  const most = seen?.most || 1, largestScore = Math.max(1e-12, ...places.map((at) => Math.abs(scores[at])));
  return { width, height: 26 + places.length * high, places, draw: (pen) => {
    const { ink, muted, faint } = inks(), centre = 48 + half, key = state.hover ?? state.pin, marked = key === null ? -1 : PLACES[unit][key];
    pen.text(centre, 14, fitted(label(method), half), muted, "end", 0, 600);
    pen.text(centre + middle, 14, fitted(label(watched), half), muted, "start", 0, 600);
    places.forEach((at, row) => {
      const y = 22 + row * high, share = seen ? Math.abs(seen.row[at]) / most : 0, score = scores[at] / largestScore;
      if (at === marked) pen.rect(0, y, width, high, faint);
      pen.rect(centre - half * share, y + 3, half * share, high - 6, shade(0.62).fill);
      pen.text(centre - half * share - 4, y + 14, seen ? number(seen.row[at], most) : "–", muted, "end");
      pen.text(centre + middle / 2, y + 14, fitted(unitName(unit, at), middle - 8), ink, "middle", 0, at === marked ? 700 : 400);
      pen.rect(centre + middle, y + 3, half * Math.abs(score), high - 6, shade(score < 0 ? -0.55 : 0.62).fill);
      pen.text(centre + middle + half * Math.abs(score) + 4, y + 14, number(scores[at], largestScore), muted);
    });
  } };
}

function paintBars() {
  const has = importance.size > 0 && unitRow([...importance.keys()][0], 1, 0, state.unit) && [...importance.values()].every((each) => each.values.every(Number.isFinite));
  byId("bars-section").hidden = !has;
  if (has) paintOn("bars", barsFigure(room("bars")));
}

// ---- heads as thumbnails -----------------------------------------------------------------------------------------------------------

const THUMB = 44;

function buildHeads() {
  byId("heads-hint").textContent = heads
    ? `${depth} layers by ${heads} heads; a click opens a head's matrix, rows are positions, columns what they read.`
    : isGeneration ? "A generation keeps the mean of its heads." : 'Heads were fused while capturing: af.explain(text, heads=None), or attnflow explain --heads, keeps every head for this view.';
  byId("heads-grid").hidden = !heads;
  if (!heads) return;
  byId("heads-grid").style.gridTemplateColumns = `auto repeat(${heads}, ${THUMB}px)`;
  for (let layer = depth; layer >= 1; layer--) {
    byId("heads-grid").append(element("span", "head-layer", String(layer)));
    for (let head = 0; head < heads; head++) {
      const made = button("", () => { state.head = [layer, head]; paintHead(); }, "thumb"), canvas = element("canvas");
      made.setAttribute("aria-label", `layer ${layer}, head ${head}`);
      made.append(canvas);
      byId("heads-grid").append(made);
    }
  }
}

/** A head's weights, pooled to at most a number of pixels a side; sinks are left out of the scale. */
function headPixels(canvas, layer, head, pixels) {
  const side = Math.min(size, pixels), context = canvas.getContext("2d"), values = new Float64Array(side * side);
  Object.assign(canvas, { width: side, height: side });
  let most = 0;
  for (let query = 0; query < size; query++) {
    const row = weightRow(null, layer, query, head), y = Math.floor((query * side) / size);
    for (let key = 0; key < size; key++) { const at = y * side + Math.floor((key * side) / size); values[at] = Math.max(values[at], row[key]); if (!isAside(key)) most = Math.max(most, row[key]); }
  }
  const image = context.createImageData(side, side);
  values.forEach((value, at) => { const colour = shade(Math.min(1, most > 0 ? value / most : 0)).fill; for (let part = 0; part < 3; part++) image.data[4 * at + part] = parseInt(colour.slice(1 + 2 * part, 3 + 2 * part), 16); image.data[4 * at + 3] = 255; });
  context.putImageData(image, 0, 0);
}

const headsPainted = { theme: "" };
function paintHeads() {
  if (!heads || !byId("heads-section").open) return;
  if (headsPainted.theme !== theme()) [...byId("heads-grid").querySelectorAll(".thumb")].forEach((thumb, at) => headPixels(thumb.firstElementChild, depth - Math.floor(at / heads), at % heads, THUMB));
  headsPainted.theme = theme();
  paintHead();
}

function paintHead() {
  byId("head-box").hidden = !state.head;
  if (!state.head) return;
  const [layer, head] = state.head;
  byId("head-title").textContent = `Layer ${layer}, head ${head}`;
  headPixels(byId("head"), layer, head, 360);
}

function headCell(event) {
  const box = byId("head").getBoundingClientRect(), at = (value, start, whole) => Math.max(0, Math.min(size - 1, Math.floor(((value - start) / whole) * size)));
  const query = at(event.clientY, box.top, box.height), key = at(event.clientX, box.left, box.width), [layer, head] = /** @type {[number, number]} */ (state.head);
  byId("head-cell").textContent = `${query} ${quoted(query)} reads ${key} ${quoted(key)}: ${number(weightRow(null, layer, query, head)[key])}`;
  hover(key < keys ? key : null);
}

// ---- the picture of a vision model: one hue, whose opacity is the value -----------------------------------------------------------

const picture = new Image();
function pictureFigure(width) {
  const { down, across, patches, source, width: wide, height: tall } = /** @type {PagePicture} */ (data.picture), scale = Math.min(width, 520) / Math.max(wide, tall), w = wide * scale, h = tall * scale;
  return { width: Math.ceil(w), height: Math.ceil(h), draw: (pen) => {
    const seen = look(state.method, { unit: "token" }), { faint, ink } = inks(), against = againstShown();
    if (source) pen.image(picture, 0, 0, w, h); else pen.rect(0, 0, w, h, faint);
    const focus = state.hover ?? state.pin;
    patches.forEach((key, at) => {
      const x = ((at % across) * w) / across, y = (Math.floor(at / across) * h) / down, tone = seen ? toneOf(seen, key, against) : null;
      pen.line([[x, y + h / down], [x, y], [x + w / across, y]], faint, 0.5);
      if (tone !== null) pen.rect(x, y, w / across + 0.3, h / down + 0.3, tone < 0 ? "#f16913" : "#08519c", 0.85 * Math.abs(tone));
      if (key === focus) pen.line([[x, y], [x + w / across, y], [x + w / across, y + h / down], [x, y + h / down], [x, y]], ink, 2);
    });
  } };
}

function paintPicture() {
  byId("picture-box").hidden = !data.picture;
  if (data.picture) paintOn("picture", pictureFigure(room("picture")));
}

function patchAt(event) {
  const box = byId("picture").querySelector("canvas").getBoundingClientRect(), { down, across, patches } = /** @type {PagePicture} */ (data.picture);
  const column = Math.floor(((event.clientX - box.left) / box.width) * across), row = Math.floor(((event.clientY - box.top) / box.height) * down);
  return row >= 0 && row < down && column >= 0 && column < across ? patches[row * across + column] : null;
}

// ---- numbers: a table that can be sorted and copied -------------------------------------------------------------------------------

const table = { column: "", isUp: true, all: false };

/** {title, values} of each column; the first two are position and token. */
function tableColumns() {
  const unit = state.unit, seen = look(), columns = [...infos.keys(), ...importance.keys()].map((method) => ({ title: label(method), values: look(method)?.row ?? null }));
  if (seen && againstShown() !== "nothing") columns.push({ title: "expected", values: seen.expected }, { title: "times expected", values: seen.ratio });
  return { positions: UNITS[unit].map((group) => group[0]), names: UNITS[unit].map((_, at) => unitName(unit, at)), columns };
}

function tablePlaces({ names, columns }) {
  const seen = look(), places = names.map((_, at) => at).filter((at) => !seen || seen.counts[at] || state.sinks || !UNITS[state.unit][at].every(isAside));
  const by = columns.find(({ title }) => title === table.column)?.values;
  const sorted = table.column === "token" ? places.sort((a, b) => names[a].localeCompare(names[b])) : by ? places.sort((a, b) => by[b] - by[a]) : places;
  if (!table.isUp) sorted.reverse();
  return table.all || sorted.length <= limits.table ? sorted : by || !look() ? sorted.slice(0, limits.table) : largest(/** @type {any} */ (look()).row, limits.table, (at) => sorted.includes(at));
}

function paintTable() {
  if (!byId("tables").open) return;
  const found = tableColumns(), places = tablePlaces(found), top = element("tr"), body = element("tbody"), head = element("thead");
  const digits = found.columns.map(({ values }) => (values ? Math.max(...places.map((place) => Math.abs(values[place])).filter(Number.isFinite), 0) : 1));
  for (const title of ["position", "token", ...found.columns.map((each) => each.title)]) {
    const cell = element("th"), isSorted = title === table.column || (title === "position" && !table.column);
    cell.scope = "col";
    cell.setAttribute("aria-sort", !isSorted ? "none" : (title === "position" || title === "token") === table.isUp ? "ascending" : "descending");
    cell.append(button(title, () => { const column = title === "position" ? "" : title; table.isUp = table.column === column ? !table.isUp : true; table.column = column; paintTable(); }, "plain"));
    top.append(cell);
  }
  head.append(top);
  for (const place of places) {
    const line = element("tr"), name = element("th", "name", shortened(found.names[place], 60));
    name.scope = "row";
    name.title = UNITS[state.unit][place].map((key) => tokens[key]).join("");
    line.dataset.key = found.positions[place];
    line.append(element("td", "", String(found.positions[place])), name, ...found.columns.map(({ values }, at) => element("td", "", values && Number.isFinite(values[place]) ? number(values[place], digits[at]) : "–")));
    body.append(line);
  }
  byId("table").replaceChildren(element("caption", "", methodPhrase()), head, body);
  byId("all-rows").hidden = table.all || places.length < limits.table || places.length >= found.names.length;
}

/** What a spreadsheet reads; a cell that begins like a formula stays text. */
function asCsv() {
  const found = tableColumns(), quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
  const lines = [["position", "token", ...found.columns.map((each) => each.title)].map(quote)];
  for (const place of tablePlaces(found)) lines.push([String(found.positions[place]), quote(found.names[place]), ...found.columns.map(({ values }) => (values ? String(+Number(values[place]).toPrecision(6)) : ""))]);
  return lines.map((line) => line.join(",")).join("\n");
}

const LATEX = { "\\": "\\textbackslash{}", "{": "\\{", "}": "\\}", $: "\\$", "&": "\\&", "#": "\\#", "%": "\\%", _: "\\_", "^": "\\textasciicircum{}", "~": "\\textasciitilde{}", "<": "\\textless{}", ">": "\\textgreater{}", '"': "\\textquotedbl{}", "|": "\\textbar{}", "`": "\\textasciigrave{}" };
const latex = (text) => text.replace(/[\\{}$&#%_^~<>"|`]/g, (sign) => LATEX[sign]);

/** The colour on white paper, whatever the page has. */
const onPaper = (tone, against) => scaleOf(tone < 0 ? "lightAgainst" : "light")[Math.min(63, Math.round(63 * Math.abs(against !== "nothing" && tone < 0 ? PALER * tone : tone)))];

/** The text in colours, and the numbers: needs booktabs and xcolor. */
function asLatex() {
  const found = tableColumns(), seen = look(), against = againstShown();
  const words = UNITS[state.unit].map((group, at) => {
    const tone = seen ? toneOf(seen, at, against) : null, text = latex(shortened(found.names[at], 80));
    if (tone === null) return text;
    const { fill, text: ink } = onPaper(tone, against);
    return `\\colorbox[HTML]{${fill.slice(1)}}{\\textcolor[HTML]{${ink.slice(1)}}{\\strut ${text}}}`;
  });
  const rows = tablePlaces(found).map((place) => [found.positions[place], latex(shortened(found.names[place], 80)), ...found.columns.map(({ values }) => (values && Number.isFinite(values[place]) ? number(values[place], Math.abs(values[place])) : "--"))].join(" & ") + " \\\\");
  return [`% ${latex(methodPhrase()).replace(/[\u2068\u2069\n\r]/g, "")}`, `{\\setlength{\\fboxsep}{1pt}${words.join(" ")}}`, "", `\\begin{tabular}{rl${"r".repeat(found.columns.length)}}`, "\\toprule", ["position", "token", ...found.columns.map((each) => latex(each.title))].join(" & ") + " \\\\", "\\midrule", ...rows, "\\bottomrule", "\\end{tabular}"].join("\n");
}

/** The text in colours, for a web page or a document. */
function asHtml() {
  const seen = look(), against = againstShown(), box = element("p");
  UNITS[state.unit].forEach((group, at) => {
    const tone = seen ? toneOf(seen, at, against) : null, made = element("span", "", unitName(state.unit, at)), colour = tone === null ? null : onPaper(tone, against);
    if (colour) made.setAttribute("style", `background:${colour.fill};color:${colour.text}`);
    if (at && data.starts[group[0]]) box.append(" ");
    box.append(made);
  });
  return box.outerHTML;
}

async function copy(text, what) {
  try { await navigator.clipboard.writeText(text); } catch { // a frame in a notebook may not: the old way
    const area = element("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  announce(`Copied as ${what}`);
  byId("copied").textContent = `Copied as ${what}.`;
}
