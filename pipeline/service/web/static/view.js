"use strict";

// Pictures of one or two files: the same planes, the same part of them, and if wanted the same contrast. The service
// draws them; here they are placed. Places are shares of the whole plane, so that files of other sizes fit too.

const controls = byId("view");
const view = { x: 0.5, y: 0.5, zoom: 1 };  // the share in the middle of each picture; 1 shows the whole plane
const MOST_PIXELS = 2048, SETTLE_MS = 150, LARGEST_SAMPLE = 48;
const asked = new URLSearchParams(location.search);

class Picture {
  constructor(figure) {
    this.path = figure.dataset.path;
    this.canvas = figure.querySelector("canvas");
    this.facts = figure.querySelector(".facts");
    this.error = figure.querySelector(".error");
    this.whole = this.part = null;  // bitmaps, and which rows and columns they show
    this.aborts = {};
  }

  async fetch(address, kind) {
    this.aborts[kind]?.abort();
    const abort = (this.aborts[kind] = new AbortController());
    for (let again = 0; ; again++) {
      const response = await fetch(address, { signal: abort.signal });
      if (response.ok) return response;
      if (![429, 503].includes(response.status) || again === 5) {
        const said = await response.json().catch(() => ({ detail: `status ${response.status}` }));
        throw new Error(said.detail);
      }
      await new Promise((wake) => setTimeout(wake, 500 * (again + 1)));
      if (abort.signal.aborted) throw new DOMException("another was asked for", "AbortError");
    }
  }

  async describe() {
    const response = await this.fetch(`/v1/images?${new URLSearchParams({ path: this.path })}`, "facts");
    this.image = await response.json();
    this.lengths = Object.fromEntries(this.image.axes.map((axis) => [axis.letter, axis.length]));
  }

  get sizes() {  // rows and columns of the plane
    return [...plane()].map((letter) => this.lengths[letter] ?? 1);
  }

  get composed() {
    return controls.elements.composite.checked && this.image.colours.length > 0 && !plane().includes("C");
  }

  address(further) {
    const along = (letter) => !plane().includes(letter) && !(this.composed && letter === "C");
    const at = this.image.axes.map((axis) => axis.letter).filter(along)
      .map((letter) => `${letter}:${Math.min(index(letter), this.lengths[letter] - 1)}`);
    const query = new URLSearchParams({ path: this.path, plane: plane(), ...further });
    if (at.length) query.set("at", at.join());
    if (this.image.dtype.startsWith("complex")) query.set("part", controls.elements.part.value);
    if (this.composed) query.set("composite", "true");
    return `/v1/images/slice?${query}`;
  }

  async load(kind, further) {
    const response = await this.fetch(this.address(further), kind);
    const bitmap = await createImageBitmap(await response.blob());
    const of = (name) => response.headers.get(`Millrace-${name}`);
    const [rows, columns] = [of("Rows"), of("Columns")].map((text) => text.split(":").map(Number));
    this.error.hidden = true;
    return { bitmap, rows, columns, low: Number(of("Low")), high: Number(of("High")), limits: of("Limits"), level: of("Level"), blocks: of("Blocks") };
  }

  // The whole plane, small; its contrast is that of its parts too.
  async loadWhole(contrast) {
    this.aborts.part?.abort();
    this.whole = await this.load("whole", { size: 1024, ...contrast });
    this.part = null;
    this.draw();
    this.settle();
  }

  async loadPart() {
    const [rows, columns] = this.sizes, scale = this.scale * devicePixelRatio;
    const around = (share, length, pixels) => {  // with a quarter more on each side
      const half = (0.75 * pixels) / this.scale, middle = share * length;
      return [Math.max(Math.floor(middle - half), 0), Math.min(Math.ceil(middle + half), length)];
    };
    const [top, bottom] = around(view.y, rows, this.canvas.clientHeight);
    const [left, right] = around(view.x, columns, this.canvas.clientWidth);
    const longest = Math.max(bottom - top, right - left);
    const shown = Math.max(this.whole.bitmap.width, this.whole.bitmap.height) / Math.max(...this.sizes);
    if (shown >= 1 || shown >= scale || bottom <= top || right <= left) {  // the whole plane is as fine
      this.part = null;
    } else {
      const size = Math.min(Math.ceil(longest / Math.max(Math.floor(1 / scale), 1)), MOST_PIXELS);
      const part = { rows: `${top}:${bottom}`, columns: `${left}:${right}`, size };
      this.part = await this.load("part", { ...part, ...this.contrast(this.whole) });
    }
    this.draw();
  }

