// @ts-check
// ---- painting ------------------------------------------------------------------------------------------------------------------

function option(value, text) {
  const made = element("option", "", text);
  made.value = value;
  return made;
}

const announce = (text) => { byId("live").textContent = text; };

/** Views further down are painted when they come into sight, and again when something has changed. */
const late = new Map();
const watcher = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
  const each = late.get(target);
  each.isSeen = isIntersecting;
  if (isIntersecting && each.isStale) { each.isStale = false; each.paint(); }
}), { rootMargin: "300px" });

function paintLate(id, paint) {
  late.set(byId(id), { paint, isSeen: false, isStale: true });
  watcher.observe(byId(id));
}

/** Everything. */
function paint() {
  paintControls();
  paintText();
  paintLines();
  paintCard();
  paintPicture();
  paintStory();
  paintTable();
  for (const each of late.values()) { if (each.isSeen) each.paint(); else each.isStale = true; }
  const { method, layer, position, pin, unit, sinks } = state;
  Object.assign(document.body.dataset, { method, layer, position, pin: pin ?? "", unit, against: againstShown(), sinks, theme: theme() });
  writeAddress();
  reportHeight();
}

/** What follows the pointer. */
function paintHover() {
  const key = state.hover ?? state.pin, at = key === null ? -1 : PLACES[state.unit][key];
  for (const marked of document.querySelectorAll(".token.marked, tr.marked")) marked.classList.remove("marked");
  if (at >= 0) for (const each of UNITS[state.unit][at]) tokenElements[each]?.classList.add("marked");
  if (at >= 0 && byId("tables").open) byId("table").querySelector(`tr[data-key="${UNITS[state.unit][at][0]}"]`)?.classList.add("marked");
  paintCard();
  if (data.picture) paintPicture();
  const isIn = (id) => late.get(byId(id))?.isSeen;
  if (isIn("matrix-section")) paintMatrixMark();
  if (isIn("paths-section")) paintPathsMark();
  if (isIn("layers-section")) paintLayers();
  if (isIn("bars-section")) paintBars();
  document.body.dataset.hover = state.hover ?? "";
}

let asked = false;
function hover(key) {
  if (state.hover === key) return;
  state.hover = key;
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; paintHover(); });
}

// ---- what the reader does ---------------------------------------------------------------------------------------------------------

function choose(changes) {
  Object.assign(state, changes);
  if ("position" in changes && !("until" in changes)) state.until = state.position;
  paint();
  paintHover();
}

function pin(key) {
  if (key === null) return;
  if (state.pin !== null && PLACES[state.unit][state.pin] === PLACES[state.unit][key]) return letGo();
  choose({ pin: key });
  announce(`Pinned ${tokenPhrase(key)}`);
}

function letGo() {
  if (state.pin === null) return;
  choose({ pin: null });
  announce("Let go");
}

function explain(position) {
  choose({ position });
  announce(`Explained: ${placePhrase()}`);
}

/** Choose a token of the answer, or all from the chosen one to it. */
function chooseAnswer(choice, isSpan) {
  const position = keys - 1 + choice;
  choose(isSpan ? { until: position } : { position });
  announce(byId("story-text").textContent);
}

