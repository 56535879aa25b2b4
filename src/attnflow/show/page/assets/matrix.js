// @ts-check
// ---- the matrix: rows x input, with zoom and pan -------------------------------------------------------------------------------

const ROW_NAMES = { layers: "Layers", positions: "Positions", methods: "Methods", answer: "Answer" };
const view = { from: 0, to: 1, top: 0, bottom: 1 }; // the part of columns and rows that is looked at

/** What rows the matrix can have here. */
function rowKinds() {
  const kinds = isGeneration ? ["answer", "layers", "methods"] : ["layers", "positions", "methods"];
  return kinds.filter((kind) => kind !== "positions" || (!isImportance() && (tilesOf() || (size <= limits.rows && rowsEverywhere()))));
}
const rowsEverywhere = () => { const info = infos.get(state.method); return Boolean(info?.computed && graphOf(state.method)?.weights) || (info?.rows?.places.size ?? 0) > 1; };
const tilesOf = () => (state.head ? null : infos.get(state.method)?.tiles ?? null);
const rowsShown = () => { const kinds = rowKinds(); return isImportance() ? "methods" : kinds.includes(state.rows) ? state.rows : kinds[0]; };

/** The rows, topmost first: {name, tones, row, act?}; tones from -1 to 1, null without colour. */
function matrixRows() {
  const kind = rowsShown(), against = againstShown(), unit = state.unit;
  if (kind === "positions" && tilesOf()) return tileRows(tilesOf());
  const seenRows = kind === "methods"
    ? [...infos.keys(), ...importance.keys()].map((method) => ({ name: label(method), method, seen: look(method), against: againstShown(method), isHere: method === state.method, act: () => choose({ method }) }))
    : kind === "answer"
      ? Array.from({ length: tokens.length - keys }, (_, i) => ({ name: names[keys + i], seen: look(state.method, { from: keys - 1 + i, until: keys - 1 + i }), against, isHere: explained().includes(keys - 1 + i), act: () => choose({ position: keys - 1 + i, until: keys - 1 + i }) }))
      : kind === "positions"
        ? Array.from({ length: size }, (_, position) => ({ name: `${position} ${names[position]}`, seen: removed.has(position) ? null : look(state.method, { from: position, until: position }), against, isHere: position === state.position, act: () => explain(position) }))
        : Array.from({ length: depth }, (_, i) => depth - i).map((layer) => ({ name: layerPhrase(layer), seen: look(state.method, { layer }), against, isHere: layer === state.layer, act: () => choose({ layer }) }));
  const common = Math.max(0, ...seenRows.map(({ seen }) => seen?.most ?? 0));
  return seenRows.map(({ name, method, seen, against, isHere, act }) => ({
    name, isHere, act, against, row: seen?.row ?? null, shares: seen,
    reason: kind === "methods" && method ? reasonOf(method, seen) : "",
    tones: seen ? Array.from(seen.row, (_, at) => toneOf(seen, at, against, state.scale === "common" && kind !== "methods" ? common : seen.most)) : null,
    columns: UNITS[unit].map((group) => group[0]),
  }));
}

/** Rows of a text with many positions, pooled: means over queries of sums over keys. */
function tileRows({ starts, values }) {
  const count = starts.length, ends = [...starts.slice(1), size], offset = (state.layer - 1) * count * count, against = againstShown();
  const rows = starts.map((_, at) => values.subarray(offset + at * count, offset + (at + 1) * count));
  const isOut = starts.map((start, at) => !state.sinks && Array.from({ length: ends[at] - start }, (_, i) => start + i).some(isAside));
  const mean = Float64Array.from(starts, (_, key) => rows.reduce((sum, row) => sum + row[key], 0) / count);
  const common = Math.max(...rows.map((row) => Math.max(...Array.from(row, (value, at) => (isOut[at] ? 0 : value)))));
  return rows.map((row, at) => {
    const seen = starts.map((start, key) => !isOut[key] && (!data.causal || start <= ends[at] - 1));
    const even = starts.map((start, key) => (seen[key] ? (data.causal ? Math.min(ends[key], ends[at]) : ends[key]) - start : 0));
    const counts = seen.map(Number), comparison = compared(sharesOfRow(row, counts), sharesOfRow(against === "others" ? mean : even, counts), counts), most = state.scale === "common" ? common : Math.max(...Array.from(row, (value, key) => (seen[key] ? value : 0)));
    return {
      name: `${starts[at]}–${ends[at] - 1}`, isHere: state.position >= starts[at] && state.position < ends[at], act: null, against, row, shares: comparison, reason: "",
      tones: starts.map((_, key) => (!seen[key] ? null : against === "nothing" ? row[key] / (most || 1) : comparison.scaled[key])), columns: starts,
    };
  });
}