  contrast({ low, high, limits }) {  // of a picture, for one of this file
    if (this.composed && limits.split(",").length === this.image.colours.length) return { limits };
    return low < high ? { low, high } : {};
  }

  settle() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.loadPart().catch((error) => this.refuse(error)), SETTLE_MS);
  }

  get fit() {  // pixels of the page for each sample if the whole plane is shown
    const [rows, columns] = this.sizes;
    return Math.min(this.canvas.clientWidth / columns, this.canvas.clientHeight / rows);
  }

  get scale() {
    return this.fit * view.zoom;
  }

  draw() {
    const { canvas, scale } = this, [rows, columns] = this.sizes;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!this.whole || !width) return;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    const paper = canvas.getContext("2d");
    paper.scale(devicePixelRatio, devicePixelRatio);
    paper.translate(width / 2 - view.x * columns * scale, height / 2 - view.y * rows * scale);
    paper.beginPath();
    paper.rect(0, 0, columns * scale, rows * scale);  // the last pixels may pass the edge
    paper.clip();
    for (const each of [this.whole, this.part].filter(Boolean)) {
      const [top, bottom] = each.rows, [left, right] = each.columns;
      paper.imageSmoothingEnabled = ((right - left) * scale) / each.bitmap.width < 2;
      paper.drawImage(each.bitmap, left * scale, top * scale, (right - left) * scale, (bottom - top) * scale);
    }
    this.tell();
  }

  tell() {
    const { image, whole, part } = this, shown = part ?? whole;
    const said = [`${image.axes.map((axis) => `${axis.letter} ${axis.length}`).join(" × ")}`, image.dtype];
    const [row, column] = [...plane()].map((letter) => image.axes.find((axis) => axis.letter === letter)?.step);
    if (row || column) said.push(row === column ? row : [row, column].filter(Boolean).join(" × "));
    if (image.levels > 1) said.push(`level ${shown.level} of ${image.levels}`);
    if (shown.blocks !== "1/1") said.push(`${shown.blocks} of the blocks read: zoom in for all`);
    const ends = whole.limits.split(",").map((pair) => pair.split(":").map((value) => number(Number(value))).join(" to "));
    if (!this.composed) said.push(ends[0]);
    this.facts.textContent = said.join(" · ");
    for (const [channel, colour] of (this.composed ? image.colours : []).entries()) {
      const mark = document.createElement("span");
      mark.className = "channel";
      mark.style.setProperty("--channel", `#${colour}`);
      mark.textContent = `${image.channels[channel] || `channel ${channel}`} ${ends[channel] ?? ""}`;
      this.facts.append(mark);
    }
  }

  refuse(error) {
    if (error.name === "AbortError") return;
    this.error.textContent = error instanceof TypeError ? "The service does not answer; try again in a moment." : printable(error.message);
    this.error.hidden = false;
  }
}

const pictures = Array.from(document.querySelectorAll("[data-path]"), (figure) => new Picture(figure));
let seen = [];  // those whose files can be shown

const number = (value) => String(Number(value.toPrecision(4)));
const plane = () => controls.elements.plane.value;
const slider = (letter) => controls.querySelector(`.sliders [data-axis="${letter}"] input[type=range]`);
const index = (letter) => Number(slider(letter)?.value ?? 0);

// What to look at

