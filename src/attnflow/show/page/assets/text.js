// @ts-check
// ---- the first screen: the answer, the text in colours, what to distrust ----------------------------------------------------

const methodPhrase = () => isImportance() ? label(state.method) : `${label(state.method)}, ${layerPhrase(state.layer)}, ${placePhrase()}`;

/** What the colours stand for. */
function legendPhrase() {
  const seen = look(), against = againstShown();
  if (against !== "nothing") return `⅛ … as expected … 8 times ${AGAINST[against]}`;
  return importance.get(state.method)?.signed ? `against … for the prediction, up to ${number(seen?.most ?? 0, seen?.most)}` : `0 … ${number(seen?.most ?? 0, seen?.most)}`;
}

/** By key, the element that shows the token. */
const tokenElements = /** @type {any[]} */ ([]);
const answerElements = /** @type {any[]} */ ([]);

function tokenElement(place) {
  const made = element("span", "token", names[place]);
  made.title = tokens[place];
  made.setAttribute("role", "option");
  made.setAttribute("aria-selected", "false");
  made.tabIndex = -1;
  made.dataset.key = place;
  if (place < keys) tokenElements[place] = made; else answerElements[place - keys] = made;
  return made;
}

const range = (from, to) => Array.from({ length: to - from }, (_, i) => from + i);

/** Running text: the tokens of a word stand together, words have spaces between them, and line breaks break the line. */
function runningText(places) {
  const pieces = [];
  let word = null;
  for (const place of places) {
    if (!word || data.starts[place]) {
      if (word) pieces.push(" ");
      pieces.push((word = element("span", "word")));
    }
    word.append(tokenElement(place));
    if (/^(\\n)+$/.test(names[place])) pieces.push(element("br"));
  }
  return pieces;
}

function listbox(className, name, pieces) {
  const box = element("div", className);
  box.setAttribute("role", "listbox");
  box.setAttribute("aria-label", name);
  box.append(...pieces);
  return box;
}

const isFolded = keys > limits.fold && !data.picture;

/** What a sentence is called: itself, or whose turn it is and what that says. */
function sentenceName(place, text) {
  const name = data.segments?.[place] ?? "", letters = (/** @type {string} */ words) => words.replace(/\\n|␣|\s/g, "").slice(0, 20);
  if (!name || letters(text).startsWith(letters(name))) return name || text;
  return `${name}: ${text}`;
}

/** A long text: one line a sentence, with a bar; its tokens are there when it is opened. */
function foldedText() {
  return UNITS.sentence.map((group, place) => {
    const fold = element("details", "fold"), summary = element("summary"), bar = element("span", "bar"), share = element("span", "share");
    summary.append(bar, share, element("span", "name", shortened(sentenceName(place, joined(group.slice(0, 60))), 160)));
    fold.append(summary);
    fold.dataset.place = String(place);
    fold.addEventListener("toggle", () => {
      if (!fold.open || fold.children.length > 1) return;
      fold.append(listbox("text", `Sentence ${place + 1}`, runningText(group)));
      paintText();
    });
    return fold;
  });
}

function buildText() {
  byId("text").classList.toggle("short", tokens.length <= 30);
  const box = byId("text"), part = (title, pieces) => { if (title) box.append(element("p", "part-name", title)); box.append(pieces); };
  if (data.picture) return part("", listbox("text", "Tokens beside the picture", runningText(range(0, keys).filter((key) => !data.picture?.patches.includes(key)))));
  if (isFolded) {
    box.append(...foldedText());
    openStrongest();
  } else if (data.parts) {
    part("Source", listbox("text", "Tokens of the source", runningText(range(0, data.parts.target))));
    part("Target", listbox("text", "Tokens of the target", runningText(range(data.parts.target, keys))));
  } else part(isGeneration ? "Prompt" : "", listbox("text", isGeneration ? "Prompt" : "Tokens", runningText(range(0, keys))));
  if (isGeneration) part("Answer: choose a token to see what it read; arrow keys step, Shift selects several", listbox("text answer", "Answer", runningText(range(keys, tokens.length))));
  const first = tokenElements.find(Boolean);
  if (first) first.tabIndex = 0;
}

/** Of a long text, the sentences that are read most are open at first. */
function openStrongest() {
  const seen = look(state.method, { unit: "sentence" });
  const order = seen ? largest(seen.row, 3, (place) => seen.counts[place]) : [0];
  for (const place of order) byId("text").children[place].open = true;
}

