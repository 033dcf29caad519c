// Drawing the timeline: ops and copies narrower than a pixel are merged.

const SHADES = 5;  // for how busy a pixel is

/** Returns the context of a canvas with this height, cleared, and its width. */
function penOf(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const wide = Math.round(width * scale), high = Math.round(height * scale);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, 'Segoe UI', Roboto, Arial, sans-serif";
  pen.textBaseline = "middle";
  return { pen, width };
}

let paints = null;

/** Forgets the fills: colours have changed. */
function forgetFills() {
  paints = null;
}

/** Returns the fills of the phases and of copies; updates are striped. */
function fills(pen) {
  if (paints) return paints;
  paints = PHASE_COLOURS.map(css);
  const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
  const brush = tile.getContext("2d");
  brush.fillStyle = paints[2];
  brush.fillRect(0, 0, 6, 6);
  brush.strokeStyle = "#ffffff88";
  brush.lineWidth = 1.4;
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift - 1, 7);
    brush.lineTo(shift + 7, -1);
  }
  brush.stroke();
  paints[2] = pen.createPattern(tile, "repeat");
  return paints;
}

const isVisible = (lane) => (state.measured || !lane.isMeasured) && (state.channels || lane.type === "op");
const visibleLanes = () => state.lanes.filter(isVisible);

function drawTimeline() {
  const lanes = visibleLanes();
  const height = AXIS + lanes.reduce((sum, lane) => sum + lane.height + GAP, GAP);
  const { pen, width } = penOf(byId("timeline"), height);
  const view = { from: state.from, to: state.to, left: GUTTER, right: width - RIGHT };
  view.scale = (view.right - view.left) / (view.to - view.from);
  state.view = view;
  drawAxis(pen, view, height);
  let top = AXIS + GAP;
  for (const lane of lanes) {
    lane.top = top;
    drawLabel(pen, lane);
    top += lane.height + GAP;
  }
  pen.save();
  pen.beginPath();
  pen.rect(view.left, 0, view.right - view.left, height);
  pen.clip();
  for (const lane of lanes) {
    drawLane(pen, lane, view);
    drawMarks(pen, lane, view);
  }
  if (state.critical) drawChain(pen, view);
  drawCursor(pen, view, height);
  for (const place of [state.pinned, state.hovered]) if (place) drawChosen(pen, view, place);
  pen.restore();
}

function drawAxis(pen, view, height) {
  pen.fillStyle = css("--soft");
  pen.strokeStyle = css("--line");
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (const { at, label } of timeTicks(view.from, view.to, (view.right - view.left) / 110)) {
    const x = Math.round(view.left + (at - view.from) * view.scale) + 0.5;
    pen.beginPath();
    pen.moveTo(x, AXIS - 5);
    pen.lineTo(x, height);
    pen.stroke();
    pen.fillText(label, Math.min(Math.max(x, view.left + 16), view.right - 24), AXIS / 2 - 2);
  }
}

function drawLabel(pen, lane) {
  const middle = lane.top + lane.height / 2 + 0.5;
  const isMain = lane.type === "op" && !lane.isMeasured;
  pen.textAlign = "left";
  pen.fillStyle = isMain ? css("--ink") : css("--soft");
  if (isMain) {
    pen.fillStyle = deviceColour(lane.device);
    pen.fillRect(0, lane.top, 4, lane.height);
    pen.fillStyle = css("--ink");
  }
  pen.fillText(lane.label, 12, middle, GUTTER - 64);
  pen.textAlign = "right";
  pen.fillStyle = css("--soft");
  const step = lane.isMeasured ? state.plan.measured.step_seconds : state.plan.step_seconds;
  pen.fillText(step ? percent(lane.busy / step) : "", GUTTER - 12, middle);
}

/** Returns whether an op matches the filter; a copy matches with the op that reads it. */
function isLit(lane, index) {
  if (!state.mask) return true;
  if (lane.type === "op") return state.mask[lane.numbers[index]] === 1;
  return !lane.isMeasured && state.mask[state.plan.copies.reader[lane.numbers[index]]] === 1;
}

function drawLane(pen, lane, view) {
  const inks = fills(pen);
  const busy = new Float64Array(8);  // of a column of pixels, by colour: matching ones, then others
  let column = -1, run = null;
  const close = () => {
    if (!run) return;
    pen.globalAlpha = run.alpha;
    pen.fillStyle = inks[run.colour];
    pen.fillRect(run.x, lane.top, run.width, lane.height);
    run = null;
  };
  const flush = () => {  // a column has the colour of what it has most of; matching ones go before others
    if (column < 0) return;
    const lit = busy[0] + busy[1] + busy[2] + busy[3];
    const offset = lit > 0 ? 0 : 4;
    let most = offset, total = 0;
    for (let i = offset; i < offset + 4; i++) {
      total += busy[i];
      if (busy[i] > busy[most]) most = i;
    }
    const shade = Math.max(Math.ceil(Math.min(total, 1) * SHADES), 1) / SHADES;
    const alpha = offset ? 0.18 * shade : 0.15 + 0.85 * shade;
    if (run && run.colour === most - offset && run.alpha === alpha && run.x + run.width === column) run.width++;
    else {
      close();
      run = { x: column, width: 1, colour: most - offset, alpha };
    }
    busy.fill(0);
    column = -1;
  };
  for (let i = firstAbove(lane.reach, view.from); i < lane.count && lane.starts[i] <= view.to; i++) {
    const left = view.left + (lane.starts[i] - view.from) * view.scale;
    const right = view.left + (lane.ends[i] - view.from) * view.scale;
    const lit = isLit(lane, i);
    if (right - left < 1.5) {
      if (Math.floor(left) !== column) flush();
      column = Math.floor(left);
      busy[lane.colours[i] + (lit ? 0 : 4)] += Math.max(right - left, 0.02);
    } else {
      flush();
      close();
      drawBox(pen, lane, i, Math.max(left, view.left - 4), Math.min(right, view.right + 4), lit, inks);
    }
  }
  flush();
  close();
  pen.globalAlpha = 1;
}

