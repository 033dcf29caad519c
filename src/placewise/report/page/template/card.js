// The card of an op or a copy. Names come from the model: they are texts, never markup.

function showCard({ title, rows }, event) {
  const card = byId("card");
  const lines = rows.filter(([, value]) => value !== null).flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]);
  card.replaceChildren(make("b", "", title), make("dl", "", ...lines));
  card.hidden = false;
  const { width, height } = card.getBoundingClientRect();
  const right = event.clientX + 18 + width < innerWidth ? event.clientX + 18 : event.clientX - 18 - width;
  const below = event.clientY + 18 + height < innerHeight ? event.clientY + 18 : event.clientY - 18 - height;
  card.style.left = `${Math.max(right, 4)}px`;
  card.style.top = `${Math.max(below, 4)}px`;
}

function hideCard() {
  byId("card").hidden = true;
}

function itemCard(place) {
  if (place.lane.type === "op") return opCard(place);
  return place.lane.isMeasured ? measuredCopyCard(place) : copyCard(place);
}

function opCard({ lane, index }) {
  const { problem, plan } = state;
  const op = lane.numbers[index];
  const length = lane.ends[index] - lane.starts[index];
  const predicted = plan.seconds[op];
  const batch = problem.micro_batch[op];
  const [reads, writes] = problem.shapes[problem.shape[op]];
  const still = lane.starts[index] - (index ? lane.ends[index - 1] : 0);
  return {
    title: problem.names[op],
    rows: [
      ["module", problem.paths[problem.path[op]] || "none"],
      ["kind", `${problem.kinds[problem.kind[op]]}, ${data.phases[problem.phase[op]]}${batch < 0 ? "" : `, micro-batch ${batch}`}`],
      ["reads", reads || null],
      ["writes", writes || null],
      ["on", `${problem.devices[lane.device].name}${lane.isMeasured ? ", measured" : ""}`],
      ["time", seconds(length) + (lane.isMeasured ? ` (predicted ${seconds(predicted)})` : measuredTime(op))],
      ["from", `${moment(lane.starts[index])} to ${moment(lane.ends[index])}`],
      ["waited for", lane.isMeasured ? null : waitedFor(plan.wait[op], plan.wait_for[op])],
      ["before it", still > length * 1e-3 && still > 1e-9 ? `${problem.devices[lane.device].name} stood still for ${seconds(still)}` : null],
    ],
  };
}

/** Returns an op's measured time in brackets, or nothing. */
function measuredTime(op) {
  const { measured } = state.plan;
  const row = measured ? measured.op.indexOf(op) : -1;
  return row < 0 ? "" : ` (measured ${seconds(measured.seconds[row])})`;
}

function copyCard({ lane, index }) {
  const { problem, plan } = state;
  const { copies } = plan, c = lane.numbers[index];
  return {
    title: `copy of ${copies.names[copies.name[c]]}`,
    rows: [
      ["way", `${problem.devices[copies.source[c]].name} to ${problem.devices[copies.target[c]].name}`],
      ["shape", copies.shapes[copies.shape[c]] || null],
      ["size", bytes(copies.bytes[c])],
      ["time", seconds(copies.seconds[c])],
      ["from", `${moment(lane.starts[index])} to ${moment(lane.ends[index])}`],
      ["for", problem.names[copies.reader[c]]],
      ["waited for", waitedFor(copies.wait[c], copies.wait_for[c])],
    ],
  };
}

function measuredCopyCard({ lane, index }) {
  const { measured } = state.plan, row = lane.rows[index];
  const device = (column) => state.problem.devices[measured[column][row]].name;
  return {
    title: `copy of ${measured.copy_name[row]}`,
    rows: [
      ["way", `${device("copy_source")} to ${device("copy_target")}, measured`],
      ["time", seconds(measured.copy_seconds[row])],
      ["from", `${moment(lane.starts[index])} to ${moment(lane.ends[index])}`],
    ],
  };
}

/** Returns in words what an op or a copy waited for last. */
function waitedFor(code, what) {
  const { problem, plan } = state;
  const op = () => problem.names[what], copy = () => plan.copies.names[plan.copies.name[what]];
  return {
    nothing: () => "nothing: it starts with the step",
    host: () => "its launch by the host",
    device: () => (what < 0 ? "its device" : `its device, busy with ${op()}`),
    copy: () => `the copy of ${copy()}`,
    after: () => `${op()}, which must end first`,
    maker: () => `${op()}, which makes it`,
    channel: () => (what < 0 ? "its channel" : `its channel, busy with ${copy()}`),
  }[data.waits[code]]();
}

/** Returns the place of what an item waited for, or null. */
function causeOf(lane, index) {
  const number = lane.numbers[index];
  const { wait, wait_for: causes } = lane.type === "op" ? state.plan : state.plan.copies;
  const why = data.waits[wait[number]];
  const places = why === "copy" || why === "channel" ? state.places.copy : state.places.op;
  return places.get(causes[number]) ?? null;
}