function paintText() {
  const seen = look(), against = againstShown(), places = PLACES[state.unit], chosen = explained();
  tokenElements.forEach((each, key) => {
    const at = places[key], tone = seen && at >= 0 ? toneOf(seen, at, against) : null, colour = tone === null || Math.abs(tone) < 0.02 ? null : tint(tone, against);
    each.style.background = colour?.fill ?? "";
    each.style.color = colour?.text ?? "";
    each.classList.toggle("aside", isAside(key) && !state.sinks);
    each.classList.toggle("explained", !isGeneration && (key === state.position || (state.position === data.position && Boolean(data.span?.includes(key)))));
    each.setAttribute("aria-selected", String(state.pin !== null && at === places[state.pin]));
  });
  answerElements.forEach((each, choice) => {
    const isChosen = chosen.includes(keys - 1 + choice);
    each.setAttribute("aria-selected", String(isChosen));
    each.tabIndex = keys - 1 + choice === state.until ? 0 : -1;
  });
  if (isFolded) paintFolds();
  paintLegend();
}

/** A bar for each sentence of a long text: its share, in the colour of the comparison. */
function paintFolds() {
  const seen = look(state.method, { unit: "sentence" }), against = againstShown();
  for (const fold of byId("text").querySelectorAll(".fold")) {
    const place = Number(fold.dataset.place), [bar, share] = fold.firstElementChild.children;
    const value = seen?.counts[place] ? seen.shares[place] : 0, tone = seen ? toneOf(seen, place, against) : null;
    bar.style.setProperty("--share", `${100 * (seen && seen.most > 0 && seen.counts[place] ? Math.abs(seen.row[place]) / seen.most : 0)}%`);
    bar.style.setProperty("--tone", tone === null ? "transparent" : tint(Math.abs(tone) < 0.15 ? 0.15 * Math.sign(tone || 1) : tone, against).fill);
    share.textContent = seen ? percent(value) : "";
  }
}

function paintLegend() {
  const against = againstShown(), seen = look(), signed = against !== "nothing" || importance.get(state.method)?.signed;
  const stops = Array.from({ length: 17 }, (_, i) => tint(signed ? i / 8 - 1 : i / 16, against).fill);
  byId("legend").hidden = !seen || seen.isEven;
  byId("ramp").style.background = `linear-gradient(90deg, ${stops.join()})`;
  const [low, middle, high] = against !== "nothing" ? ["⅛", "as expected", `8 times ${AGAINST[against]}`] : signed ? ["against", "0", "for"] : ["0", "", number(seen?.most ?? 0, seen?.most)];
  byId("least").textContent = low;
  byId("middle").textContent = middle;
  byId("most").textContent = high;
}

// ---- sinks, trust, notes ----------------------------------------------------------------------------------------------------

function paintLines() {
  const found = data.sinks.filter(([key]) => key < keys), rest = data.asides.filter((key) => !sinks.has(key));
  const held = found.map(([key, share]) => `${isolated(names[key])} ${found.length + rest.length > 1 || names.indexOf(names[key]) !== names.lastIndexOf(names[key]) ? `(position ${key}) ` : ""}holds ${percent(share)} of all attention`);
  const also = rest.length ? [`${found.length ? "also left out: " : ""}${rest.slice(0, 4).map((key) => `${isolated(names[key])} (position ${key})`).join(", ")}${rest.length > 4 ? ` and ${rest.length - 4} more` : ""}`] : [];
  byId("sinks").hidden = !asides.size;
  byId("sinks-text").textContent = [...held.slice(0, 4), ...(held.length > 4 ? [`${held.length - 4} more sinks`] : []), ...also].join("; ") + (state.sinks ? " · coloured" : " · not coloured");
  byId("show-sinks").textContent = state.sinks ? "leave out" : "show";
  const seen = look(), reason = reasonOf(state.method, seen), note = reason ? `${reason}. ${seen ? "Look at a lower layer or at rollout." : ""}` : "";
  byId("note").hidden = !note;
  if (byId("note").textContent !== note) byId("note").textContent = note;
  byId("here").textContent = isImportance() ? "" : isGeneration ? `Colours: what ${placePhrase()} read of the prompt.` : `Colours: what ${placePhrase()} reads, ${layerPhrase(state.layer)}.`;
  byId("home").hidden = isGeneration || state.position === data.position;
  byId("meaning").textContent = importanceOrMethod(state.method).meaning + importanceNote();
  paintTrust();
}

