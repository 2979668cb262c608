// What is no curve: time of each rank, memory, servers, a pipeline's schedule, states, events, and runs compared.

const PARTS = ["data", "compute", "exposed", "update", "other", "between"];

// On the timeline "compute" is what lies around the passes; here it is all of it.
function partColour(name) { return name === "compute" ? "var(--forward)" : `var(--${name})`; }

class Panel {
  constructor(title, wide, ...extra) {
    const { box, readout } = card(title, wide, ...extra);
    this.box = box;
    this.readout = readout;
    this.body = el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": title });
    box.append(this.body);
    box.hidden = true;
  }

  set(...content) {
    this.box.hidden = false;
    const top = this.body.scrollTop;
    this.body.replaceChildren(...content.flat());
    this.body.scrollTop = top;
  }

  hide() { this.box.hidden = true; }
}

function stacked(parts, longest, label) {
  return el("div", { class: "bar", role: "img", "aria-label": label }, parts.map(([fill, size, title]) =>
    el("i", { title, style: { width: `${Math.max(0, (100 * (size || 0)) / (longest || 1))}%`, background: fill } })));
}

function showSplit(panel, found) {
  if (!found.rows.length) return panel.hide();
  const totals = found.rows.map((row) => row.parts.reduce((a, b) => a + (b || 0), 0)), longest = Math.max(...totals);
  const bars = found.rows.flatMap((row, i) => {
    const parts = row.parts.map((size, p) => [partColour(PARTS[p]), size, `${PARTS[p]} ${seconds(size)}`]);
    const text = row.parts.map((size, p) => `${PARTS[p]} ${seconds(size)}`).join(", ");
    return [el("span", {}, `rank ${row.rank}`), stacked(parts, longest, `rank ${row.rank}: ${text}`), el("span", { class: "soft" }, seconds(totals[i]))];
  });
  panel.set(el("div", { class: "bars" }, bars), legend(PARTS.map((name) => [name === "between" ? "between steps: the script, checkpoints" : name, partColour(name)])));
  const exposed = found.rows.map((row, i) => (row.parts[2] || 0) / (totals[i] || 1));
  panel.readout.textContent = `waiting for others: ${(100 * Math.min(...exposed)).toFixed(0)} to ${(100 * Math.max(...exposed)).toFixed(0)} %`;
}

function showMemory(panel, found, states) {
  const now = new Map(states.map((state) => [state.rank, state.memory])), peaks = found.rows.filter((row) => finite(row.peak));
  const kinds = [...new Set([...Object.keys(found.predicted || {}), ...Object.keys(found.measured || {})])]
    .filter((kind) => (found.predicted || {})[kind] || (found.measured || {})[kind]);
  if (!peaks.length && !kinds.length) return panel.hide();
  const longest = Math.max(1, found.foreseen || 0, ...peaks.map((row) => row.peak));
  const bars = peaks.flatMap((row) => {
    const used = Math.min(row.peak, now.get(row.rank) || row.peak);
    return [el("span", {}, `rank ${row.rank}`),
      stacked([["var(--forward)", used, `now ${bytes(used)}`], ["var(--other)", row.peak - used, `peak ${bytes(row.peak)}`]], longest, `rank ${row.rank}: peak ${bytes(row.peak)}`),
      el("span", { class: "soft" }, bytes(row.peak))];
  });
  if (found.foreseen) bars.push(el("span", {}, "predicted"), stacked([["var(--update)", found.foreseen, "predicted by shoal plan"]], longest, `predicted: ${bytes(found.foreseen)}`), el("span", { class: "soft" }, bytes(found.foreseen)));
  const content = [el("div", { class: "bars" }, bars), legend([["resident now", "var(--forward)"], ["peak", "var(--other)"]])];
  if (kinds.length) {
    const cell = (side, kind) => el("td", { class: "n" }, side && finite(side[kind]) ? bytes(side[kind]) : "–");
    content.push(el("table", {}, el("tr", {}, el("th", {}, "kind, of the first rank"), el("th", { class: "n" }, "predicted"), el("th", { class: "n" }, "measured")),
      kinds.map((kind) => el("tr", {}, el("td", {}, kind), cell(found.predicted, kind), cell(found.measured, kind)))));
  }
  panel.set(content);
}

function showServers(panel, chart, found) {
  if (!found.rows.length) { chart.box.hidden = true; return panel.hide(); }
  chart.box.hidden = false;
  const begin = found.rows[0].time, x = found.rows.map((row) => row.time - begin);
  const count = Math.max(...found.rows.map((row) => row.busy.length), 0), queued = Math.max(...found.rows.map((row) => row.queue.length), 0);
  chart.options.range = () => [0, Math.max(1, x[x.length - 1])];
  chart.options.names = [...Array(count).keys()].map((i) => `server ${i}`);
  chart.set([...Array(Math.min(6, count)).keys()].map((i) => ({ x, mean: found.rows.map((row) => row.busy[i]) })));
  const total = Object.values(found.staleness).reduce((a, b) => a + b, 0) || 1;
  const bars = Object.entries(found.staleness).flatMap(([ahead, n]) => [el("span", {}, `${ahead} steps ahead`),
    stacked([["var(--forward)", n, `${n} parts`]], total, `${ahead} steps ahead: ${n} parts`), el("span", { class: "soft" }, `${((100 * n) / total).toFixed(0)} %`)]);
  const last = found.rows[found.rows.length - 1];
  panel.set(el("div", { class: "bars" }, bars), queued ? el("p", {}, `queues: ${last.queue.map(short).join(", ")}`) : null);
}

