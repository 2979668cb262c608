// Puts the page together, and keeps it new: the server says when a run has grown, and what is shown is asked for again.

const shoal = (window.shoal = { firstChart: 0, drawn: 0, updates: 0, errors: [] });
const CURVES = [["Loss", "loss", short], ["Throughput: samples a second", "samples_per_second", short], ["Learning rate", "lr", short], ["Gradient norm", "grad_norm", short]];
const MOST_OWN = 24;
const charts = new Map();
let heat, split, timeline, memory, serverCurve, servers, pipeline, states, events, differences;
let looking = null, pinned = null, slowly = 0;

window.addEventListener("error", (event) => shoal.errors.push(String(event.message)));
window.addEventListener("unhandledrejection", (event) => shoal.errors.push(String(event.reason)));

function build() {
  for (const [title, name, format] of CURVES.slice(0, 2)) charts.set(name, new Chart(title, name, format));
  heat = new Heat(openSteps);
  for (const [title, name, format] of CURVES.slice(2)) charts.set(name, new Chart(title, name, format));
  split = new Panel("Where a step's time goes, by rank");
  memory = new Panel("Memory, by rank");
  timeline = shoal.timeline = new Timeline();
  pipeline = new Panel("Pipeline: the schedule as it ran", true);
  serverCurve = new Chart("Servers: busy share", "busy", (v) => `${(100 * v).toFixed(0)} %`, { range: () => [0, 1], unit: "s" });
  serverCurve.box.hidden = true;
  servers = new Panel("Servers: how stale parts were");
  differences = new Panel("Settings that differ", true);
  states = new Panel("Ranks", true);
  events = new Panel("Events", true);
}

async function openSteps(first, last) {
  const room = Math.max(2, last - first);
  pinned = { first: Math.max(1, first - room), last: last + room };
  timeline.set(await get("spans", { run: view.shown, ...pinned }));
  timeline.showSteps(first, last);
  timeline.canvas.scrollIntoView({ block: "center", behavior: "smooth" });
  timeline.canvas.focus({ preventScroll: true });
  if (!EXPORTED) showPipeline(pipeline, await get("pipeline", { run: view.shown, step: last }));
}

function openEvent(after) { setRange(after - 50, after + 50); charts.get("loss").canvas.scrollIntoView({ block: "center" }); }

function showHeader() {
  const found = view.runs.map((run, i) => {
    const conditions = run.states.map((state) => state.condition), worst = ["failed", "dead", "silent", "running", "ended"].find((c) => conditions.includes(c)) || (run.end ? "ended" : "silent");
    const steps = run.header.steps, step = steps ? `${run.last.toLocaleString("en")} / ${steps.toLocaleString("en")}` : run.last.toLocaleString("en");
    const lead = run.states[0], left = steps && lead && lead.seconds && worst === "running" ? `, ${age((steps - run.last) * lead.seconds)} left` : "";
    const facts = [run.header.strategy, run.ranks.length > 1 && `${run.ranks.length} ranks`].filter(Boolean).join(", ");
    const several = view.runs.length > 1, choose = several ? { onclick: () => showRun(i), "aria-pressed": String(i === view.shown), title: "Show this run's ranks" } : {};
    return el(several ? "button" : "div", { class: "run", ...choose }, several ? el("i", { class: "swatch", style: { background: lineColour(i) } }) : null,
      el("b", {}, run.name), el("span", { class: `pill ${worst}` }, worst), el("span", {}, `step ${step}`),
      el("span", { class: "soft" }, `${facts}${left}${run.loaded ? "" : ", reading the log"}${run.bad ? `, ${run.bad} unreadable lines` : ""}`));
  });
  document.getElementById("runs").replaceChildren(...found);
  document.title = `${view.runs.map((run) => run.name).join(", ")} · shoal`;
}

// Panels about ranks show one run at a time.
function showRun(number) {
  view.shown = number;
  pinned = null;
  showHeader();
  refresh(true);
}

function showRange() {
  const text = view.last ? `steps ${view.first.toLocaleString("en")} to ${view.last.toLocaleString("en")}` : "";
  document.getElementById("range").textContent = text;
  document.getElementById("reset").hidden = !view.last;
}