function offer() {  // planes and sliders for the axes of all files
  const lengths = {}, first = {}, names = seen.flatMap(({ image }) => (image.channels.some(Boolean) ? [image.channels] : []))[0] ?? [];
  for (const { image } of seen) {
    for (const { letter, length } of image.axes) lengths[letter] = Math.max(lengths[letter] ?? 0, length);
    Object.assign(first, image.at, { ...first });
  }
  const wanted = new Map((asked.get("at") ?? "").split(",").map((each) => each.split(":")));
  const letters = seen[0].image.axes.filter((axis) => lengths[axis.letter] > 1).map((axis) => axis.letter);
  const planes = letters.flatMap((row, place) => letters.slice(place + 1).map((column) => row + column));
  const usual = seen[0].image.plane;
  const shown = [usual, ...planes.filter((each) => each !== usual && each !== usual[1] + usual[0] && /^[XYZ]+$/.test(each))];
  controls.elements.plane.replaceChildren(...shown.map((each) => new Option(`${each[0]} down, ${each[1]} across`, each)));
  if (shown.includes(asked.get("plane"))) controls.elements.plane.value = asked.get("plane");
  controls.querySelector("[data-choice=plane]").hidden = shown.length < 2;
  controls.querySelector("[data-choice=composite]").hidden = !seen.some(({ image }) => image.colours.length);
  controls.elements.composite.checked = asked.has("composite");
  controls.querySelector("[data-choice=part]").hidden = !seen.some(({ image }) => image.dtype.startsWith("complex"));
  for (const [letter, length] of Object.entries(lengths)) {
    if (length < 2) continue;
    const row = document.createElement("label");
    const [name, range, place] = [document.createElement("span"), document.createElement("input"), document.createElement("output")];
    row.dataset.axis = letter;
    name.textContent = { T: "Time", C: "Channel", Z: "Z", E: "Echo", L: "Slice", A: "Average", M: "Map" }[letter] ?? letter;
    Object.assign(range, { type: "range", min: 0, max: length - 1, value: wanted.get(letter) ?? first[letter] ?? Math.floor(length / 2) });
    const tell = () => { place.textContent = `${range.value} of 0–${length - 1}${letter === "C" && names[range.value] ? `, ${names[range.value]}` : ""}`; };
    range.addEventListener("input", () => { tell(); look(); });
    range.tell = tell;
    tell();
    row.append(name, range, place);
    controls.querySelector(".sliders").append(row);
  }
  hideSliders();
  controls.hidden = false;
}

function hideSliders() {
  const isIdle = (letter) => plane().includes(letter) || (letter === "C" && seen.every((each) => each.composed));
  for (const row of controls.querySelectorAll("[data-axis]")) row.hidden = isIdle(row.dataset.axis);
}

function fixed() {
  const [low, high] = ["low", "high"].map((name) => controls.elements[name]).map((field) => (field.value.trim() === "" ? NaN : Number(field.value)));
  return low < high ? { low, high } : {};
}

let looking = null;
function look() {
  clearTimeout(looking);
  looking = setTimeout(() => show().catch((error) => seen[0].refuse(error)), 40);
}

async function show() {
  const { contrast, low, high } = controls.elements;
  const kept = contrast.value === "fixed" ? fixed() : {};
  const load = (picture, given) => picture.loadWhole(given).catch((error) => picture.refuse(error));
  const [first, ...others] = seen;
  if (contrast.value === "same") {
    await load(first, {});
    const whole = first.whole;
    await Promise.all(others.map((each) => load(each, whole ? each.contrast(whole) : {})));
  } else {
    await Promise.all(seen.map((each) => load(each, kept)));
  }
  if (contrast.value !== "fixed" && first.whole && !first.composed) [low.value, high.value] = [number(first.whole.low), number(first.whole.high)];
  const rows = Array.from(controls.querySelectorAll("[data-axis]:not([hidden])"), (row) => `${row.dataset.axis}:${index(row.dataset.axis)}`);
  asked.set("plane", plane());
  if (controls.elements.composite.checked) asked.set("composite", "1"); else asked.delete("composite");
  if (rows.length) asked.set("at", rows.join()); else asked.delete("at");
  history.replaceState(null, "", `?${asked}`);
}