function showPipeline(panel, found) {
  if (!found.lanes.length || !found.lanes.some((lane) => lane.passes.some((pass) => pass[2] > 0))) return panel.hide();
  const canvas = el("canvas", { role: "img", "aria-label": `Passes of step ${found.step} by rank` });
  panel.set(canvas, legend([["F: forward", "var(--forward)"], ["B: backward", "var(--backward)"], ["W: weights' half of a backward", "var(--weight)"], ["bubble", "var(--grid)"]]));
  panel.readout.textContent = `step ${found.step}: ${seconds(found.seconds)}, bubbles ${found.lanes.map((lane) => `${(100 * lane.bubble).toFixed(0)} %`).join(", ")}`;
  panel.draw = () => {
    const lane = Math.max(14, Math.min(30, 260 / found.lanes.length)), [pen, width] = sharp(canvas, found.lanes.length * lane), left = 58;
    pen.textBaseline = "middle";
    found.lanes.forEach((row, r) => {
      const top = r * lane + 2;
      pen.textAlign = "right";
      pen.fillStyle = colour("--soft");
      pen.fillText(`rank ${row.rank}`, left - 6, top + lane / 2 - 2);
      pen.fillStyle = colour("--grid");
      pen.fillRect(left, top, width - left, lane - 4);
      pen.textAlign = "center";
      for (const [kind, micro, , begin, took] of row.passes) {
        const x = left + (begin / found.seconds) * (width - left), wide = Math.max(1, (took / found.seconds) * (width - left));
        pen.fillStyle = colour({ F: "--forward", B: "--backward", W: "--weight" }[kind]);
        pen.fillRect(x, top, wide > 3 ? wide - 0.7 : wide, lane - 4);
        pen.fillStyle = "#fff";
        if (wide > 16) pen.fillText(micro, x + wide / 2, top + lane / 2 - 2);
      }
    });
  };
  panel.draw();
  if (!view.charts.includes(panel)) { view.charts.push(panel); redraw(panel, panel.body); }
}

function showStates(panel, runs) {
  const rows = runs.flatMap((run) => run.states.map((state) => [run, state]));
  if (!rows.length) return panel.hide();
  const several = runs.length > 1, hosts = new Set(rows.map(([, state]) => state.host)).size > 1, now = Date.now() / 1000;
  const names = [several && "run", "rank", hosts && "host", "state", "step", "doing", "for", "memory"].filter(Boolean), right = ["rank", "step", "for", "memory"];
  const look = (name) => (right.includes(name) ? { class: "n" } : name === "doing" ? {} : { class: "s" });
  panel.set(el("table", {}, el("tr", {}, names.map((name) => el("th", look(name), name))),
    rows.slice(0, 512).map(([run, state]) => {
      const until = state.condition === "running" && !EXPORTED ? now : state.written;
      const cells = { run: run.name, rank: state.rank, host: state.host, step: state.steps ? `${state.step} / ${state.steps}` : state.step,
        doing: state.condition === "running" || state.condition === "dead" || state.condition === "silent" ? state.doing : state.why,
        for: state.condition === "ended" ? "" : age(Math.max(0, until - state.since)), memory: bytes(state.memory) };
      return el("tr", {}, names.map((name) => name === "state"
        ? el("td", look(name), el("span", { class: `pill ${["running", "ended", "failed", "dead", "silent"].includes(state.condition) ? state.condition : ""}` }, state.condition))
        : el("td", look(name), String(cells[name]))));
    })));
}

// The time of day, and the day where it is another one.
function when(time) {
  const moment = new Date(time * 1000);
  return moment.toDateString() === new Date().toDateString() ? moment.toLocaleTimeString() : moment.toLocaleString();
}

function showEvents(panel, open) {
  const shown = view.marks.slice().reverse().slice(0, 300), several = view.runs.length > 1;
  if (!shown.length) return panel.hide();
  panel.set(el("table", {}, el("tr", {}, el("th", { class: "n" }, "after step"), el("th", { class: "s phone-less" }, "when"), several ? el("th", { class: "s" }, "run") : null, el("th", {}, "what")),
    shown.map((mark) => el("tr", { class: "link", tabindex: "0", onclick: () => open(mark.after), onkeydown: (event) => { if (event.key === "Enter") open(mark.after); } },
      el("td", { class: "n" }, mark.after.toLocaleString("en")), el("td", { class: "time phone-less" }, finite(mark.time) ? when(mark.time) : "–"),
      several ? el("td", { class: "s" }, el("i", { class: "swatch", style: { display: "inline-block", marginRight: "6px", background: lineColour(mark.run) } }), view.runs[mark.run].name) : null,
      el("td", {}, el("i", { class: "swatch", style: { display: "inline-block", marginRight: "6px", background: `var(${MARKS[mark.kind] || "--soft"})` } }), mark.text)))));
}

function showDifferences(panel, found) {
  if (view.runs.length < 2) return panel.hide();
  if (!found.length) return panel.set(el("p", { class: "empty" }, "The settings of these runs are the same."));
  panel.set(el("table", {}, el("tr", {}, el("th", {}, "setting"), view.runs.map((run) => el("th", {}, run.name))),
    found.map((row) => el("tr", {}, el("td", {}, row.name), row.values.map((value) => el("td", {}, value === null || value === undefined ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value)))))));
}
