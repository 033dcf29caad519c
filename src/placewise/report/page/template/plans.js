// Several plans: a table of all, and which one is shown.

function showPlan(number) {
  state.number = number;
  state.plan = planOf(number);
  const problem = data.problems[state.plan.problem];
  const isOther = problem !== state.problem;
  Object.assign(state, { problem, hovered: null, pinned: null, lanes: lanesOf(state.plan, problem) });
  if (isOther) {
    const channels = state.lanes.filter((lane) => lane.type === "copy" && !lane.isMeasured).length <= MANY_CHANNELS;
    Object.assign(state, { channels, module: null, query: "", device: fullest(state.plan, problem) });
  }
  byId("find").value = state.query;
  byId("measured").hidden = !state.plan.measured;
  markToggles();
  showHeadline();
  showLegend();
  showModules();
  showPeak();
  markPlan();
  showCurves();
  hideCard();
  fitView();
  filterOps();
}

/** Returns the device with the least part of its memory left. */
function fullest(plan, problem) {
  const shares = problem.devices.map((device, d) => plan.peak_bytes[d] / Math.max(device.memory_bytes, 1));
  return shares.indexOf(Math.max(...shares));
}

function showPlans() {
  if (data.plans.length < 2) return;
  byId("comparison").hidden = false;
  const several = data.problems.length > 1;
  const head = ["plan", several ? "step of" : null, "strategy", "seed", "evaluations", "step", "to the best", "above the bound", "fullest memory"];
  const isText = [true, true, true];
  const texts = (row) => row.map((text, i) => [text, isText[i]]).filter(([text]) => text !== null);
  const best = Math.min(...data.plans.filter((plan) => plan.fits).map((plan) => plan.step_seconds));
  const rows = data.plans.map((plan, number) => {
    const problem = data.problems[plan.problem];
    const d = fullest(plan, problem);
    const bound = problem.bound_seconds;
    const row = make("tr", "", ...texts([
      plan.label, several ? `${problem.graph} on ${problem.cluster}` : null, plan.strategy ?? "–", plan.seed ?? "–",
      plan.evaluations === null ? "–" : count(plan.evaluations), seconds(plan.step_seconds),
      several ? "–" : (plan.step_seconds / best).toFixed(2),
      bound ? `${((plan.step_seconds / bound - 1) * 100).toFixed(1)}%` : "–",
      `${problem.devices[d].name} ${percent(plan.peak_bytes[d] / Math.max(problem.devices[d].memory_bytes, 1))}`,
    ]).map(([text, left]) => make("td", left ? "text" : "", text)));
    row.tabIndex = 0;
    row.addEventListener("click", () => showPlan(number));
    row.addEventListener("keydown", (event) => { if (event.key === "Enter") showPlan(number); });
    return row;
  });
  const names = make("tr", "", ...texts(head).map(([text, left]) => make("th", left ? "text" : "", text)));
  byId("plans").replaceChildren(make("thead", "", names), make("tbody", "", ...rows));
}

function markPlan() {
  document.querySelectorAll("#plans tbody tr").forEach((row, i) => row.setAttribute("aria-selected", i === state.number));
}