controls.addEventListener("submit", (event) => event.preventDefault());
controls.addEventListener("change", ({ target }) => {
  if (target.name === "low" || target.name === "high") controls.elements.contrast.value = "fixed";
  if (target.name === "plane") { hideSliders(); Object.assign(view, { x: 0.5, y: 0.5, zoom: 1 }); }
  if (target.name === "composite") hideSliders();
  if (target.type !== "range") look();
});

// Moving and zooming

function move(picture, by) {  // by pixels of the page, at this picture's scale
  const [rows, columns] = picture.sizes, inside = (share) => Math.min(Math.max(share, 0), 1);
  view.x = inside(view.x - by.x / (columns * picture.scale));
  view.y = inside(view.y - by.y / (rows * picture.scale));
  place();
}

function zoom(picture, factor, at = null) {  // about a place of the canvas
  const most = Math.max(...seen.map((each) => LARGEST_SAMPLE / each.fit), 1);
  const before = picture.scale;
  view.zoom = Math.min(Math.max(view.zoom * factor, 1), most);
  if (view.zoom === 1) Object.assign(view, { x: 0.5, y: 0.5 });
  else if (at) {
    const [rows, columns] = picture.sizes, changed = 1 / before - 1 / picture.scale;
    view.x += ((at.x - picture.canvas.clientWidth / 2) * changed) / columns;
    view.y += ((at.y - picture.canvas.clientHeight / 2) * changed) / rows;
  }
  move(picture, { x: 0, y: 0 });
}

function place() {
  for (const each of seen) {
    each.canvas.classList.toggle("inside", view.zoom > 1);  // else a finger scrolls the page
    if (each.whole) { each.draw(); each.settle(); }
  }
}

function step(by) {  // through the planes: the last slider
  const row = [...controls.querySelectorAll("[data-axis]:not([hidden])")].at(-1);
  if (!row) return;
  const range = row.querySelector("input");
  range.value = Number(range.value) + by;
  range.tell();
  look();
}

const KEYS = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };

for (const picture of pictures) {
  const { canvas } = picture, touching = new Map();
  const at = (event) => ({ x: event.offsetX, y: event.offsetY });
  const spread = () => { const [one, two] = [...touching.values()]; return Math.hypot(one.x - two.x, one.y - two.y); };
  canvas.addEventListener("wheel", (event) => {
    if (!picture.whole || (view.zoom === 1 && event.deltaY > 0)) return;  // the page scrolls
    event.preventDefault();
    zoom(picture, 2 ** (-Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY) / 200, 0.5)), at(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    touching.set(event.pointerId, at(event));
  });
  canvas.addEventListener("pointermove", (event) => {
    const from = touching.get(event.pointerId);
    if (!from || !picture.whole) return;
    const before = touching.size === 2 ? spread() : 0;
    touching.set(event.pointerId, at(event));
    move(picture, { x: (event.offsetX - from.x) / touching.size, y: (event.offsetY - from.y) / touching.size });
    if (before) zoom(picture, spread() / before, at(event));
  });
  for (const over of ["pointerup", "pointercancel"]) canvas.addEventListener(over, (event) => touching.delete(event.pointerId));
  canvas.addEventListener("keydown", (event) => {
    if (!picture.whole || event.ctrlKey || event.metaKey || event.altKey) return;
    if (KEYS[event.key]) { const [x, y] = KEYS[event.key]; move(picture, { x, y }); }
    else if (event.key === "+" || event.key === "=") zoom(picture, 1.5);
    else if (event.key === "-") zoom(picture, 1 / 1.5);
    else if (event.key === "0") zoom(picture, 0);
    else if (event.key === "PageUp" || event.key === "PageDown") step(event.key === "PageUp" ? 1 : -1);
    else return;
    event.preventDefault();
  });
}
for (const button of controls.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => { if (seen.length) zoom(seen[0], Number(button.dataset.zoom)); });
}
addEventListener("resize", () => place());

(async () => {
  await Promise.all(pictures.map((each) => each.describe().catch((error) => each.refuse(error))));
  seen = pictures.filter((each) => each.image);
  for (const each of pictures) each.canvas.hidden = !each.image;
  if (seen.length) { offer(); await show(); }
})();
