// What starts the page, when all panels are there.

byId("help").addEventListener("click", () => byId("keys").showModal());
addKey("?", "these keys", () => byId("keys").showModal());
addKey("[", "previous plan", () => showPlan((state.number + data.plans.length - 1) % data.plans.length));
addKey("]", "next plan", () => showPlan((state.number + 1) % data.plans.length));
byId("key-help").replaceChildren(...keyHelp.flatMap(([key, text]) => [make("dt", "", key), make("dd", "", text)]));
addEventListener("keydown", onKey);

/** Draws everything in the current colours and at once: a printer does not wait for the next frame. */
function repaint() {
  forgetFills();
  colours.clear();
  callPanels("paint");
  callPanels("draw");
}

new ResizeObserver(() => { callPanels("paint"); redraw(); }).observe(byId("timeline"));
for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", repaint);

showPlan(0);
state.upToCapacity = state.problem.devices.some((device, d) => state.plan.peak_bytes[d] > 0.03 * device.memory_bytes);  // else flat lines
markToggles();
window.placewise = { state, whereIs };  // for tests and benchmarks