function drawBox(pen, lane, i, left, right, lit, inks) {
  pen.globalAlpha = lit ? 1 : 0.18;
  pen.fillStyle = inks[lane.colours[i]];
  const gap = right - left > 4 ? 0.75 : 0;
  pen.fillRect(left, lane.top, right - left - gap, lane.height);
  if (right - left < 36 || lane.height < 16) return;
  const from = Math.max(left, GUTTER) + 5, room = right - from - 5;
  const text = room < 30 ? "" : shortened(pen, shortName(lane, i), room);
  pen.textAlign = "left";
  pen.fillStyle = lane.colours[i] === 0 ? "#fff" : "#16181d";
  if (lane.colours[i] === 2 && text) {  // no stripes behind the letters
    pen.globalAlpha = lit ? 0.8 : 0.1;
    pen.fillStyle = css("--update");
    pen.fillRect(from - 3, lane.top + 4, pen.measureText(text).width + 6, lane.height - 8);
    pen.fillStyle = "#16181d";
  }
  pen.globalAlpha = lit ? 1 : 0.4;
  pen.fillText(text, from, lane.top + lane.height / 2 + 0.5);
}

/** Draws a line above each op that is repeated, and above each copy of a tensor that waits elsewhere or visits. */
function drawMarks(pen, lane, view) {
  if (lane.isMeasured) return;
  const marks = lane.type === "op" ? state.plan.mark : state.plan.copies.mark;
  pen.fillStyle = css("--again");
  for (let i = firstAbove(lane.reach, view.from), last = -1; i < lane.count && lane.starts[i] <= view.to; i++) {
    if (!marks[lane.numbers[i]]) continue;
    const left = Math.max(view.left + (lane.starts[i] - view.from) * view.scale, last);
    const right = Math.max(view.left + (lane.ends[i] - view.from) * view.scale, left + 1);
    if (right - 1 < last) continue;  // the same column of pixels
    pen.fillRect(left, lane.top - 2, right - left, 4);
    last = right;
  }
}

/** Returns the end of an op's name, after the path of its module. */
function shortName(lane, i) {
  if (lane.type !== "op") return "";
  const op = lane.numbers[i], name = state.problem.names[op], path = state.problem.paths[state.problem.path[op]];
  return path && name.startsWith(`${path}.`) ? name.slice(path.length + 1) : name;
}

function shortened(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = Math.floor(room / 7) - 1;
  return letters < 3 ? "" : `${text.slice(0, letters)}…`;
}

/** Draws the critical path: a line below each of its ops and copies, and lines from lane to lane. */
function drawChain(pen, view) {
  pen.fillStyle = pen.strokeStyle = css("--ink");
  pen.lineWidth = 1;
  let before = null, run = null;
  const flush = () => { if (run) pen.fillRect(run.left, run.y, Math.max(run.right - run.left, 1), 3); };
  pen.beginPath();
  for (const { lane, index } of state.chain) {
    if (!isVisible(lane)) continue;
    const left = view.left + (lane.starts[index] - view.from) * view.scale;
    const right = view.left + (lane.ends[index] - view.from) * view.scale;
    const y = lane.top + lane.height;
    if (right >= view.left && left <= view.right) {
      if (run && run.y === y && left - run.right < 1.5) run.right = Math.max(right, run.right);
      else {
        flush();
        run = { y, left, right };
      }
      if (before && before !== lane) {
        const x = Math.round(left) + 0.5;
        pen.moveTo(x, before.top + before.height + 1.5);
        pen.lineTo(x, y + 1.5);
      }
    }
    before = lane;
    if (left > view.right) break;
  }
  flush();
  pen.globalAlpha = 0.55;
  pen.stroke();
  pen.globalAlpha = 1;
}

function drawCursor(pen, view, height) {
  if (state.cursor === null) return;
  const x = Math.round(view.left + (state.cursor - view.from) * view.scale) + 0.5;
  pen.strokeStyle = css("--soft");
  pen.globalAlpha = 0.5;
  pen.beginPath();
  pen.moveTo(x, AXIS - 5);
  pen.lineTo(x, height);
  pen.stroke();
  pen.globalAlpha = 1;
}

/** Draws a frame around an op or copy, and a line from what it waited for. */
function drawChosen(pen, view, { lane, index }) {
  if (!isVisible(lane)) return;
  const left = view.left + (lane.starts[index] - view.from) * view.scale;
  const right = view.left + (lane.ends[index] - view.from) * view.scale;
  pen.strokeStyle = css("--ink");
  pen.lineWidth = 2;
  pen.strokeRect(left, lane.top, Math.max(right - left, 2), lane.height);
  const cause = lane.isMeasured ? null : causeOf(lane, index);
  if (!cause || cause.lane === lane || !isVisible(cause.lane)) return;
  const x = view.left + (cause.lane.ends[cause.index] - view.from) * view.scale;
  pen.setLineDash([4, 3]);
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x, cause.lane.top + cause.lane.height / 2);
  pen.lineTo(left, lane.top + lane.height / 2);
  pen.stroke();
  pen.setLineDash([]);
}
