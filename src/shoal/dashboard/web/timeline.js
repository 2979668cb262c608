// Every rank's spans on one clock. Near by each span is a rectangle; far away each column of pixels has the colour of what
// filled most of it, looked up in a pyramid of bins: a frame costs the same for a thousand spans and for a million.

const LEAVES = ["data", "forward", "backward", "weight", "exposed", "update", "checkpoint", "recovery", "between"];
const BINS = 1 << 14;

class Timeline {
  constructor() {
    const fit = el("button", { title: "All (0)", onclick: () => this.fit() }, "all");
    this.note = el("span", { class: "soft" });
    const { box, readout } = card("Timeline: what each rank did when", true, fit, this.note);
    this.box = box;
    this.readout = readout;
    this.canvas = el("canvas", { tabindex: "0", class: "pan", role: "img", "aria-label": "Timeline of all ranks; arrows pan, plus and minus zoom" });
    this.scroller = el("div", { class: "scroll" }, this.canvas);
    this.key = el("div");
    box.append(this.scroller, this.key);
    this.spans = null;
    this.pointers = new Map();
    this.frame = 0;
    this.listen();
    this.recolour();
    view.charts.push(this);
    redraw(this, this.canvas);
  }

  recolour() {
    const fresh = legend([...LEAVES, "compute", "bucket"].map((name) => [{ bucket: "bucket under way", between: "between steps" }[name] || name, `var(--${name})`]));
    this.key.replaceWith(fresh);
    this.key = fresh;
    this.words = null;
  }

  // buffer: a length, a head of JSON, columns of numbers; see timeline.py.
  set(buffer) {
    const size = new DataView(buffer).getUint32(0, true);
    const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    let at = 4 + size;
    const column = (Kind) => {
      const found = new Kind(buffer.slice(at, at + facts.count * Kind.BYTES_PER_ELEMENT));
      at += Math.ceil((facts.count * Kind.BYTES_PER_ELEMENT) / 8) * 8;
      return found;
    };
    const spans = { ...facts, begin: column(Float64Array), duration: column(Float32Array), step: column(Uint32Array),
      rank: column(Uint16Array), detail: column(Uint16Array), kind: column(Uint8Array) };
    spans.rows = [];
    for (let i = 0, row = null; i < spans.count; i++) {
      if (!row || row.rank !== spans.rank[i]) spans.rows.push(row = { rank: spans.rank[i], from: i, to: i, longest: 0 });
      row.to = i + 1;
      if (spans.duration[i] > row.longest) row.longest = spans.duration[i];
    }
    let end = 0;
    for (let i = 0; i < spans.count; i++) end = Math.max(end, spans.begin[i] + spans.duration[i]);
    spans.end = end || 1;
    const followed = !this.spans || this.whole();
    this.spans = spans;
    this.pyramid();
    if (followed) { this.low = 0; this.high = spans.end; }
    this.note.textContent = spans.count ? `steps ${spans.first.toLocaleString("en")} to ${spans.last.toLocaleString("en")}` : "";
    this.draw();
  }

  whole() { return this.low === 0 && this.high === this.spans.end; }
  fit() { if (this.spans) { this.low = 0; this.high = this.spans.end; this.later(); } }

  pyramid() {
    const { spans } = this, kinds = KINDS.length, compute = KINDS.indexOf("compute"), bucket = KINDS.indexOf("bucket");
    const exposed = KINDS.indexOf("exposed"), wide = spans.end / BINS;
    let cover = new Float32Array(BINS * kinds);
    for (const row of spans.rows) {
      cover.fill(0);
      for (let i = row.from; i < row.to; i++) {
        const kind = spans.kind[i];
        if (kind === bucket) continue;
        let at = spans.begin[i], left = spans.duration[i];
        for (let bin = Math.min(BINS - 1, Math.floor(at / wide)); left > 0 && bin < BINS; bin++) {
          const part = Math.min(left, (bin + 1) * wide - at);
          cover[bin * kinds + kind] += part;
          at += part;
          left -= Math.max(part, 1e-12);
        }
      }
      row.levels = [];
      let now = cover, count = BINS;
      for (;;) {
        const level = new Uint8Array(count);
        for (let bin = 0; bin < count; bin++) {
          const at = bin * kinds;
          let best = 0, most = wide * (BINS / count) * 0.1, inside = 0;
          for (let kind = 1; kind < kinds; kind++) {
            if (kind === compute) continue;
            if (kind === exposed || (kind >= 5 && kind <= 7)) inside += now[at + kind];
            if (now[at + kind] > most) { most = now[at + kind]; best = kind; }
          }
          if (now[at + compute] - inside > most) best = compute;
          level[bin] = best;
        }
        row.levels.push(level);
        if (count <= 64) break;
        const half = new Float32Array((count / 2) * kinds);
        for (let bin = 0; bin < count / 2; bin++) {
          for (let kind = 1; kind < kinds; kind++) half[bin * kinds + kind] = now[2 * bin * kinds + kind] + now[(2 * bin + 1) * kinds + kind];
        }
        now = half;
        count /= 2;
      }
    }
  }

