// @ts-check
// ---- elements, and pens: one drawing, on canvas or as SVG -------------------------------------------------------------------

/** @returns {any} */
function element(tag, className = "", text = undefined) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(text, act, className = "") {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

class CanvasPen {
  constructor(context) { this.context = context; }
  fillWith(colour) { if (this.fill !== colour) this.context.fillStyle = this.fill = colour; } // parsing a colour takes longer than filling
  curve(x1, y1, x2, y2, stroke, width, alpha = 1, dash = "") {
    const c = this.context, middle = (y1 + y2) / 2;
    c.globalAlpha = alpha; c.strokeStyle = stroke; c.lineWidth = width; c.setLineDash(dash ? dash.split(" ").map(Number) : []);
    c.beginPath(); c.moveTo(x1, y1); c.bezierCurveTo(x1, middle, x2, middle, x2, y2); c.stroke();
    c.globalAlpha = 1; c.setLineDash([]);
  }
  line(points, stroke, width, dash = "") {
    const c = this.context;
    c.strokeStyle = stroke; c.lineWidth = width; c.setLineDash(dash ? dash.split(" ").map(Number) : []);
    c.beginPath(); points.forEach(([x, y], at) => (at ? c.lineTo(x, y) : c.moveTo(x, y))); c.stroke(); c.setLineDash([]);
  }
  dot(x, y, radius, fill, stroke = null, width = 1) {
    const c = this.context;
    c.beginPath(); c.arc(x, y, radius, 0, 7); this.fillWith(fill); c.fill();
    if (stroke) { c.strokeStyle = stroke; c.lineWidth = width; c.stroke(); }
  }
  rect(x, y, width, height, fill, alpha = 1) { const c = this.context; c.globalAlpha = alpha; this.fillWith(fill); c.fillRect(x, y, width, height); c.globalAlpha = 1; }
  text(x, y, text, fill, anchor = "start", angle = 0, weight = 400, points = 11) {
    const c = this.context;
    c.save(); c.translate(x, y); c.rotate((angle * Math.PI) / 180);
    c.font = `${weight} ${points}px ${FONT}`; c.textAlign = { start: "left", middle: "center", end: "right" }[anchor]; c.fillStyle = fill;
    c.direction = "ltr"; c.fillText(text, 0, 0); c.restore();
  }
  image(source, x, y, width, height) { this.context.drawImage(source, x, y, width, height); }
}

const SVG = "http://www.w3.org/2000/svg";

class SvgPen {
  constructor(svg) { this.svg = svg; }
  add(tag, attributes, text = undefined) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== "" && value !== null) made.setAttribute(name, typeof value === "number" ? String(+value.toFixed(2)) : value);
    if (text !== undefined) made.textContent = text;
    this.svg.append(made);
  }
  curve(x1, y1, x2, y2, stroke, width, alpha = 1, dash = "") {
    const middle = (y1 + y2) / 2, points = [x1, y1, x1, middle, x2, middle, x2, y2].map((v) => +v.toFixed(1));
    this.add("path", { d: `M${points[0]} ${points[1]}C${points.slice(2).join(" ")}`, fill: "none", stroke, "stroke-width": width, "stroke-opacity": alpha, "stroke-dasharray": dash });
  }
  line(points, stroke, width, dash = "") {
    this.add("path", { d: points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join(""), fill: "none", stroke, "stroke-width": width, "stroke-dasharray": dash });
  }
  dot(x, y, radius, fill, stroke = "none", width = 1) { this.add("circle", { cx: x, cy: y, r: radius, fill, stroke: stroke ?? "none", "stroke-width": width }); }
  rect(x, y, width, height, fill, alpha = 1) { this.add("rect", { x, y, width, height, fill, ...(alpha < 1 ? { "fill-opacity": alpha } : {}) }); }
  text(x, y, text, fill, anchor = "start", angle = 0, weight = 400, points = 11) {
    const turn = angle ? { transform: `rotate(${angle} ${x.toFixed(1)} ${y.toFixed(1)})` } : {};
    this.add("text", { x, y, fill, "text-anchor": anchor, "font-weight": weight, ...(points === 11 ? {} : { "font-size": points }), ...turn }, text);
  }
  image(source, x, y, width, height) { this.add("image", { href: source.src, x, y, width, height, preserveAspectRatio: "none" }); }
}