function importanceNote() {
  const each = importance.get(state.method);
  return each ? ` Watched: ${isolated(each.target)}, ${each.score === undefined ? `probability ${number(each.probability)}` : `logit ${number(each.score)}`}.${each.signed ? " Blue tokens speak for it, orange ones against it." : ""}` : "";
}

/** How far the method agrees with blank-out here, and which methods say nothing, with the reason. */
function paintTrust() {
  const agreement = data.agreement[state.method], notes = [];
  if (agreement !== undefined && Number.isFinite(agreement)) notes.push(`On this text ${label(state.method).toLowerCase()} ranks tokens like blank-out at ${agreement.toFixed(2)}${agreement < limits.doubtful ? ": distrust it" : ""}.`);
  const silent = [...infos.keys()].filter((method) => method !== state.method).map((method) => reasonOf(method, look(method))).filter((reason) => reason.includes("says nothing"));
  if (silent.length) notes.push(`Folded: ${silent.join("; ")}.`);
  byId("trust").textContent = notes.join(" ");
  byId("trust").hidden = !notes.length;
  for (const option of byId("method").options) {
    const silentHere = [...infos.values()].filter((each) => each.method === option.value).every((each) => reasonOf(each.name, look(each.name)).includes("says nothing"));
    option.textContent = option.dataset.title + (silentHere && !importance.has(option.value) ? " (says nothing here)" : "");
  }
}

// ---- the card: what is read most, and what is known of one token -------------------------------------------------------------

function paintCard() {
  const seen = look(), unit = state.unit, against = againstShown(), ranks = seen ? rankingOf(seen, against) : [];
  const isAlike = Boolean(seen?.isEven), count = seen ? seen.counts.filter(Boolean).length : 0;
  const best = seen && !isAlike ? largest(ranks, 8, (at) => seen.counts[at]) : [], most = best.length ? Math.abs(ranks[best[0]]) : 0;
  const focus = state.hover ?? state.pin, marked = focus === null ? -1 : PLACES[unit][focus];
  byId("card-title").textContent = isImportance() ? label(state.method) : isAlike ? `All ${count} ${unit}s alike` : against === "others" ? `Stands out against ${AGAINST.others}` : "Read most";
  byId("card-list").replaceChildren(...best.map((at) => {
    const item = element("li", seen.row[at] < 0 ? "against" : ""), name = element("span", "name", shortened(unitName(unit, at), 60));
    name.title = UNITS[unit][at].map((key) => tokens[key]).join("");
    item.style.setProperty("--share", `${(100 * Math.abs(ranks[at])) / most}%`);
    item.dataset.key = UNITS[unit][at][0];
    item.classList.toggle("marked", at === marked);
    item.append(name, element("span", "value", isImportance() ? number(seen.row[at], most) : against === "others" ? `${percent(seen.shares[at])}, ${times(seen.ratio[at])}` : percent(seen.shares[at])));
    return item;
  }));
  byId("card-focus").textContent = focus === null ? "Hover or focus a token for its numbers; click or Enter pins it." : tokenPhrase(focus);
  byId("explain").hidden = focus === null || !mayExplain(focus);
  byId("explain").dataset.key = focus ?? "";
  byId("let-go").hidden = state.pin === null;
}

const mayExplain = (key) => !isGeneration && !isImportance() && key !== state.position && !removed.has(key) && rowOf(state.method, state.layer, key) !== null;