  later() { if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.draw(); }); }

  draw() {
    const { spans } = this, rows = spans ? spans.rows.length : 0;
    this.lane = rows ? Math.max(3, Math.min(34, Math.floor(560 / rows))) : 34;
    const height = Math.max(60, rows * this.lane + 22);
    const [pen, width, ratio] = sharp(this.canvas, height);
    this.left = 58;
    this.width = width - 8 - this.left;
    if (!rows) {
      pen.fillStyle = colour("--soft");
      pen.fillText("no spans", this.left + 8, 24);
      return;
    }
    let visible = 0;
    for (const row of spans.rows) {
      row.start = lowerBound2(spans.begin, row.from, row.to, this.low - row.longest);
      row.stop = lowerBound2(spans.begin, row.from, row.to, this.high);
      visible += row.stop - row.start;
    }
    this.exact = visible < 8000;
    if (this.exact) this.rectangles(pen); else this.columns(pen, ratio);
    pen.font = '11px system-ui, "DejaVu Sans", sans-serif';
    pen.fillStyle = colour("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.ceil(14 / this.lane);
    spans.rows.forEach((row, r) => { if (r % every === 0) pen.fillText(`rank ${row.rank}`, this.left - 6, r * this.lane + this.lane / 2); });
    pen.textAlign = "center";
    for (const tick of ticks(this.low, this.high, Math.max(2, Math.floor(this.width / 90)))) {
      pen.fillText(clock(tick, this.high - this.low), Math.min(width - 26, Math.max(this.left + 20, this.x(tick))), rows * this.lane + 12);
    }
    shoal.drawn = performance.now();
  }

  x(time) { return this.left + ((time - this.low) / (this.high - this.low)) * this.width; }
  time(x) { return this.low + ((x - this.left) / this.width) * (this.high - this.low); }

  rectangles(pen) {
    const { spans } = this, pad = this.lane > 8 ? 2 : 0, bucket = KINDS.indexOf("bucket"), compute = KINDS.indexOf("compute");
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width, spans.rows.length * this.lane);
    pen.clip();
    for (let r = 0; r < spans.rows.length; r++) {
      const row = spans.rows[r], top = r * this.lane + pad, room = this.lane - 2 * pad;
      pen.fillStyle = colour("--grid");
      pen.fillRect(this.left, top, this.width, room);
      for (const pass of [compute, -1, bucket]) {
        for (let i = row.start; i < row.stop; i++) {
          const kind = spans.kind[i];
          if (pass === -1 ? kind === compute || kind === bucket : kind !== pass) continue;
          if (kind === bucket && this.lane < 14) continue;
          const x = this.x(spans.begin[i]), wide = Math.max(0.6, (spans.duration[i] / (this.high - this.low)) * this.width);
          pen.fillStyle = colour(`--${KINDS[kind]}`);
          if (kind === bucket) { pen.fillRect(x, top + room - 4, wide, 4); continue; }
          pen.fillRect(x, top, wide > 3 ? wide - 0.5 : wide, room);
          if (wide > 34 && room > 12 && kind !== compute) this.label(pen, i, Math.max(x, this.left), Math.min(x + wide, this.left + this.width), top, room);
        }
      }
    }
    pen.restore();
  }

  label(pen, i, from, to, top, room) {
    const { spans } = this, kind = KINDS[spans.kind[i]], passes = kind === "forward" || kind === "backward" || kind === "weight";
    const text = passes ? `${kind} ${spans.detail[i] % 1024}` : kind;
    if (pen.measureText(text).width > to - from - 6) return;
    pen.fillStyle = "#fff";
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, from + 4, top + room / 2);
  }

  columns(pen, ratio) {
    const { spans } = this, wide = Math.floor(this.width * ratio), lane = Math.max(1, Math.floor(this.lane * ratio));
    if (wide < 1) return;
    if (!this.words) this.words = KINDS.map((name, i) => word(colour(i ? `--${name}` : "--grid")));
    const words = this.words, perPixel = (this.high - this.low) / wide, base = spans.end / BINS;
    let level = 0;
    while (level < spans.rows[0].levels.length - 1 && base * 2 ** (level + 1) <= perPixel) level++;
    const bin = base * 2 ** level;
    if (!this.image || this.image.width !== wide || this.image.height !== spans.rows.length * lane) {
      this.image = new ImageData(wide, spans.rows.length * lane);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const { pixels } = this, gap = lane > 4 ? 1 : 0, blank = word(colour("--card"));
    spans.rows.forEach((row, r) => {
      const kinds = row.levels[level], start = r * lane * wide;
      let at = this.low / bin;
      const by = perPixel / bin;
      for (let x = 0; x < wide; x++, at += by) pixels[start + x] = at >= 0 && at < kinds.length ? words[kinds[at | 0]] : words[0];
      for (let y = 1; y < lane - gap; y++) pixels.copyWithin(start + y * wide, start, start + wide);
      if (gap) pixels.fill(blank, start + (lane - 1) * wide, start + lane * wide);
    });
    pen.putImageData(this.image, Math.round(this.left * ratio), 0);
  }

  zoom(factor, around) {
    if (!this.spans) return;
    const middle = around === undefined ? (this.low + this.high) / 2 : around;
    this.show(middle - (middle - this.low) * factor, middle + (this.high - middle) * factor);
  }

  show(low, high) {
    const least = 1e-6, end = this.spans.end;
    let wide = Math.max(least, Math.min(end, high - low));
    low = Math.max(0, Math.min(end - wide, low));
    this.low = low;
    this.high = low + wide;
    this.later();
  }

  showSteps(first, last) {
    const { spans } = this;
    let low = Infinity, high = -Infinity;
    for (let i = 0; i < spans.count; i++) {
      if (spans.step[i] < first || spans.step[i] > last) continue;
      low = Math.min(low, spans.begin[i]);
      high = Math.max(high, spans.begin[i] + spans.duration[i]);
    }
    if (low < high) this.show(low, high);
  }

  listen() {
    const { canvas, pointers } = this, place = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      canvas.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, place(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!this.spans) return;
      const x = place(event);
      if (!pointers.has(event.pointerId)) { this.tell(x, event.clientY - canvas.getBoundingClientRect().top); return; }
      const before = [...pointers.values()];
      pointers.set(event.pointerId, x);
      const after = [...pointers.values()];
      if (after.length === 1) {
        const by = ((before[0] - after[0]) / this.width) * (this.high - this.low);
        this.show(this.low + by, this.high + by);
      } else if (Math.abs(after[0] - after[1]) > 4) {
        this.zoom(Math.abs(before[0] - before[1]) / Math.abs(after[0] - after[1]), this.time((after[0] + after[1]) / 2));
      }
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => { this.readout.textContent = ""; });
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("wheel", (event) => {
      if (!this.spans || !(event.ctrlKey || event.metaKey || document.activeElement === canvas)) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { const by = (event.deltaX / this.width) * (this.high - this.low); this.show(this.low + by, this.high + by); }
      else this.zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, this.time(place(event)));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const by = this.spans ? (this.high - this.low) * 0.2 : 0;
      const act = { ArrowLeft: () => this.show(this.low - by, this.high - by), ArrowRight: () => this.show(this.low + by, this.high + by),
        "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.7), 0: () => this.fit(), Escape: () => this.fit() }[event.key];
      if (act && this.spans) { event.preventDefault(); act(); }
    });
  }

  tell(x, y) {
    const { spans } = this, row = spans.rows[Math.floor(y / this.lane)], time = this.time(x);
    if (!row || x < this.left) { this.readout.textContent = ""; return; }
    let best = -1;
    for (let i = lowerBound2(spans.begin, row.from, row.to, time - row.longest); i < row.to && spans.begin[i] <= time; i++) {
      if (spans.begin[i] + spans.duration[i] >= time && (best < 0 || spans.duration[i] < spans.duration[best])) best = i;
    }
    if (best < 0) { this.readout.textContent = `rank ${row.rank}: nothing noted`; return; }
    const kind = KINDS[spans.kind[best]], detail = spans.detail[best];
    const passes = kind === "forward" || kind === "backward" || kind === "weight";
    const which = passes ? ` of micro-batch ${detail % 1024}${detail >= 1024 ? `, stage ${Math.floor(detail / 1024)}` : ""}` : kind === "bucket" ? ` ${detail}` : "";
    this.readout.textContent = `rank ${row.rank}, step ${spans.step[best]}: ${kind}${which}, ${seconds(spans.duration[best])}`;
  }
}

function lowerBound2(sorted, low, high, value) {
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
  return low;
}

function clock(value, span) { return span < 1 ? `${Number((value * 1e3).toFixed(span < 0.01 ? 3 : 1))} ms` : `${Number(value.toFixed(span < 10 ? 2 : 0))} s`; }

// A colour as a pixel of ImageData, on machines that put the lowest byte first: all that run browsers.
function word(text) {
  const pen = word.pen || (word.pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true }));
  pen.fillStyle = text;
  pen.fillRect(0, 0, 1, 1);
  const [r, g, b] = pen.getImageData(0, 0, 1, 1).data;
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}
