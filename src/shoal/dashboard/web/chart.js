// A curve over steps: the mean as a line, the least and the greatest as a band behind it, events as marks.

const MARKS = { failure: "--bad", stall: "--warn", straggler: "--warn", recovery: "--good", resize: "--weight",
  checkpoint: "--checkpoint", chaos: "--recovery", end: "--soft", start: "--soft", state_hash: "--bad" };

class Chart {
  constructor(title, name, format, options) {
    this.name = name;
    this.format = format || short;
    this.curves = [];
    this.logarithmic = false;
    this.hover = null;
    this.drag = null;
    this.options = options || {};
    const log = el("button", { "aria-pressed": "false", title: "Logarithmic (L)", onclick: () => this.toggleLog() }, "log");
    this.log = log;
    const { box, readout } = card(title, this.options.wide, log);
    this.box = box;
    this.readout = readout;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": `${title} over steps` });
    box.append(this.canvas);
    this.height = 190;
    this.listen();
    view.charts.push(this);
    redraw(this, this.canvas);
  }

  toggleLog() {
    this.logarithmic = !this.logarithmic;
    this.log.setAttribute("aria-pressed", this.logarithmic);
    this.draw();
  }

  // curves: one for each run: { x, mean, low, high }, or null.
  set(curves) { this.curves = curves; this.draw(); }

  range() { return this.options.range ? this.options.range() : range(); }

