"use strict";
// What all charts share: requests, elements, numbers as people read them, colours, and the range of steps that is shown.
// Text from a log only ever becomes text: textContent and fillText, never HTML.

const LINES = ["--accent", "--exposed", "--update", "--bucket", "--recovery", "--data"];
const KINDS = ["anchor", "data", "compute", "exposed", "update", "forward", "backward", "weight", "bucket", "checkpoint",
  "recovery", "between"];

const view = { runs: [], shown: 0, marks: [], first: 0, last: 0, charts: [], listeners: [] };

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) made.append(child);
  return made;
}

async function get(name, query) {
  query = query || {};
  if (EXPORTED) {
    const found = EXPORTED["run" in query ? `${name}/${query.run}` : name];
    if (typeof found !== "string") return found;
    return Uint8Array.from(atob(found), (c) => c.charCodeAt(0)).buffer;
  }
  const answer = await fetch(`api/${name}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.headers.get("Content-Type").startsWith("application/json") ? answer.json() : answer.arrayBuffer();
}

function finite(value) { return typeof value === "number" && isFinite(value); }

function short(value) {
  if (!finite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (!finite(value)) return "–";
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (Math.abs(value) >= size) return value < 120 || unit !== "s" ? `${Number((value / size).toPrecision(3))} ${unit}` : age(value);
  }
  return value === 0 ? "0 s" : `${Math.round(value * 1e9)} ns`;
}

function age(value) {
  for (const [unit, size] of [["s", 60], ["min", 60], ["h", 24]]) {
    if (value < size) return `${Math.round(value)} ${unit}`;
    value /= size;
  }
  return `${value.toFixed(1)} d`;
}

function bytes(value) {
  if (!finite(value)) return "–";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) return `${Number(value.toPrecision(3))} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

const colours = {};
function colour(name) {
  if (!(name in colours)) colours[name] = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return colours[name];
}
function lineColour(run) { return colour(LINES[run % LINES.length]); }

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const name of Object.keys(colours)) delete colours[name];
  try { localStorage.setItem("shoal-theme", theme); } catch { /* a file may have no storage */ }
  for (const chart of view.charts) { if (chart.recolour) chart.recolour(); chart.draw(); }
}
function toggleTheme() { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); }
(function firstTheme() {
  let kept = null;
  try { kept = localStorage.getItem("shoal-theme"); } catch { /* likewise */ }
  document.documentElement.dataset.theme = kept || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
})();

// The range of steps that all curves show: 0, 0 is everything.
function lastStep() { return Math.max(1, ...view.runs.map((run) => run.last || 0)); }
function range() { return view.last ? [view.first, view.last] : [1, lastStep()]; }
function setRange(first, last) {
  const end = lastStep();
  first = Math.max(1, Math.round(first));
  last = Math.min(end, Math.round(last));
  if (last - first < 2) { const middle = (first + last) >> 1; first = Math.max(1, middle - 1); last = Math.min(end, first + 2); }
  const all = first <= 1 && last >= end;
  view.first = all ? 0 : first;
  view.last = all ? 0 : last;
  for (const listener of view.listeners) listener();
}
function resetRange() { setRange(1, lastStep()); }
function rangeQuery() { return view.last ? { first: view.first, last: view.last } : {}; }

// A canvas as sharp as the screen, that draws again when its size changes.
function sharp(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 300;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; canvas.style.height = `${height}px`; }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
  return [pen, width, ratio];
}

// Once the browser has laid the page out: to draw in the observer itself would change what it observes.
function redraw(chart, canvas) { new ResizeObserver(() => requestAnimationFrame(() => chart.draw())).observe(canvas); }

function card(title, wide, ...extra) {
  const readout = el("span", { class: "readout", "aria-live": "off" });
  const head = el("div", { class: "head" }, el("h2", {}, title), ...extra, readout);
  const box = el("section", { class: wide ? "card wide" : "card", "aria-label": title }, head);
  document.getElementById("main").append(box);
  return { box, head, readout };
}

// A card that would stand alone in its row takes all of it.
function fillRows() {
  let row = [];
  const main = document.getElementById("main");
  for (const box of [...main.children, null]) {
    if (box && box.hidden) continue;
    if (box) box.classList.remove("whole");
    if (box && !box.classList.contains("wide")) { row.push(box); continue; }
    if (row.length % 2) row[row.length - 1].classList.add("whole");
    row = [];
  }
}

function ticks(low, high, count, whole) {
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const gap = (whole && power < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((each) => each * power).find((each) => each >= rough) || rough;
  const found = [];
  for (let at = Math.ceil(low / gap) * gap; at <= high + gap * 1e-9 && found.length < 50; at += gap) found.push(at);
  return found;
}

function legend(entries) {
  return el("div", { class: "legend" }, entries.map(([name, fill]) =>
    el("span", {}, el("i", { class: "swatch", style: { background: fill } }), name)));
}
