// The card next to the pointer. Names come from the model: they are texts, never markup.

/** Shows a title and rows of [name, value]; rows whose value is null are left out. */
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

/** Shows the card of the pinned op or copy, if there is one. */
function showPinned() {
  if (state.pinned) showCard(itemCard(state.pinned), state.pinnedAt);
  else hideCard();
}

// --- ops and copies ---

function itemCard(place) {
  if (place.lane.type === "op") return opCard(place);
  return place.lane.isMeasured ? measuredCopyCard(place) : copyCard(place);
}

const interval = (lane, index) => `${moment(lane.starts[index])} to ${moment(lane.ends[index])}`;

function opCard({ lane, index }) {
  const { problem, plan } = state;
  const op = lane.numbers[index];
  const length = lane.ends[index] - lane.starts[index];
  const batch = problem.micro_batch[op];
  const [reads, writes] = problem.shapes[problem.shape[op]];
  const idle = lane.starts[index] - (index ? lane.ends[index - 1] : 0);
  return {
    title: problem.names[op],
    rows: [
      ["module", problem.paths[problem.path[op]] || "none"],
      ["kind", `${problem.kinds[problem.kind[op]]}, ${data.phases[problem.phase[op]]}${batch < 0 ? "" : `, micro-batch ${batch}`}`],
      ["reads", reads || null],
      ["writes", writes || null],
      ["device", `${problem.devices[lane.device].name}${lane.isMeasured ? ", measured" : ""}`],
      ["for memory", { repeated: "computed again, so that its result need not be kept", waits: "its tensor waits here" }[data.op_marks[plan.mark[op]]] ?? null],
      ["time", seconds(length) + (lane.isMeasured ? ` (predicted ${seconds(plan.seconds[op])})` : measuredTime(op))],
      ["from", interval(lane, index)],
      ["waited for", lane.isMeasured ? null : waitedFor(plan.wait[op], plan.wait_for[op])],
      ["idle before", idle > length * 1e-3 && idle > 1e-9 ? seconds(idle) : null],
    ],
  };
}

/** Returns the measured time of an op in brackets, if there is one. */
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
      ["route", `${problem.devices[copies.source[c]].name} to ${problem.devices[copies.target[c]].name}`],
      ["shape", copies.shapes[copies.shape[c]] || null],
      ["size", bytes(copies.bytes[c])],
      ["for memory", { leaves: "leaves, to wait there", returns: "comes back to be read", visits: "visits for this pass" }[data.copy_marks[copies.mark[c]]] ?? null],
      ["time", seconds(copies.seconds[c])],
      ["from", interval(lane, index)],
      ["read by", problem.names[copies.reader[c]]],
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
      ["route", `${device("copy_source")} to ${device("copy_target")}, measured`],
      ["time", seconds(measured.copy_seconds[row])],
      ["from", interval(lane, index)],
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
    maker: () => `${op()}, which produces it`,
    channel: () => (what < 0 ? "its channel" : `its channel, busy with the copy of ${copy()}`),
  }[data.waits[code]]();
}

/** Returns the place of what an op or a copy waited for, or null. */
function causeOf(lane, index) {
  const number = lane.numbers[index];
  const { wait, wait_for: causes } = lane.type === "op" ? state.plan : state.plan.copies;
  const why = data.waits[wait[number]];
  const places = why === "copy" || why === "channel" ? state.places.copy : state.places.op;
  return places.get(causes[number]) ?? null;
}
