// Memory over the step, by device, below the timeline and on the same scale; and what is there at the peak.

const BAND = 60, BAND_GAP = 10;
const KIND_COLOURS = {
  parameter: "#0072b2", state: "#56b4e9", buffer: "#999999", input: "#bbbbbb", constant: "#cccccc",
  activation: "#e69f00", gradient: "#d55e00", copy: "#a77aa8",
};

const deviceAt = (y) => Math.min(Math.max(Math.floor(y / (BAND + BAND_GAP)), 0), state.problem.devices.length - 1);
const laneOf = (device) => state.lanes.find((lane) => lane.device === device && !lane.isMeasured);

function drawMemory() {
  const { problem, plan, view } = state;
  const { pen } = penOf(byId("memory"), problem.devices.length * (BAND + BAND_GAP));
  problem.devices.forEach((device, d) => {
    const bottom = (d + 1) * (BAND + BAND_GAP) - BAND_GAP;
    const peak = plan.peak_bytes[d], limit = device.memory_bytes;
    const most = (state.upToLimit ? Math.max(limit, peak) : peak) * 1.06 || 1;
    const height = (size) => bottom - (size / most) * BAND;
    drawBandLabel(pen, device.name, d, bottom, peak, limit);
    pen.save();
    pen.beginPath();
    pen.rect(view.left, bottom - BAND, view.right - view.left, BAND + 1);
    pen.clip();
    drawUse(pen, laneOf(d), view, height, plan.resident_bytes[d], deviceColour(d));
    pen.strokeStyle = peak > limit ? css("--alarm") : css("--soft");
    pen.lineWidth = 1;
    pen.setLineDash([6, 4]);
    line(pen, view.left, Math.round(height(limit)) + 0.5, view.right, Math.round(height(limit)) + 0.5);
    pen.setLineDash([]);
    drawPeak(pen, plan.at_peak[d].op, view, height(peak));
    if (state.cursor !== null) {
      const x = Math.round(view.left + (state.cursor - view.from) * view.scale) + 0.5;
      pen.globalAlpha = 0.5;
      line(pen, x, bottom - BAND, x, bottom);
      pen.globalAlpha = 1;
    }
    pen.restore();
    pen.strokeStyle = css("--line");
    line(pen, view.left, bottom + 0.5, view.right, bottom + 0.5);
  });
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function drawBandLabel(pen, name, d, bottom, peak, limit) {
  pen.fillStyle = deviceColour(d);
  pen.fillRect(0, bottom - BAND, 4, BAND);
  pen.textAlign = "left";
  pen.fillStyle = css("--ink");
  pen.fillText(name, 12, bottom - BAND + 12, GUTTER - 20);
  pen.fillStyle = peak > limit ? css("--alarm") : css("--soft");
  pen.fillText(`peak ${bytes(peak)}`, 12, bottom - BAND + 29, GUTTER - 20);
  pen.fillText(`of ${bytes(limit)}`, 12, bottom - BAND + 45, GUTTER - 20);
}

/** Draws the bytes in use as an area; of what shares a pixel, the most counts. */
function drawUse(pen, lane, view, height, resident, colour) {
  const use = state.plan.bytes;
  const zero = height(0);
  let i = firstAbove(lane.starts, view.from) - 1;
  let now = i < 0 ? resident : use[lane.numbers[i]];
  let column = view.left, most = now;
  pen.fillStyle = colour;
  pen.globalAlpha = 0.75;
  for (i++; i <= lane.count; i++) {
    const x = i < lane.count ? view.left + (lane.starts[i] - view.from) * view.scale : view.right;
    const end = Math.min(Math.round(x), view.right);
    if (end > column) {
      const top = height(most);
      pen.fillRect(column, top, end - column, zero - top);
      column = end;
      most = now;
    }
    if (i === lane.count || x > view.right) break;
    now = use[lane.numbers[i]];
    most = Math.max(most, now);
  }
  if (column < view.right) pen.fillRect(column, height(now), view.right - column, zero - height(now));
  pen.globalAlpha = 1;
}

function drawPeak(pen, op, view, y) {
  if (op < 0) return;
  pen.fillStyle = css("--ink");
  pen.beginPath();
  pen.arc(view.left + (state.plan.start[op] - view.from) * view.scale, y, 3, 0, 7);
  pen.fill();
}

function memoryCard(y) {
  const d = deviceAt(y), device = state.problem.devices[d], lane = laneOf(d);
  const i = firstAbove(lane.starts, state.cursor) - 1;
  const now = i < 0 ? state.plan.resident_bytes[d] : state.plan.bytes[lane.numbers[i]];
  return {
    title: `${device.name} at ${moment(state.cursor)}`,
    rows: [
      ["in use", `${bytes(now)}, ${percent(now / Math.max(device.memory_bytes, 1))} of ${bytes(device.memory_bytes)}`],
      ["before the step", bytes(state.plan.resident_bytes[d])],
      ["at", i < 0 ? null : state.problem.names[lane.numbers[i]]],
    ],
  };
}

/** Tells what is in the chosen device's memory at its peak. */
function showPeak() {
  const { problem, plan, device: d } = state;
  byId("peaks").replaceChildren(...problem.devices.map((device, i) => {
    const button = make("button", "", device.name);
    button.setAttribute("aria-pressed", i === d);
    button.addEventListener("click", () => { state.device = i; showPeak(); });
    return button;
  }));
  const { op, kinds, modules, count: pieces } = plan.at_peak[d];
  const when = op < 0 ? "before the step" : `at ${seconds(plan.start[op])}, when ${problem.names[op]} is launched`;
  byId("peak").textContent = `${problem.devices[d].name} needs ${bytes(plan.peak_bytes[d])} ${when}: ${count(pieces)} tensors and copies`;
  const shares = kinds.map(([kind, size]) => {
    const part = make("i");
    part.style.cssText = `width: ${(size / plan.peak_bytes[d]) * 100}%; background: ${KIND_COLOURS[kind]}`;
    return part;
  });
  const names = kinds.map(([kind, size]) => key(KIND_COLOURS[kind], `${kind} ${bytes(size)}`));
  byId("kinds").replaceChildren(make("div", "shares", ...shares), make("p", "", ...names));
  const rows = modules.map(([module, kind, tensors, size, largest]) => {
    const name = make("td", "text wide", module || "in no module");
    name.title = `largest: ${largest}`;
    return make("tr", "", name, make("td", "text", kind), ...[count(tensors), bytes(size), percent(size / plan.peak_bytes[d])]
      .map((text) => make("td", "", text)));
  });
  const head = ["module", "kind", "tensors", "size", "share"].map((text, i) => make("th", i < 2 ? "text" : "", text));
  byId("largest").replaceChildren(make("thead", "", make("tr", "", ...head)), make("tbody", "", ...rows));
}