const drawnMatrix = /** @type {any} */ ({ figure: null });

function matrixFigure(width) {
  const rows = matrixRows(), count = rows[0]?.columns.length ?? 0, left = data.layers || rowsShown() === "methods" ? 148 : 92;
  const from = Math.floor(view.from * count), to = Math.max(from + 1, Math.ceil(view.to * count)), shownRows = rows.slice(Math.floor(view.top * rows.length), Math.max(1, Math.ceil(view.bottom * rows.length)));
  const step = Math.min(90, (width - left - 12) / (to - from)), high = Math.max(3, Math.min(22, 520 / shownRows.length));
  const longest = Math.max(1, ...Array.from({ length: to - from }, (_, i) => Array.from(columnName(rows[0], from + i)).length)) * 6.3;
  const style = longest < step - 4 ? "flat" : "steep", labels = style === "flat" ? 22 : Math.min(longest, 82) * 0.87 + 20;
  return { rows: shownRows, left, step, high, from, to, style, top: 4, width, height: Math.ceil(4 + shownRows.length * high + labels), draw: (pen) => drawMatrix(pen, { rows: shownRows, left, step, high, from, to, style }) };
}

const columnName = (row, at) => (!row ? "" : tilesOf() && rowsShown() === "positions" ? shorts[row.columns[at]] : shortened(unitName(state.unit, at), 12));

function drawMatrix(pen, { rows, left, step, high, from, to, style }) {
  const { ink, muted, accent, card } = inks(), inset = step >= 9 && high >= 9 ? 1 : 0, every = Math.max(1, Math.ceil(13 / high));
  rows.forEach(({ name, tones, isHere, reason, against }, index) => {
    const y = 4 + index * high;
    if (isHere) pen.rect(left - 8, y + 1, 3, Math.max(2, high - 2), accent);
    if (index % every === 0 || isHere) pen.text(left - 12, y + high / 2 + 4, fitted(name, left - 16), isHere ? ink : muted, "end", 0, isHere ? 600 : 400);
    if (reason) return pen.text(left + 4, y + high / 2 + 4, fitted(reason, (to - from) * step), muted);
    if (!tones) return;
    for (let at = from; at < to; at++) {
      const tone = tones[at];
      pen.rect(left + (at - from) * step, y + inset / 2, step - inset, high - inset, tone === null ? card : tint(tone, against).fill);
    }
  });
  const y = 4 + rows.length * high, free = [];
  const here = rows.find((row) => row.isHere) ?? rows[0], order = step >= 12 ? Array.from({ length: to - from }, (_, i) => from + i) : here?.row ? largest(here.row, 60, (at) => at >= from && at < to && here.tones[at] !== null) : [];
  for (const at of order) {
    const x = left + (at - from + 0.5) * step;
    if (step < 12 && free.some((other) => Math.abs(other - x) < 13)) continue;
    free.push(x);
    if (style === "flat") pen.text(x, y + 15, columnName(rows[0], at), muted, "middle");
    else pen.text(x + 4, y + 10, columnName(rows[0], at), muted, "end", -60);
  }
}

function paintMatrix() {
  const kinds = rowKinds(), select = byId("rows");
  select.replaceChildren(...kinds.map((kind) => option(kind, ROW_NAMES[kind])));
  select.value = rowsShown();
  byId("scale").value = state.scale;
  byId("scale").disabled = againstShown() !== "nothing" || rowsShown() === "methods";
  drawnMatrix.figure = matrixFigure(room("matrix"));
  paintOn("matrix", drawnMatrix.figure);
  paintMatrixMark();
  byId("matrix-caption").textContent = `${matrixTitle()}. ${againstShown() === "nothing" ? (state.scale === "row" ? "Each row is coloured up to its own largest number." : "All rows share one scale.") : `Colours compare each row with ${AGAINST[againstShown()]}.`}${tilesOf() && rowsShown() === "positions" ? ` ${size.toLocaleString("en")} positions are pooled into ${tilesOf().starts.length} tiles.` : " A click on a row goes there."}`;
}

