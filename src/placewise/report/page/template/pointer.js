// Pointer and keyboard on the timeline and the memory below it.

/** Returns the item under a point of the timeline, or the nearest one within a few pixels, or null. */
function itemAt(x, y) {
  const { view } = state;
  const lane = visibleLanes().find((lane) => y >= lane.top - GAP / 2 && y < lane.top + lane.height + GAP / 2);
  if (!lane || !lane.count || x < view.left || x > view.right) return null;
  const at = view.from + (x - view.left) / view.scale;
  const index = Math.min(firstAbove(lane.reach, at), lane.count - 1);
  const near = [index, index - 1].filter((i) => i >= 0)
    .map((i) => ({ i, far: Math.max(lane.starts[i] - at, at - lane.ends[i], 0) * view.scale }))
    .sort((a, b) => a.far - b.far)[0];
  return near.far <= 3 ? { lane, index: near.i } : null;
}

/** Returns where the middle of an op is in the timeline, for those who drive the page. */
function whereIs(op) {
  const { lane, index } = state.places.op.get(op);
  const middle = (lane.starts[index] + lane.ends[index]) / 2;
  return { x: state.view.left + (middle - state.view.from) * state.view.scale, y: lane.top + lane.height / 2 };
}

function listen(canvas) {
  let dragged = null, moved = false;
  const timeAt = (event) => state.view.from + (event.offsetX - state.view.left) / state.view.scale;
  canvas.addEventListener("wheel", (event) => {
    const isWhole = state.to - state.from >= wholeSeconds() * 0.9999;
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (sideways && Math.abs(event.deltaX) >= Math.abs(event.deltaY) * (event.shiftKey ? 0 : 1)) {
      event.preventDefault();
      const shift = sideways / state.view.scale;
      setView(state.from + shift, state.to + shift);
    } else if (!(isWhole && event.deltaY > 0)) {  // nothing left to zoom out: the page scrolls
      event.preventDefault();
      zoom(Math.exp(Math.max(Math.min(event.deltaY, 200), -200) * 0.002), timeAt(event));
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.offsetX, from: state.from, to: state.to };
    moved = false;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    state.cursor = event.offsetX >= GUTTER ? Math.min(timeAt(event), state.to) : null;
    if (dragged && Math.abs(event.offsetX - dragged.x) > 3) moved = true;
    if (dragged && moved) {
      canvas.classList.add("dragging");
      const shift = (dragged.x - event.offsetX) / state.view.scale;
      setView(dragged.from + shift, dragged.to + shift);
    }
    hover(canvas, event, moved && dragged !== null);
  });
  canvas.addEventListener("pointerup", (event) => {
    dragged = null;
    canvas.classList.remove("dragging");
    if (!moved) press(canvas, event);
  });
  canvas.addEventListener("pointerleave", () => {
    state.cursor = state.hovered = null;
    showPinned();
    redraw();
  });
}

function showPinned() {
  if (state.pinned) showCard(itemCard(state.pinned), state.pinnedAt);
  else hideCard();
}

function hover(canvas, event, isDragging) {
  if (canvas.id === "timeline") {
    state.hovered = isDragging ? null : itemAt(event.offsetX, event.offsetY);
    if (state.hovered) showCard(itemCard(state.hovered), event);
    else showPinned();
  } else if (state.cursor !== null && !isDragging) showCard(memoryCard(event.offsetY), event);
  else hideCard();
  redraw();
}

function press(canvas, event) {
  if (canvas.id === "memory") {
    state.device = deviceAt(event.offsetY);
    showPeak();
  } else {
    state.pinned = itemAt(event.offsetX, event.offsetY);
    state.pinnedAt = { clientX: event.clientX, clientY: event.clientY };
    showPinned();
  }
  redraw();
}

/** Shows an item in the middle, five times as wide as it is or wider. */
function goTo({ lane, index }) {
  const width = Math.max((lane.ends[index] - lane.starts[index]) * 5, wholeSeconds() / 200);
  const middle = (lane.starts[index] + lane.ends[index]) / 2;
  setView(middle - width / 2, middle + width / 2);
}

/** Goes to the next op, by its start, that the filter lets through. */
function goToNext() {
  if (!state.mask) return;
  const after = state.pinned?.lane.type === "op" ? state.plan.start[state.pinned.lane.numbers[state.pinned.index]] : -1;
  const last = state.pinned?.lane.type === "op" ? state.pinned.lane.numbers[state.pinned.index] : -1;
  const isBehind = (op) => state.plan.start[op] > after || (state.plan.start[op] === after && op > last);
  let next = -1, first = -1;
  state.mask.forEach((bit, op) => {
    if (!bit) return;
    if (first < 0 || state.plan.start[op] < state.plan.start[first]) first = op;
    if (isBehind(op) && (next < 0 || state.plan.start[op] < state.plan.start[next])) next = op;
  });
  const op = next >= 0 ? next : first;
  if (op < 0) return;
  state.pinned = state.places.op.get(op);
  goTo(state.pinned);
  const canvas = byId("timeline").getBoundingClientRect();
  state.pinnedAt = { clientX: (canvas.left + GUTTER + canvas.right) / 2, clientY: canvas.top + state.pinned.lane.top + 30 };
  showPinned();
}

function toggle(name) {
  state[name] = !state[name];
  if (name === "measured") setView(state.from, state.to);
  markToggles();
  redraw();
}

function markToggles() {
  const buttons = { critical: "critical", measured: "measured", channels: "channels", upToLimit: "limit" };
  for (const [name, id] of Object.entries(buttons)) byId(id).setAttribute("aria-pressed", state[name]);
}

function letGo() {
  state.pinned = state.hovered = null;
  hideCard();
  if (state.module !== null || state.query) {
    Object.assign(state, { module: null, query: "" });
    byId("find").value = "";
    markModule();
    filterOps();
  }
  redraw();
}

const KEYS = {
  ArrowLeft: () => setView(state.from - (state.to - state.from) * 0.15, state.to - (state.to - state.from) * 0.15),
  ArrowRight: () => setView(state.from + (state.to - state.from) * 0.15, state.to + (state.to - state.from) * 0.15),
  "+": () => zoom(1 / 1.5), "=": () => zoom(1 / 1.5), "-": () => zoom(1.5), 0: fitView,
  "/": () => byId("find").focus(),
  c: () => toggle("critical"), m: () => toggle("measured"), h: () => toggle("channels"), l: () => toggle("upToLimit"),
  "?": () => byId("keys").showModal(),
  "[": () => showPlan((state.number + data.plans.length - 1) % data.plans.length),
  "]": () => showPlan((state.number + 1) % data.plans.length),
  Escape: letGo,
};

function onKey(event) {
  const isTyping = event.target.matches("input");
  if (event.ctrlKey || event.metaKey || event.altKey || (isTyping && event.key !== "Escape")) return;
  if (byId("keys").open || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  if (isTyping) event.target.blur();
  KEYS[event.key]();
}
