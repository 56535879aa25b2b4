// @ts-check
// ---- words, numbers and colours ------------------------------------------------------------------------------------------

/** A text, shortened to a number of characters. */
function shortened(text, most) {
  const characters = Array.from(text.slice(0, 4 * most));
  return characters.length > most ? characters.slice(0, most - 1).join("") + "…" : characters.join("");
}

const shorts = names.map((name) => shortened(name, 12)); // names: as a person reads them; what cannot be seen is escaped by Python
const isolated = (text) => `\u2068${shortened(text, 40)}\u2069`; // right-to-left text moves nothing around it
const quoted = (place) => `“${isolated(names[place])}”`;
const layerName = (layer) => (data.layers ? data.layers[layer - 1] : String(layer));
const layerPhrase = (layer) => (data.layers ? layerName(layer) : `layer ${layer}`);
/** The tokens of a group as they stand in the text. */
const joined = (group) => group.map((key, at) => (at && data.starts[key] ? " " : "") + names[key]).join("");
const unitName = (unit, place) => (unit === "token" ? names[place] : (unit === "sentence" && data.segments?.[place]) || joined(UNITS[unit][place].slice(0, 80)));

/** As many digits as the largest number beside it asks for. */
const number = (value, most = 1) => (most !== 0 && (most < 5e-5 || most >= 1e4)
  ? value.toExponential(2)
  : value.toFixed(most >= 0.05 || most === 0 ? 3 : most >= 0.005 ? 4 : most >= 0.0005 ? 5 : 6));
const percent = (share) => `${share >= 0.0995 || share === 0 ? Math.round(100 * share) : (100 * share).toPrecision(share >= 0.001 ? 2 : 1)} %`;
/** "3.1 times", "a third": a ratio for people. */
const times = (ratio) => (Number.isFinite(ratio) ? `${ratio >= 9.95 ? Math.round(ratio) : ratio.toPrecision(2)} times` : "more than expected");

const importanceOrMethod = (name) => infos.get(name) ?? importance.get(name);
const label = (method) => importanceOrMethod(method).title;

const RAMPS = data.colours; // orange is less, or against the target: no kind of colour blindness takes it for blue
const INKS = {
  light: { paper: "#ffffff", card: "#f6f8fa", ink: "#1b2430", muted: "#55606e", faint: "#d9e0e7", accent: "#1c64a8", cut: "#a63603" },
  dark: { paper: "#11161c", card: "#171e26", ink: "#e4eaf1", muted: "#a3b0be", faint: "#2b3642", accent: "#7db8ea", cut: "#f0a364" },
};
const darkMedia = matchMedia("(prefers-color-scheme: dark)");
const theme = () => state.theme ?? (darkMedia.matches ? "dark" : "light");
const inks = () => INKS[theme()];

/** 64 colours of the scale, each with the text colour, black or white, that stands out more. */
const scaleOf = remembered(4, (name) => Array.from({ length: 64 }, (_, i) => {
  const stops = RAMPS[name], at = (i / 63) * (stops.length - 1), low = Math.min(stops.length - 2, Math.floor(at));
  const part = (stop, place) => parseInt(stops[stop].slice(2 * place + 1, 2 * place + 3), 16);
  const rgb = [0, 1, 2].map((place) => Math.round(part(low, place) + (at - low) * (part(low + 1, place) - part(low, place))));
  const linear = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  const hex = `#${rgb.map((c) => c.toString(16).padStart(2, "0")).join("")}`;
  return { fill: hex, text: (luminance + 0.05) ** 2 > 0.0525 ? "#000000" : "#ffffff" };
}));
const shade = (share) => scaleOf(theme() + (share < 0 ? "Against" : ""))[Math.min(63, Math.round(63 * Math.abs(share)))];
/** The colour of a comparison: what is read less than expected stays paler, so that what is read more leads the eye. */
const PALER = 0.55;
const tint = (tone, against) => shade(against !== "nothing" && tone < 0 ? PALER * tone : tone);
/** The colours of a line of its own for each of a few tokens. */
const lineColour = (at) => (theme() === "dark" && RAMPS.lines[at % RAMPS.lines.length] === "#000000" ? "#ffffff" : RAMPS.lines[at % RAMPS.lines.length]);