async function showCurves() {
  const names = [...charts.keys()], width = Math.max(200, Math.min(1200, charts.get("loss").canvas.clientWidth || 600));
  const all = await Promise.all(view.runs.map((run, i) => get("series", { run: i, names: names.join(","), points: width, ...rangeQuery() })));
  for (const [name, chart] of charts) {
    const curves = all.map((each) => each.curves[name] || null);
    const any = curves.some((curve) => curve && curve.mean.some(finite));
    chart.box.hidden = !any && name !== "loss";
    if (!chart.box.hidden) chart.set(curves);
  }
}

function addOwn() {
  const names = [...new Set(view.runs.flatMap((run) => run.values))].slice(0, MOST_OWN);
  for (const name of names) {
    if (charts.has(`log:${name}`)) continue;
    const chart = new Chart(name, `log:${name}`);
    charts.set(`log:${name}`, chart);
    document.getElementById("main").insertBefore(chart.box, split.box);
  }
}

async function showRest() {
  const shown = view.runs[view.shown], run = view.shown, query = { run, ...rangeQuery() };
  if (view.runs.length > 1) for (const each of [heat, split, memory, pipeline, servers, serverCurve, timeline]) each.box.querySelector("h2").dataset.run = shown.name;
  const [h, s, m, v, d] = await Promise.all([get("heat", { ...query, columns: 320 }), get("split", query), get("memory", { run }), get("servers", { run }), get("differences")]);
  heat.set(h);
  showSplit(split, s);
  showMemory(memory, m, shown.states);
  showServers(servers, serverCurve, v);
  showDifferences(differences, d);
  if (!pinned) {
    timeline.set(await get("spans", { ...query, most: view.last ? 400000 : 60000 }));
    showPipeline(pipeline, await get("pipeline", view.last ? { run, step: view.last } : { run }));
  }
  fillRows();
}

async function refresh(everything) {
  if (looking) { refresh.again = refresh.again || everything || "curves"; return looking; }
  looking = (async () => {
    view.runs = await get("runs");
    addOwn();
    showHeader();
    await showCurves();
    shoal.updates++;
    const all = await Promise.all(view.runs.map((run, i) => get("marks", { run: i })));
    view.marks = all.flatMap((marks, run) => marks.map((mark) => ({ ...mark, run }))).sort((a, b) => (a.time || 0) - (b.time || 0));
    for (const chart of charts.values()) if (!chart.box.hidden) chart.draw();
    showStates(states, view.runs);
    showEvents(events, openEvent);
    if (everything === true || performance.now() - slowly > 3000) { slowly = performance.now(); await showRest(); }
  })();
  try { await looking; } catch (error) { shoal.errors.push(String(error)); } finally { looking = null; }
  if (refresh.again) { const again = refresh.again === true; refresh.again = null; await refresh(again); }
}

// Whoever looks at a page whose server has gone must not take it for the present.
function showConnection(there) {
  const text = document.getElementById("stale");
  if (there !== text.hidden) text.textContent = `shoal page has ended; this is of ${new Date().toLocaleTimeString()}`;
  text.hidden = there;
}

function keys(event) {
  if (event.target.closest && event.target.closest("input, select, dialog")) return;
  if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "t" && !event.ctrlKey && !event.metaKey) toggleTheme();
}

function start() {
  build();
  view.listeners.push(showRange, () => { for (const chart of charts.values()) if (!chart.box.hidden) chart.draw(); pinned = null; refresh(true); });
  document.getElementById("reset").addEventListener("click", resetRange);
  document.getElementById("theme").addEventListener("click", toggleTheme);
  document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
  document.addEventListener("keydown", keys);
  refresh(true);
  if (EXPORTED) return;
  let timer = 0;
  const live = new EventSource("api/live");
  live.onmessage = () => { if (!timer && !document.hidden) timer = setTimeout(() => { timer = 0; refresh(false); }, 100); };
  live.onopen = () => showConnection(true);
  live.onerror = () => showConnection(false);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(true); });
  setInterval(() => { if (!document.hidden && !looking) { get("runs").then((found) => { view.runs = found; showHeader(); showStates(states, found); }).catch(() => {}); } }, 5000);
}

start();
