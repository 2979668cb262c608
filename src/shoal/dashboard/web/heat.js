// Rank by step: how long a rank was busy beside the median of all. A straggler is a dark row; a click opens its lanes.

class Heat {
  constructor(open) {
    this.open = open;
    this.found = null;
    const { box, readout } = card("Who is slow: each rank's busy time beside the median rank", true);
    this.box = box;
    this.readout = readout;
    this.canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": "Heat map of ranks and steps; Enter opens the slowest place in the timeline" });
    const scale = [0.8, 1, 1.15, 1.3, 1.6].map((ratio) => [`${ratio}×`, this.fill(ratio)]);
    this.key = legend(scale);
    box.append(this.canvas, this.key);
    this.canvas.addEventListener("pointermove", (event) => this.show(this.place(event)));
    this.canvas.addEventListener("pointerleave", () => this.show(null));
    this.canvas.addEventListener("click", (event) => { const at = this.place(event); if (at) this.open(at.first, at.last); });
    this.canvas.addEventListener("keydown", (event) => { if (event.key === "Enter" && this.worst) this.open(this.worst.first, this.worst.last); });
    view.charts.push(this);
    redraw(this, this.canvas);
  }

  set(found) { this.found = found; this.draw(); }

  recolour() {
    const fresh = legend([0.8, 1, 1.15, 1.3, 1.6].map((ratio) => [`${ratio}×`, this.fill(ratio)]));
    this.key.replaceWith(fresh);
    this.key = fresh;
  }

  fill(ratio) {
    if (!finite(ratio)) return colour("--grid");
    const strength = ratio >= 1 ? Math.min(1, (ratio - 1) / 0.6) : Math.min(1, (1 - ratio) / 0.6);
    return `rgba(${colour(ratio >= 1 ? "--heat" : "--heat-cold")}, ${(0.06 + 0.94 * strength).toFixed(3)})`;
  }

  draw() {
    const found = this.found;
    const rows = found ? found.ranks.length : 1, row = Math.max(3, Math.min(22, Math.floor(420 / rows)));
    this.rowHeight = row;
    const [pen, width] = sharp(this.canvas, rows * row + 20);
    this.left = 58;
    this.width = width - 8 - this.left;
    if (!found || !found.ratio.length || !found.ratio.some((each) => each.some(finite))) {
      pen.fillStyle = colour("--soft");
      pen.fillText("nothing yet", this.left + 8, 16);
      return;
    }
    const cell = this.width / found.columns;
    let worst = 0;
    this.worst = null;
    found.ratio.forEach((values, r) => values.forEach((value, c) => {
      pen.fillStyle = this.fill(value);
      const x = Math.floor(this.left + c * cell);
      pen.fillRect(x, r * row, Math.ceil(this.left + (c + 1) * cell) - x, row > 5 ? row - 1 : row);
      if (value > worst) { worst = value; this.worst = this.steps(c); }
    }));
    pen.fillStyle = colour("--soft");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const every = Math.ceil(14 / row);
    found.ranks.forEach((rank, r) => { if (r % every === 0) pen.fillText(`rank ${rank}`, this.left - 6, r * row + row / 2); });
    pen.textAlign = "center";
    for (const tick of ticks(found.first, found.last, Math.max(2, Math.floor(this.width / 85)), true)) {
      const x = this.left + ((tick - found.first) / Math.max(1, found.last - found.first)) * this.width;
      pen.fillText(tick.toLocaleString("en"), Math.min(width - 20, Math.max(this.left + 10, x)), rows * row + 11);
    }
    this.show(null);
  }

  steps(column) {
    const { first, last, columns } = this.found, wide = (last + 1 - first) / columns;
    return { first: Math.floor(first + column * wide), last: Math.max(Math.floor(first + column * wide), Math.ceil(first + (column + 1) * wide) - 1) };
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect(), found = this.found;
    if (!found) return null;
    const c = Math.floor(((event.clientX - box.left - this.left) / this.width) * found.columns);
    const r = Math.floor((event.clientY - box.top) / this.rowHeight);
    if (c < 0 || c >= found.columns || r < 0 || r >= found.ranks.length) return null;
    return { ...this.steps(c), rank: found.ranks[r], ratio: found.ratio[r][c], median: found.median_seconds[c] };
  }

  show(at) {
    if (at) {
      const steps = at.first === at.last ? `step ${at.first}` : `steps ${at.first} to ${at.last}`;
      this.readout.textContent = `rank ${at.rank}, ${steps}: ${short(at.ratio)} × ${seconds(at.median)}`;
      return;
    }
    const worst = this.found && this.found.slowest;
    if (!worst) { this.readout.textContent = ""; return; }
    const where = `${short(worst.ratio)} × the median rank in steps ${worst.first} to ${worst.last}`;
    this.readout.textContent = worst.ratio > 1.3 ? `rank ${worst.rank} is slow: ${where}` : `no rank is slow for long; at most rank ${worst.rank}, ${where}`;
  }
}