  draw() {
    const [pen, width] = sharp(this.canvas, this.height);
    const [first, last] = this.range(), left = 58, right = width - 8, top = 14, bottom = this.height - 20;
    const [low, high] = this.scale(first, last);
    const put = this.logarithmic ? Math.log10 : (v) => v;
    const [from, to] = [put(low), put(high)];
    this.x = (step) => left + ((step - first) / Math.max(1e-9, last - first)) * (right - left);
    this.step = (x) => first + ((x - left) / Math.max(1, right - left)) * (last - first);
    this.y = (value) => bottom - ((put(value) - from) / (to - from || 1)) * (bottom - top);
    this.axes(pen, { left, right, top, bottom, first, last, from, to });
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, right - left, bottom + 1);
    pen.clip();
    if (!this.options.range) this.drawMarks(pen, top, bottom);
    this.curves.forEach((curve, run) => curve && this.line(pen, curve, this.options.colours ? colour(this.options.colours[run]) : lineColour(run)));
    this.drawHover(pen, top, bottom);
    pen.restore();
    if (!this.curves.some((curve) => curve && curve.x.length)) {
      pen.fillStyle = colour("--soft");
      pen.fillText("nothing yet", left + 8, (top + bottom) / 2);
    } else if (!shoal.firstChart) shoal.firstChart = performance.now();
  }

  scale(first, last) {
    let low = Infinity, high = -Infinity;
    for (const curve of this.curves) {
      if (!curve) continue;
      for (let i = 0; i < curve.x.length; i++) {
        if (curve.x[i] < first || curve.x[i] > last) continue;
        for (const value of [(curve.low || curve.mean)[i], (curve.high || curve.mean)[i]]) {
          if (!finite(value) || (this.logarithmic && value <= 0)) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return [this.logarithmic ? 0.1 : 0, 1];
    if (low === high) { const half = Math.abs(low) / 2 || 0.5; return this.logarithmic ? [low / 2, low * 2] : [low - half, high + half]; }
    if (this.logarithmic) return [low, high];
    const room = (high - low) * 0.05;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  axes(pen, at) {
    pen.lineWidth = 1;
    pen.strokeStyle = colour("--grid");
    pen.fillStyle = colour("--soft");
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const tick of ticks(at.from, at.to, 5)) {
      const y = at.bottom - ((tick - at.from) / (at.to - at.from || 1)) * (at.bottom - at.top);
      pen.beginPath();
      pen.moveTo(at.left, y);
      pen.lineTo(at.right, y);
      pen.stroke();
      pen.fillText(this.format(this.logarithmic ? 10 ** tick : tick), at.left - 6, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    const count = Math.max(2, Math.floor((at.right - at.left) / 85));
    for (const tick of ticks(at.first, at.last, count, !this.options.unit)) {
      const text = this.options.unit ? seconds(tick) : tick.toLocaleString("en"), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(at.right - half, Math.max(at.left + half, this.x(tick))), at.bottom + 15);
    }
  }

  drawMarks(pen, top, bottom) {
    for (const mark of view.marks) {
      const x = this.x(mark.after), strong = colour(MARKS[mark.kind] || "--soft");
      if (x < 0 || !MARKS[mark.kind]) continue;
      pen.strokeStyle = pen.fillStyle = strong;
      pen.globalAlpha = mark.kind === "start" || mark.kind === "end" || mark.kind === "checkpoint" ? 0.35 : 0.9;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.setLineDash([]);
      pen.beginPath();
      pen.moveTo(x - 4, top - 8);
      pen.lineTo(x + 4, top - 8);
      pen.lineTo(x, top - 1);
      pen.fill();
      pen.globalAlpha = 1;
    }
  }

  line(pen, curve, stroke) {
    const shown = (value) => finite(value) && !(this.logarithmic && value <= 0);
    if (curve.low) {
      pen.fillStyle = stroke;
      pen.globalAlpha = 0.18;
      pen.beginPath();
      curve.x.forEach((x, i) => shown(curve.high[i]) && pen.lineTo(this.x(x), this.y(curve.high[i])));
      for (let i = curve.x.length - 1; i >= 0; i--) if (shown(curve.low[i])) pen.lineTo(this.x(curve.x[i]), this.y(curve.low[i]));
      pen.fill();
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = pen.fillStyle = stroke;
    pen.lineWidth = 1.6;
    pen.lineJoin = "round";
    pen.beginPath();
    let open = false;
    curve.x.forEach((x, i) => {
      if (!shown(curve.mean[i])) { open = false; return; }
      const alone = !open && !shown(curve.mean[i + 1]);
      if (alone) pen.fillRect(this.x(x) - 2.5, this.y(curve.mean[i]) - 2.5, 5, 5);
      if (open) pen.lineTo(this.x(x), this.y(curve.mean[i])); else pen.moveTo(this.x(x), this.y(curve.mean[i]));
      open = true;
    });
    pen.stroke();
  }

  drawHover(pen, top, bottom) {
    if (this.drag) {
      pen.fillStyle = colour("--accent");
      pen.globalAlpha = 0.15;
      pen.fillRect(Math.min(this.drag.from, this.drag.to), top, Math.abs(this.drag.to - this.drag.from), bottom - top);
      pen.globalAlpha = 1;
    }
    const parts = [];
    if (this.hover !== null) {
      pen.strokeStyle = colour("--soft");
      pen.beginPath();
      pen.moveTo(this.hover, top);
      pen.lineTo(this.hover, bottom);
      pen.stroke();
    }
    this.curves.forEach((curve, run) => {
      if (!curve || !curve.x.length) return;
      const wanted = this.hover === null ? Infinity : this.step(this.hover);
      let i = lowerBound(curve.x, wanted);
      if (i === curve.x.length || (i > 0 && wanted - curve.x[i - 1] < curve.x[i] - wanted)) i--;
      while (this.hover === null && i > 0 && !finite(curve.mean[i])) i--;
      const between = curve.low && finite(curve.low[i]) ? ` (${this.format(curve.low[i])} … ${this.format(curve.high[i])})` : "";
      const names = this.options.names || view.runs.map((each) => each.name);
      const who = this.curves.length > 1 ? `${names[run]}: ` : "";
      const where = this.options.unit ? "" : `step ${Math.round(curve.x[i]).toLocaleString("en")}  `;
      parts.push(`${who}${this.hover === null ? "" : where}${this.format(curve.mean[i])}${this.hover === null ? "" : between}`);
    });
    if (this.hover !== null && !this.options.range) {
      const near = view.marks.filter((mark) => MARKS[mark.kind] && Math.abs(this.x(mark.after) - this.hover) < 5);
      parts.push(...near.slice(0, 2).map((mark) => mark.text));
    }
    this.readout.textContent = parts.join(" · ");
  }

  listen() {
    const { canvas } = this, place = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointermove", (event) => {
      this.hover = place(event);
      if (this.drag) this.drag.to = this.hover;
      this.draw();
    });
    canvas.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
    if (this.options.range) return;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch") return;
      canvas.setPointerCapture(event.pointerId);
      this.drag = { from: place(event), to: place(event) };
    });
    canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag.to - drag.from) > 5) {
        setRange(this.step(Math.min(drag.from, drag.to)), this.step(Math.max(drag.from, drag.to)));
      }
    });
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("dblclick", resetRange);
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.step(place(event)));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  zoom(factor, around) {
    const [first, last] = range();
    const middle = around === undefined ? (first + last) / 2 : around;
    setRange(middle - (middle - first) * factor, middle + (last - middle) * factor);
  }

  key(event) {
    const [first, last] = range(), by = (last - first) * 0.2, end = lastStep();
    const left = Math.min(by, first - 1), right = Math.min(by, end - last);
    const act = { ArrowLeft: () => setRange(first - left, last - left), ArrowRight: () => setRange(first + right, last + right),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.7), 0: resetRange, Escape: resetRange,
      l: () => this.toggleLog() }[event.key];
    if (act) { event.preventDefault(); act(); }
  }
}

function lowerBound(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low;
}