/** All that is known of a token, word or sentence, in one line. */
function tokenPhrase(key) {
  const unit = state.unit, at = PLACES[unit][key], seen = look(), name = `“${isolated(unitName(unit, at))}”`;
  const where = unit === "token" ? `position ${key}` : `${unit} ${at}`;
  if (!seen) return `${name}, ${where}: no number here.`;
  if (!seen.counts[at]) return `${name}, ${where}: ${number(seen.row[at], seen.row[at])}, ${isAside(key) ? (sinks.has(key) ? "a sink, left out of the shares" : "left out of the shares") : "out of sight"}.`;
  let rank = 1;
  for (let i = 0; i < seen.row.length; i++) if (seen.counts[i] && Math.abs(seen.row[i]) > Math.abs(seen.row[at])) rank++;
  const count = seen.counts.filter(Boolean).length, ranked = seen.isEven ? `one of ${count} alike` : `rank ${rank} of ${count}`;
  const parts = [`${name}, ${where}: ${number(seen.row[at], Math.abs(seen.row[at]))}, ${ranked}`];
  if (againstShown() !== "nothing") parts.push(`${percent(seen.shares[at])} of what is counted, ${percent(seen.expected[at])} expected: ${times(seen.ratio[at])}`);
  for (const [method, each] of importance) if (method !== state.method) { const row = unitRow(method, 1, 0, unit); if (row) parts.push(`${each.title.toLowerCase()} ${number(row[at], Math.abs(row[at]))}`); }
  return `${parts.join("; ")}.`;
}

// ---- the story of a generation: probability, and where its tokens read ---------------------------------------------------------

/** Shares of a generated token's row: of the prompt without sinks, of sinks, of the answer before it; null where rows do not include it. */
function sharesOf(choice) {
  const row = rowOf(state.method, state.layer, keys - 1 + choice), info = infos.get(state.method);
  if (!row) return null;
  let prompt = 0, sink = 0;
  for (let key = 0; key < keys; key++) if (sinks.has(key)) sink += row[key]; else prompt += row[key];
  if (!info.sumsToOne) { const all = prompt + sink || 1; return { prompt: prompt / all, sink: sink / all, own: null }; }
  return { prompt, sink, own: Math.max(0, 1 - prompt - sink) };
}

function storyFigure(width) {
  const count = tokens.length - keys, left = 84, step = Math.max(3, Math.min(72, (width - left - 8) / count)), high = 46, gap = 14, top = 6;
  const isWide = step >= 30, labels = isWide ? 20 : step >= 11 ? 64 : 6;
  return {
    left, step, count, width: Math.ceil(left + step * count + 8), height: top + 2 * high + gap + labels,
    draw: (pen) => {
      const { ink, muted, faint, accent } = inks(), own = muted, prompt = shade(0.62).fill, chosen = explained();
      pen.text(left - 8, top + high / 2 + 4, "probability", muted, "end");
      pen.text(left - 8, top + high + gap + high / 2 + 4, "read from", muted, "end");
      for (let choice = 0; choice < count; choice++) {
        const x = left + step * choice, inset = step >= 6 ? 2 : 0.5, shares = sharesOf(choice), isHere = chosen.includes(keys - 1 + choice);
        const chance = data.probabilities?.[choice] ?? 0;
        if (isHere) pen.rect(x, top - 4, step, 2 * high + gap + 8, faint);
        pen.rect(x + inset, top + high * (1 - chance), step - 2 * inset, Math.max(1, high * chance), accent);
        let y = top + high + gap;
        for (const [part, fill] of [[shares?.prompt, prompt], [shares?.own, own], [shares?.sink, faint]]) if (part) { pen.rect(x + inset, y, step - 2 * inset, high * Number(part), fill); y += high * Number(part); }
        const name = names[keys + choice];
        if (isWide) pen.text(x + step / 2, y + 14, fitted(name, step), isHere ? ink : muted, "middle", 0, isHere ? 600 : 400);
        else if (labels > 10) pen.text(x + step / 2 + 4, top + 2 * high + gap + 10, shortened(name, 8), isHere ? ink : muted, "end", -60, isHere ? 600 : 400);
      }
    },
  };
}

function paintStory() {
  if (!isGeneration) return;
  paintOn("story", storyFigure(room("story")));
  const shares = explained().map((position) => sharesOf(position - keys + 1)).filter(Boolean), mean = (part) => shares.reduce((sum, each) => sum + (each?.[part] ?? 0), 0) / (shares.length || 1);
  const chances = explained().map((position) => data.probabilities?.[position - keys + 1] ?? 0);
  const own = shares.some((each) => each?.own !== null) ? `, ${percent(mean("own"))} from its own answer` : "";
  byId("story-text").textContent = `${shortened(placePhrase(), 120)}: probability ${chances.map((chance) => number(chance)).slice(0, 8).join(", ")}; ${percent(mean("prompt"))} of what it read came from the prompt${own}${hasSinks ? `, ${percent(mean("sink"))} from the sink` : ""}.`;
}
