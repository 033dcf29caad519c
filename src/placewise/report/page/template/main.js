// Wiring.

byId("critical").addEventListener("click", () => toggle("critical"));
byId("measured").addEventListener("click", () => toggle("measured"));
byId("channels").addEventListener("click", () => toggle("channels"));
byId("limit").addEventListener("click", () => toggle("upToLimit"));
byId("zoom-in").addEventListener("click", () => zoom(1 / 1.5));
byId("zoom-out").addEventListener("click", () => zoom(1.5));
byId("fit").addEventListener("click", fitView);
byId("help").addEventListener("click", () => byId("keys").showModal());
byId("filter").addEventListener("click", () => chooseModule(state.module));
byId("find").addEventListener("input", (event) => {
  state.query = event.target.value.trim();
  state.pinned = null;
  hideCard();
  filterOps();
});
byId("find").addEventListener("keydown", (event) => { if (event.key === "Enter") goToNext(); });
byId("timeline").addEventListener("dblclick", (event) => {
  const place = itemAt(event.offsetX, event.offsetY);
  if (place) goTo(place);
});
addEventListener("keydown", onKey);
listen(byId("timeline"));
listen(byId("memory"));

/** Draws all in the colours that count now, at once: paper does not wait for the next frame. */
function repaint() {
  paints = null;
  colours.clear();
  showLegend();
  showCurves();
  drawTimeline();
  drawMemory();
}

new ResizeObserver(() => { showCurves(); redraw(); }).observe(byId("timeline"));
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", repaint);

showPlans();
showPlan(0);
state.upToLimit = state.problem.devices.some((device, d) => state.plan.peak_bytes[d] > 0.03 * device.memory_bytes);  // else it is a line
markToggles();
window.placewise = { state, whereIs };  // for those who drive the page