function paintControls() {
  const info = infos.get(state.method), title = info?.method ?? state.method;
  byId("method").value = title;
  const kinds = [...infos.values()].filter((each) => each.method === title).map((each) => each.edges);
  byId("edges-choice").replaceChildren(...kinds.map((kind) => option(kind, shortened(kind, 24))));
  if (info) byId("edges-choice").value = info.edges;
  byId("edges-choice").disabled = kinds.length < 2;
  byId("against").value = isImportance() ? "nothing" : state.against;
  byId("against").disabled = isImportance();
  byId("layer").value = state.layer;
  byId("layer").disabled = isImportance();
  byId("layer-name").textContent = layerName(state.layer);
  byId("layer").setAttribute("aria-valuetext", layerPhrase(state.layer));
  byId("unit").value = state.unit;
  byId("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${theme() === "dark" ? "light" : "dark"} colours`);
}

function buildControls() {
  const titles = new Map([...infos.values()].map((each) => [each.method, each]));
  const names = [...[...titles.values()].map((each) => [each.method, each.edges === "attention" || ![...infos.keys()].includes(each.method) ? infos.get(each.method)?.title ?? shortened(each.method.charAt(0).toUpperCase() + each.method.slice(1), 30) : label(each.method)]), ...[...importance.values()].map((each) => [each.name, each.title])];
  byId("method").append(...names.map(([name, title]) => { const made = option(name, title); made.dataset.title = title; return made; }));
  byId("against").append(...Object.entries(AGAINST).filter(([name]) => name !== "others" || [...infos.values()].some((each) => each.others)).map(([name, title]) => option(name, title)));
  byId("layer").max = depth;
  byId("layer-field").hidden = depth < 2;
  byId("unit").append(...UNIT_NAMES.filter((unit) => unit === "token" || !data.picture).map((unit) => option(unit, unit)));
}

/** The result of a method on the edges that are chosen, if there is one; else on its first. */
function chooseMethod(method, edges) {
  const found = [...infos.values()].filter((each) => each.method === method);
  choose({ method: importance.has(method) && !found.length ? method : (found.find((each) => each.edges === edges) ?? found[0]).name });
}

function listenToControls() {
  const on = (id, event, act) => byId(id).addEventListener(event, (e) => act(e.target));
  on("method", "change", (select) => chooseMethod(select.value, byId("edges-choice").value));
  on("edges-choice", "change", (select) => chooseMethod(byId("method").value, select.value));
  on("against", "change", (select) => choose({ against: select.value }));
  on("layer", "input", (input) => choose({ layer: Number(input.value) }));
  on("unit", "change", (select) => choose({ unit: select.value }));
  on("rows", "change", (select) => choose({ rows: select.value }));
  on("scale", "change", (select) => choose({ scale: select.value }));
  on("show-sinks", "click", () => choose({ sinks: !state.sinks }));
  on("explain", "click", (each) => explain(Number(each.dataset.key)));
  on("let-go", "click", letGo);
  on("home", "click", () => explain(data.position));
  on("theme", "click", () => {
    state.theme = theme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = state.theme;
    paint();
  });
  byId("tables").addEventListener("toggle", () => { paintTable(); reportHeight(); });
  byId("heads-section").addEventListener("toggle", () => { paintHeads(); reportHeight(); });
  on("all-rows", "click", () => { table.all = true; paintTable(); });
  on("copy-csv", "click", () => copy(asCsv(), "CSV"));
  on("copy-latex", "click", () => copy(asLatex(), "LaTeX"));
  on("copy-html", "click", () => copy(asHtml(), "coloured HTML"));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") letGo(); });
  darkMedia.addEventListener("change", paint);
  let width = innerWidth;
  addEventListener("resize", () => { if (width !== innerWidth) { width = innerWidth; paint(); } });
  addEventListener("hashchange", () => { Object.assign(state, { ...opening, theme: state.theme }); readAddress(); paint(); });
}

/** Keys and pointer on the text: hover, focus and pin tokens; step through an answer. */
function listenToText() {
  const box = byId("text"), keyOf = (target) => { const found = target.closest?.("[data-key]")?.dataset.key; return found === undefined ? null : Number(found); };
  for (const each of [box, byId("card-list"), byId("table")]) {
    each.addEventListener("pointerover", (event) => { const key = event.pointerType === "touch" ? null : keyOf(event.target); hover(key !== null && key < keys ? key : null); });
    each.addEventListener("pointerleave", () => hover(null));
    each.addEventListener("click", (event) => {
      const key = keyOf(event.target);
      if (key !== null && key < keys) pin(key);
      else if (key !== null) chooseAnswer(key - keys, event.shiftKey);
    });
  }
  box.addEventListener("focusin", (event) => { const key = keyOf(event.target); if (key !== null && key < keys && event.target.matches(":focus-visible")) { hover(key); announce(tokenPhrase(key)); } });
  box.addEventListener("focusout", () => hover(null));
  box.addEventListener("keydown", (event) => {
    const key = keyOf(event.target);
    if (key === null || event.altKey || event.ctrlKey || event.metaKey) return;
    const all = key < keys ? tokenElements.filter(Boolean) : answerElements, at = all.indexOf(event.target);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      const target = all[Math.max(0, Math.min(all.length - 1, to))];
      if (key >= keys) chooseAnswer(answerElements.indexOf(target), event.shiftKey);
      all.forEach((each) => { each.tabIndex = each === target ? 0 : -1; });
      target.focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (key < keys) pin(key); else chooseAnswer(key - keys, event.shiftKey);
    }
  });
}