function newSvg({ width, height }) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, "font-family": FONT, "font-size": 11 })) svg.setAttribute(name, String(value));
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

/** A canvas of a drawing, which screen readers pass over: the table says it. The second one follows the pointer. */
function canvasAt(id, layer) {
  const stage = byId(id);
  while (stage.querySelectorAll("canvas").length <= layer) {
    const canvas = element("canvas");
    canvas.setAttribute("aria-hidden", "true");
    stage.append(canvas);
  }
  return stage.querySelectorAll("canvas")[layer];
}

function paintOn(id, figure, layer = 0) {
  canvasOf(figure, canvasAt(id, layer), devicePixelRatio || 1);
}

/** Room for a drawing, in pixels. */
const room = (id) => Math.max(280, byId(id).parentElement.clientWidth);

/** The part of a text that fits a width in pixels, by a safe estimate of its letters' width. */
const fitted = (text, pixels, points = 11) => shortened(text, Math.max(1, Math.floor(pixels / (0.56 * points))));

// ---- what is saved carries its title, legend, model and method ---------------------------------------------------------------

function withFrame(figure, title) {
  const { paper, ink, muted } = inks(), width = Math.max(figure.width, 460), top = 44, bottom = 46, letters = Math.floor((width - 16) / 6.2);
  const about = [shortened(data.model, 30), methodPhrase(), isGeneration ? "" : data.prediction?.[0]].filter(Boolean).join(" · ");
  return {
    width, height: figure.height + top + bottom,
    draw: (pen) => {
      pen.rect(0, 0, width, figure.height + top + bottom, paper);
      pen.text(8, 18, shortened(title, letters), ink, "start", 0, 600, 13);
      pen.text(8, 35, shortened(about, letters), muted);
      drawShifted(pen, figure, top);
      drawLegend(pen, 8, top + figure.height + 10);
      pen.text(8, top + figure.height + 40, shortened(`attnflow · ${data.source}`, letters), muted);
    },
  };
}

/** The figure, further down. */
function drawShifted(pen, figure, down) {
  const moved = Object.create(pen), places = { curve: [1, 3], dot: [1], rect: [1], text: [1], image: [2] };
  for (const [name, ys] of Object.entries(places)) moved[name] = (...args) => { ys.forEach((at) => { args[at] += down; }); return pen[name](...args); };
  moved.line = (points, ...rest) => pen.line(points.map(([x, y]) => [x, y + down]), ...rest);
  figure.draw(moved);
}

/** The scale of the colours, with what they stand for. */
function drawLegend(pen, x, y) {
  const { muted } = inks(), signed = againstShown() !== "nothing" || importance.get(state.method)?.signed;
  for (let i = 0; i < 64; i++) pen.rect(x + 2 * i, y, 2.2, 8, tint(signed ? (i - 31.5) / 31.5 : i / 63, againstShown()).fill);
  pen.text(x + 136, y + 8, legendPhrase(), muted);
}

function save(figure, name, title, kind) {
  const whole = withFrame(figure, title), file = `attnflow-${name}-${state.method.replace(/[^\w-]+/g, "-")}.${kind}`;
  if (kind === "png") return canvasOf(whole, element("canvas"), 2).toBlob((blob) => download(blob, file), "image/png");
  const svg = newSvg(whole), pen = new SvgPen(svg);
  pen.add("title", {}, title);
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

/** Buttons that save a drawing; `figure` makes it when it is asked for. */
function addSaves(id, name, title, figure) {
  const box = byId(id);
  for (const kind of ["png", "svg"]) {
    const made = button(`Save ${kind.toUpperCase()}`, () => save(figure(), name, title(), kind));
    made.dataset.save = kind;
    box.append(made);
  }
}
