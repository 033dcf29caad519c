// The lanes of the timeline, one for each device and each channel that is used, and the part of the step in view.

const OP_HEIGHT = 26, COPY_HEIGHT = 14, MEASURED_HEIGHT = 16, GAP = 6, GUTTER = 150, AXIS = 26, RIGHT = 12;
const COPY = 3;  // number of the colour of copies, after those of the three phases

/** Returns all lanes of a plan; the measured lane of a device or channel is below it. */
function lanesOf(plan, problem) {
  const lanes = [];
  const { measured, copies } = plan;
  const columns = [problem.channel, problem.second_channel];  // a copy over two channels is in the lanes of both
  const channels = (source, target) => columns.map((channel) => Int32Array.from(source, (from, i) => channel[from][target[i]]));
  const real = measured && channels(measured.copy_source, measured.copy_target);
  problem.devices.forEach((device, d) => {
    const phases = (op) => problem.phase[op];
    lanes.push(lane({ type: "op", device: d, label: device.name, height: OP_HEIGHT }, plan.start, plan.seconds,
      [plan.device], d, null, phases));
    if (measured) lanes.push(lane({ type: "op", device: d, label: "measured", height: MEASURED_HEIGHT, isMeasured: true },
      measured.start, measured.seconds, [measured.device], d, measured.op, phases));
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

/** Returns a lane with the rows that have the key `wanted` in a column, by start; `numbers` has the op of each row, null: its own number. */
function lane(named, starts, lengths, keys, wanted, numbers, colour) {
  let rows = [];
  for (let i = 0; i < starts.length; i++) if (keys.some((column) => column[i] === wanted)) rows.push(i);
  rows.sort((a, b) => starts[a] - starts[b] || a - b);
  const found = {
    isMeasured: false, ...named, count: rows.length,
    rows: Int32Array.from(rows),  // of the columns that it is made from
    numbers: Int32Array.from(rows, (row) => (numbers ? numbers[row] : row)),  // the op or the copy
    starts: Float64Array.from(rows, (row) => starts[row]),
    ends: Float64Array.from(rows, (row) => starts[row] + lengths[row]),
  };
  for (let i = 1; i < found.count; i++) {  // lengths are rounded: what would end after the next one starts is cut
    if (!found.isMeasured && found.ends[i - 1] > found.starts[i]) found.ends[i - 1] = found.starts[i];
  }
  found.reach = found.ends.slice();  // the latest end so far: measured ones may overlap
  for (let i = 1; i < found.count; i++) found.reach[i] = Math.max(found.reach[i], found.reach[i - 1]);
  found.colours = Uint8Array.from(found.numbers, colour);
  found.busy = found.ends.reduce((sum, end, i) => sum + end - found.starts[i], 0);
  return found;
}

/** Finds the place of each op and copy, and those of the critical path. */
function markCritical(lanes, plan) {
  const places = { op: new Map(), copy: new Map() };
  for (const lane of lanes) {
    if (!lane.isMeasured) lane.numbers.forEach((number, index) => places[lane.type].set(number, { lane, index }));
  }
  state.places = places;
  const { kind, number } = plan.critical;
  state.chain = [];
  kind.forEach((code, i) => {
    const place = places[data.path_kinds[code]]?.get(number[i]);
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

/** Returns the seconds of the whole step, predicted or measured, whichever is longer. */
function wholeSeconds() {
  const { plan } = state;
  const measured = plan.measured && state.measured ? plan.measured.step_seconds : 0;
  return Math.max(plan.step_seconds, measured) || 1e-6;
}

function fitView() {
  setView(0, wholeSeconds());
}

/** Shows a part of the step, within its ends. */
function setView(from, to) {
  const whole = wholeSeconds();
  const width = Math.min(Math.max(to - from, whole * 1e-7, 1e-10), whole);
  state.from = Math.min(Math.max(from, 0), whole - width);
  state.to = state.from + width;
  redraw();
}

/** Zooms around a moment; a factor below 1 zooms in. */
function zoom(factor, around = (state.from + state.to) / 2) {
  setView(around - (around - state.from) * factor, around + (state.to - around) * factor);
}
