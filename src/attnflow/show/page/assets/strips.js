// @ts-check
/// <reference path="schema.d.ts" />
// ---- two texts side by side, and lists of texts ---------------------------------------------------------------------------

const data = /** @type {Strips} */ (JSON.parse(/** @type {HTMLElement} */ (document.getElementById("data")).textContent ?? "{}"));
const get = (name) => /** @type {HTMLElement} */ (document.getElementById(name));

/** An element with a class and a text; text is never parsed. */
function make(kind, { name = "", text = "", style = {} } = {}) {
  const element = document.createElement(kind);
  if (name) element.className = name;
  if (text) element.textContent = text;
  Object.assign(element.style, style);
  return element;
}

const darkMedia = matchMedia("(prefers-color-scheme: dark)");
let chosen = /** @type {string | null} */ (null);
const theme = () => chosen ?? (darkMedia.matches ? "dark" : "light");

/** The colour of a tone from -1 to 1, and the ink, black or white, that stands out on it. */
function shade(tone) {
  const stops = data.colours[theme() + (tone < 0 ? "Against" : "")], at = Math.min(1, Math.abs(tone)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  const part = (stop, place) => parseInt(stops[stop].slice(2 * place + 1, 2 * place + 3), 16);
  const rgb = [0, 1, 2].map((place) => Math.round(part(low, place) + (at - low) * (part(low + 1, place) - part(low, place))));
  const linear = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return { background: `rgb(${rgb.join(" ")})`, color: (luminance + 0.05) ** 2 > 0.0525 ? "#000000" : "#ffffff" };
}

const PALER = 0.55; // what is read less than expected stays paler, so that what is read more leads the eye

const signed = (value, digits = 3) => (value === null ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits));
const plain = (value) => (value === null ? "–" : value.toFixed(3));

// ---- two sides ------------------------------------------------------------------------------------------------------------

function drawPairs() {
  const pairs = data.pairs ?? [], sides = /** @type {[PageSide, PageSide]} */ (data.sides), list = get("pairs");
  const most = Math.max(0, ...pairs.flatMap(({ values }) => values.map((value) => value ?? 0)));
  const widest = Math.max(0, ...pairs.map(({ difference }) => Math.abs(difference ?? 0)));
  list.replaceChildren(...pairs.map(({ left, right, values, difference }) => {
    const item = make("li");
    for (const [place, name] of [left, right].entries()) {
      const value = values[place], kind = name === null ? "gone" : value === null ? "aside" : "";
      const box = make("span", { name: kind, text: name ?? "·", style: name !== null && value !== null && most > 0 ? shade(value / most) : {} });
      box.title = name === null ? `${sides[place].name} has nothing here` : `${name}: ${value === null ? "left out" : plain(value)}, ${sides[place].name}`;
      item.append(box);
    }
    const change = make("span", { name: "change" }), bar = make("i"), label = make("b", { text: difference === null ? "" : signed(difference, 2) });
    if (difference !== null && widest > 0) {
      const height = Math.abs(difference) / widest;
      Object.assign(bar.style, { top: "0", height: `${(1.2 * height).toFixed(2)}rem`, background: shade(difference / widest).background });
      label.style.top = "1.25rem";
      change.append(bar, label);
    }
    item.append(change);
    return item;
  }));
}

// ---- the table ------------------------------------------------------------------------------------------------------------

let order = { column: -1, up: true };
let sought = "";

/** The rows of the table, sorted and filtered: one list of cells each. */
function drawTable() {
  const table = get("table"), columns = data.columns ?? [];
  const head = make("tr");
  head.append(...columns.map((title, column) => {
    const cell = make("th"), button = make("button", { text: title });
    cell.setAttribute("scope", "col");
    if (order.column === column) cell.setAttribute("aria-sort", order.up ? "ascending" : "descending");
    button.setAttribute("type", "button");
    button.addEventListener("click", () => { order = { column, up: order.column === column ? !order.up : true }; drawTable(); get("table").querySelectorAll("th button")[column]?.focus(); });
    cell.append(button);
    return cell;
  }));
  const entries = (data.entries ?? []).filter(({ cells }) => !sought || cells.some((cell) => typeof cell === "string" && cell.toLowerCase().includes(sought)));
  if (order.column >= 0) {
    const empty = (value) => value === null || value === "";
    entries.sort(({ cells: one }, { cells: other }) => {
      const [left, right] = [one[order.column], other[order.column]];
      if (empty(left) || empty(right)) return Number(empty(left)) - Number(empty(right)); // what has no value stands last
      const sign = typeof left === "number" && typeof right === "number" ? left - right : String(left).localeCompare(String(right));
      return order.up ? sign : -sign;
    });
  }
  const body = make("tbody"), top = make("thead");
  body.append(...entries.map((entry) => {
    const row = make("tr");
    row.append(...entry.cells.map((value, column) => drawCell(entry, value, column)));
    return row;
  }));
  top.append(head);
  table.replaceChildren(top, body);
  get("count").textContent = data.kind === "corpus" ? `${entries.length.toLocaleString("en")} of ${(data.entries ?? []).length.toLocaleString("en")}` : "";
}

/** @param {Entry} entry @param {string | number | null} value @param {number} column */
function drawCell(entry, value, column) {
  if (data.kind === "corpus" && column === 1) {
    const cell = make("td", { name: "text" });
    for (const [place, word] of entry.words.entries()) {
      const tone = entry.tones[place];
      cell.append(entry.spaces[place] ? " " : "", make("span", { name: tone === null ? "piece aside" : "piece", text: word, style: tone === null ? {} : shade(tone < 0 ? PALER * tone : tone) }));
    }
    return cell;
  }
  if (typeof value !== "string") return make("td", { text: data.kind === "pair" && column === 3 ? signed(value) : plain(value) });
  const cell = make("td", { name: column ? "name" : "first" });
  if (column || !entry.page) cell.textContent = value;
  else {
    const link = make("a", { text: value });
    link.setAttribute("href", entry.page);
    cell.append(link);
  }
  return cell;
}

// ---- all of it ------------------------------------------------------------------------------------------------------------

function draw() {
  document.documentElement.dataset.theme = theme();
  get("theme").textContent = theme() === "dark" ? "Light" : "Dark";
  if (data.kind === "pair") drawPairs();
  drawTable();
}

document.title = `${data.title} – attnflow`;
if (data.back) {
  const link = make("a", { text: "all texts" });
  link.setAttribute("href", data.back);
  get("kicker").append(link, ` · ${data.kicker}`);
} else get("kicker").textContent = data.kicker;
get("answer").textContent = data.title;
const section = data.kind === "pair" ? "pair" : "list";
get(`${section}-section`).hidden = false;
get(`${section}-title`).textContent = data.kind === "pair" ? "Side by side" : "Texts";
get(`${section}-caption`).textContent = data.caption;
get("notes").append(...data.notes.map((text) => make("li", { text })));
get("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; draw(); });
darkMedia.addEventListener("change", draw);
get("find").addEventListener("input", (event) => { sought = /** @type {HTMLInputElement} */ (event.target).value.trim().toLowerCase(); drawTable(); });
draw();