const matrixTitle = () => `${rowsShown() === "methods" ? "All methods" : label(state.method)}: ${ROW_NAMES[rowsShown()].toLowerCase()} by ${state.unit}s, ${rowsShown() === "layers" ? placePhrase() : layerPhrase(state.layer)}`;

/** The column of the token under the pointer. */
function paintMatrixMark() {
  const figure = drawnMatrix.figure, key = state.hover ?? state.pin;
  if (!figure) return;
  paintOn("matrix", { width: figure.width, height: figure.height, draw: (pen) => {
    if (key === null || (tilesOf() && rowsShown() === "positions")) return;
    const at = PLACES[state.unit][key];
    if (at >= figure.from && at < figure.to) pen.line([[0, 0], [0, figure.rows.length * figure.high], [figure.step, figure.rows.length * figure.high], [figure.step, 0], [0, 0]].map(([x, y]) => [figure.left + (at - figure.from) * figure.step + x, 4 + y]), inks().ink, 1.5);
  } }, 1);
}

/** The row and column under the pointer. */
function cellAt(event) {
  const box = byId("matrix").getBoundingClientRect(), { rows, left, step, high, from, to } = drawnMatrix.figure;
  const at = from + Math.floor((event.clientX - box.left - left) / step), row = rows[Math.floor((event.clientY - box.top - 4) / high)];
  return { row, at: at >= from && at < to ? at : null };
}

function zoom(factor, middle = (view.from + view.to) / 2) {
  const width = Math.min(1, Math.max(0.02, (view.to - view.from) * factor));
  view.from = Math.max(0, Math.min(1 - width, middle - width * ((middle - view.from) / (view.to - view.from))));
  view.to = view.from + width;
  paintMatrix();
}

function pan(across, down = 0) {
  const width = view.to - view.from, height = view.bottom - view.top;
  view.from = Math.max(0, Math.min(1 - width, view.from + across * width));
  view.to = view.from + width;
  view.top = Math.max(0, Math.min(1 - height, view.top + down * height));
  view.bottom = view.top + height;
  paintMatrix();
}

function listenToMatrix() {
  const box = byId("matrix");
  box.addEventListener("pointermove", (event) => {
    const { row, at } = cellAt(event);
    byId("cell").textContent = row?.row && at !== null ? `${shortened(row.name, 40)}, ${isolated(columnName(row, at))}: ${number(row.row[at], Math.abs(row.row[at]))}${againstShown() !== "nothing" && row.shares?.ratio ? ` (${times(row.shares.ratio[at])} the expected)` : ""}` : "";
    if (at !== null && row && !(tilesOf() && rowsShown() === "positions")) hover(UNITS[state.unit][at]?.[0] ?? null);
  });
  box.addEventListener("pointerleave", () => { byId("cell").textContent = ""; hover(null); });
  box.addEventListener("click", (event) => { const { row, at } = cellAt(event); if (at === null) row?.act?.(); else if (row) { if (event.shiftKey || row.isHere) pin(UNITS[state.unit][at]?.[0] ?? null); else row.act?.(); } });
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // scrolling the page stays the wheel's own
    event.preventDefault();
    const { left, width } = box.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, view.from + ((event.clientX - left - drawnMatrix.figure.left) / (width - drawnMatrix.figure.left)) * (view.to - view.from));
  }, { passive: false });
  const keysOf = { "+": () => zoom(0.7), "-": () => zoom(1.4), 0: () => { Object.assign(view, { from: 0, to: 1, top: 0, bottom: 1 }); paintMatrix(); }, ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2) };
  byId("matrix-scroll").addEventListener("keydown", (event) => { const act = keysOf[event.key]; if (!act || event.altKey || event.ctrlKey || event.metaKey) return; event.preventDefault(); act(); });
  byId("zoom-in").addEventListener("click", keysOf["+"]);
  byId("zoom-out").addEventListener("click", keysOf["-"]);
  byId("zoom-all").addEventListener("click", keysOf[0]);
}
