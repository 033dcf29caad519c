// The timeline's lanes: one for each device and each channel that is used, items sorted by their start.

const OP_HEIGHT = 26, COPY_HEIGHT = 14, MEASURED_HEIGHT = 16, GAP = 6, GUTTER = 150, AXIS = 26, RIGHT = 12;
const MANY_CHANNELS = 24;  // their lanes are hidden at first
const COPY = 3;  // the colour of copies, behind those of the three phases

/** Returns all lanes of a plan, each device's and channel's measured one below it. */
function lanesOf(plan, problem) {
  const lanes = [];
  const { measured, copies } = plan;
  const channels = (source, target) => Int32Array.from(source, (from, i) => problem.channel[from][target[i]]);
  const real = measured && channels(measured.copy_source, measured.copy_target);
  problem.devices.forEach((device, d) => {
    const phases = (op) => problem.phase[op];
    lanes.push(lane({ type: "op", device: d, label: device.name, height: OP_HEIGHT }, plan.start, plan.seconds,
      plan.device, d, null, phases));
    if (measured) lanes.push(lane({ type: "op", device: d, label: "measured", height: MEASURED_HEIGHT, isMeasured: true },
      measured.start, measured.seconds, measured.device, d, measured.op, phases));
  });
  const used = channels(copies.source, copies.target);
  problem.channels.forEach((name, c) => {
    const predicted = lane({ type: "copy", label: name, height: COPY_HEIGHT }, copies.start, copies.seconds, used, c, null, () => COPY);
    const run = measured && lane({ type: "copy", label: "measured", height: COPY_HEIGHT, isMeasured: true },
      measured.copy_start, measured.copy_seconds, real, c, null, () => COPY);
    if (predicted.count || (run && run.count)) lanes.push(predicted);
    if (run && run.count) lanes.push(run);
  });
  markCritical(lanes, plan);
  return lanes;
}

/** Returns a lane of the rows whose key is `wanted`; `numbers` says which op each row is, null: its own number. */
function lane(named, starts, lengths, keys, wanted, numbers, colour) {
  let rows = [];
  for (let i = 0; i < keys.length; i++) if (keys[i] === wanted) rows.push(i);
  rows.sort((a, b) => starts[a] - starts[b] || a - b);
  const found = {
    isMeasured: false, ...named, count: rows.length,
    rows: Int32Array.from(rows),  // of the columns that it is made from
    numbers: Int32Array.from(rows, (row) => (numbers ? numbers[row] : row)),  // the op or the copy
    starts: Float64Array.from(rows, (row) => starts[row]),
    ends: Float64Array.from(rows, (row) => starts[row] + lengths[row]),
  };
  for (let i = 1; i < found.count; i++) {  // lengths are rounded: one that would end behind its follower's start is cut
    if (!found.isMeasured && found.ends[i - 1] > found.starts[i]) found.ends[i - 1] = found.starts[i];
  }
  found.reach = found.ends.slice();  // the latest end so far: measured ones may overlap
  for (let i = 1; i < found.count; i++) found.reach[i] = Math.max(found.reach[i], found.reach[i - 1]);
  found.colours = Uint8Array.from(found.numbers, colour);
  found.busy = found.ends.reduce((sum, end, i) => sum + end - found.starts[i], 0);
  return found;
}

/** Gives the plan its critical path as places in lanes. */
function markCritical(lanes, plan) {
  const places = { op: new Map(), copy: new Map() };
  for (const lane of lanes) {
    if (!lane.isMeasured) lane.numbers.forEach((number, index) => places[lane.type].set(number, { lane, index }));
  }
  state.places = places;
  const { kind, number } = plan.critical;
  state.chain = [];
  kind.forEach((code, i) => {
    const place = places[data.links[code]]?.get(number[i]);
    if (place) state.chain.push(place);
  });
}

/** Returns the first index whose value is above a limit, in a sorted column. */
function firstAbove(column, limit) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

/** Returns the seconds that the whole view has: predicted and, where it is shown, measured. */
function wholeSeconds() {
  const { plan } = state;
  const measured = plan.measured && state.measured ? plan.measured.step_seconds : 0;
  return Math.max(plan.step_seconds, measured) || 1e-6;
}

function fitView() {
  setView(0, wholeSeconds());
}

/** Shows a stretch of the step, as much of it as there is. */
function setView(from, to) {
  const whole = wholeSeconds();
  const width = Math.min(Math.max(to - from, whole * 1e-7, 1e-10), whole);
  state.from = Math.min(Math.max(from, 0), whole - width);
  state.to = state.from + width;
  redraw();
}

/** Zooms around a moment. */
function zoom(factor, around = (state.from + state.to) / 2) {
  setView(around - (around - state.from) * factor, around + (state.to - around) * factor);
}

function showLegend() {
  const names = data.phases.map((name, i) => key(css(PHASE_COLOURS[i]), name, i === 2 ? "striped" : ""));
  byId("legend").replaceChildren(...names, key(css("--copy"), "copy"), key(css("--ink"), "critical path", "thin"));
}
