// The headline: step time, what it is compared with, the words, memory by device.

function showHeadline() {
  const { plan, problem } = state;
  const step = plan.step_seconds;
  document.title = `${seconds(step)} · ${problem.graph} on ${problem.cluster}`;
  const how = [plan.strategy, plan.evaluations === null ? null : `${count(plan.evaluations)} evaluations`,
    plan.seed === null ? null : `seed ${plan.seed}`].filter((part) => part !== null);
  byId("what").textContent = `${problem.graph} on ${problem.cluster}${how.length ? ` · ${how.join(", ")}` : ""}`;
  byId("step").replaceChildren(seconds(step), make("span", "", "a step, predicted"));
  byId("figures").replaceChildren(...figures(plan, problem, step).map(([name, value, more]) =>
    make("div", "", make("dt", "", name), make("dd", "", value, make("span", "", more)))));
  byId("words").replaceChildren(...plan.words.map((line) => make("li", "", line)));
  byId("memories").replaceChildren(...problem.devices.map((device, d) => memoryMeter(device, plan.peak_bytes[d], d)));
}

function figures(plan, problem, step) {
  const rows = [];
  const real = plan.measured ? plan.measured.step_seconds : plan.measured_seconds;
  if (real) {
    rows.push(["measured", seconds(real), `${real >= step ? "+" : "−"}${percent(Math.abs(real / step - 1))} of predicted`]);
  }
  const { alone, expert_seconds: expert, bound_seconds: bound } = problem;
  rows.push(alone && step ? ["over one device", times(alone.seconds / step), `${alone.name} alone ${seconds(alone.seconds)}`]
    : ["over one device", "–", "it fits on none"]);
  rows.push(expert && step ? ["over the expert", times(expert / step), seconds(expert)]
    : ["over the expert", "–", "its placement does not fit"]);
  if (bound) rows.push(["above the bound", `≤ ${(Math.max(step / bound - 1, 0) * 100).toFixed(1)}%`,
    `no placement below ${seconds(bound)}`]);
  if (!plan.fits) rows.push(["memory", "does not fit", ""]);
  return rows;
}

function memoryMeter(device, peak, d) {
  const share = device.memory_bytes ? peak / device.memory_bytes : 0;
  const fill = make("i");
  fill.style.width = `${Math.min(share, 1) * 100}%`;
  fill.style.backgroundColor = share > 1 ? "var(--alarm)" : deviceColour(d);
  const text = `${bytes(peak)} of ${bytes(device.memory_bytes)}${share > 1 ? ": does not fit" : ""}`;
  return make("div", "meter", make("span", "", device.name), make("span", share > 1 ? "over" : "", text),
    make("div", "track", fill));
}
