// The pointer on a canvas that shows the step: the wheel zooms, dragging pans, and the panel handles the rest.

/**
 * Lets the pointer zoom and pan. `hover` is called with the event when the pointer moves without dragging, or null when
 * it drags; `press` on a click.
 */
function listen(canvas, { hover, press }) {
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
    hover(moved && dragged !== null ? null : event);
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    dragged = null;
    canvas.classList.remove("dragging");
    if (moved) return;
    press(event);
    redraw();
  });
  canvas.addEventListener("pointerleave", () => {
    state.cursor = state.hovered = null;
    showPinned();
    redraw();
  });
}

/** Returns the op or copy under a point of the timeline, or the nearest one within a few pixels, or null. */
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

/** Returns where the middle of an op is in the timeline, for tests and benchmarks. */
function whereIs(op) {
  const { lane, index } = state.places.op.get(op);
  const middle = (lane.starts[index] + lane.ends[index]) / 2;
  return { x: state.view.left + (middle - state.view.from) * state.view.scale, y: lane.top + lane.height / 2 };
}