function listenToViews() {
  listenToMatrix();
  listenToPaths();
  if (data.picture) {
    byId("picture").addEventListener("pointermove", (event) => hover(patchAt(event)));
    byId("picture").addEventListener("pointerleave", () => hover(null));
    byId("picture").addEventListener("click", (event) => pin(patchAt(event)));
  }
  if (isGeneration) byId("story").addEventListener("click", (event) => {
    const { left, step, count } = storyFigure(room("story")), choice = Math.floor((event.clientX - byId("story").getBoundingClientRect().left - left) / step);
    if (choice >= 0 && choice < count) chooseAnswer(choice, event.shiftKey);
  });
  if (heads) byId("head").addEventListener("pointermove", headCell);
}

// ---- start --------------------------------------------------------------------------------------------------------------------------

const NORMALISED = {
  sum: "Rows of token attention sum to 1.",
  receptive_field: "Token attention is relative to what attention without preference would give (receptive field); paths are plain rollout.",
  none: "Token attention is not normalised: flow is the maximum flow itself.",
};

/** Report the height of the page, so that the frame in a notebook becomes as high. */
function reportHeight() {
  if (parent !== window) parent.postMessage({ attnflow: Math.ceil(document.documentElement.getBoundingClientRect().height) }, "*");
}

function buildHeader() {
  const counted = (/** @type {number} */ count, /** @type {string} */ what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
  const counts = isGeneration ? `${counted(keys, "prompt token")}, ${tokens.length - keys} generated` : counted(size, "token");
  byId("kicker").textContent = ["attnflow", data.model, counts, counted(depth, "layer")].filter(Boolean).join(" · ");
  byId("answer").textContent = data.summary;
  document.title = `attnflow: ${shortened(data.text || data.prediction?.[0] || data.model || "token attention", 60)}`;
  const notes = [...data.notes, ...(isGeneration ? [] : [NORMALISED[data.normalize ?? "none"]]), ...graphs.map(({ edges, residual, isInside }) => isInside ? `The ${edges} edges hold the residual.` : `Residual of ${edges}: ${residual}.`), "Numbers are right to 0.001; they travel in this file as 16-bit floats.", data.source];
  byId("notes").replaceChildren(...notes.map((note) => element("li", "", note)));
}

readAddress();
buildHeader();
buildControls();
buildText();
buildHeads();
addSaves("matrix-saves", "matrix", matrixTitle, () => matrixFigure(room("matrix")));
addSaves("paths-saves", "paths", () => `Paths: ${methodPhrase()}`, () => pathsFigure(room("paths")));
addSaves("layers-saves", "layers", () => `Layers: ${methodPhrase()}`, () => layersFigure(room("layers")));
addSaves("bars-saves", "importance", () => `Importance beside ${label(isImportance() ? data.first : state.method)}`, () => barsFigure(room("bars")));
if (data.picture) addSaves("picture-saves", "picture", methodPhrase, () => pictureFigure(room("picture")));
if (data.picture?.source) { picture.src = data.picture.source; await picture.decode(); }
byId("story-section").hidden = !isGeneration;
paintLate("matrix-section", paintMatrix);
paintLate("paths-section", paintPaths);
paintBars(); // where there are none, the layers have all the room
paintLate("bars-section", paintBars);
paintLate("layers-section", paintLayers);
paintLate("heads-section", paintHeads);
listenToControls();
listenToText();
listenToViews();
paint();
paintHover();
new ResizeObserver(reportHeight).observe(document.body);
document.body.dataset.ready = String(Math.round(performance.now()));
