// The search: the best step so far, and the average of what was tried, by evaluations or by seconds.

const CHART = { left: 72, right: 20, top: 12, bottom: 40, height: 300 };
let axis = "evaluations";

function svg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const nameOf = (plan) => (plan.strategy === null ? plan.label : `${plan.label}: ${plan.strategy}`);

/** Returns the plans of the problem that is shown whose search is known. */
function searches() {
  return data.plans.map((plan, number) => ({ number, plan }))
    .filter(({ plan }) => plan.problem === state.plan.problem && plan.curve.best.some(Number.isFinite));
}

function showCurves() {
  const found = searches();
  byId("search-section").hidden = !found.length;
  if (!found.length) return;
  const hasSeconds = found.some(({ plan }) => plan.curve.seconds.some((time) => time > 0));
  if (!hasSeconds) axis = "evaluations";
  byId("axes").replaceChildren(...(hasSeconds ? ["evaluations", "seconds"] : []).map((name) => {
    const button = make("button", "", `by ${name}`);
    button.setAttribute("aria-pressed", name === axis);
    button.addEventListener("click", () => { axis = name; showCurves(); });
    return button;
  }));
  const colour = (number) => (found.length > 1 ? deviceColour(number) : css("--accent"));
  const hasAverage = found.some(({ plan }) => plan.curve.average.some(Number.isFinite));
  byId("curves-legend").replaceChildren(
    ...found.slice(0, 12).map(({ number, plan }) => key(colour(number), found.length > 1 ? nameOf(plan) : "best so far", "thin")),
    ...(hasAverage ? [key("var(--line)", "thin lines: average of what was tried", "thin")] : []),
    ...(boundOf(found) ? [key(css("--ink"), `bound ${seconds(boundOf(found))}`, "thin")] : []));
  drawCurves(found, colour);
}

/** Returns the bound, which holds for simulated times: nothing where a search has measured. */
function boundOf(found) {
  return found.some(({ plan }) => plan.measured_seconds) ? null : state.problem.bound_seconds;
}

function drawCurves(found, colour) {
  const chart = byId("curves"), width = chart.clientWidth || 1200;
  chart.setAttribute("viewBox", `0 0 ${width} ${CHART.height}`);
  const finite = (column) => Array.from(column).filter(Number.isFinite);
  const bests = found.flatMap(({ plan }) => finite(plan.curve.best));
  const bound = boundOf(found) || Math.min(...bests);
  const low = Math.min(bound, ...bests), high = Math.max(low * 1.02, ...bests) + (Math.max(...bests) - low) * 0.08;
  const last = Math.max(...found.flatMap(({ plan }) => finite(plan.curve[axis])), 1e-9);
  const floor = Math.max(low - (high - low) * 0.06, 0);
  const x = (value) => CHART.left + (value / last) * (width - CHART.left - CHART.right);
  const y = (value) => CHART.height - CHART.bottom - ((value - floor) / (high - floor)) * (CHART.height - CHART.bottom - CHART.top);
  const room = { x: CHART.left, y: CHART.top, width: width - CHART.left - CHART.right + 6, height: CHART.height - CHART.top - CHART.bottom };
  const clip = svg("clipPath", { id: "room" });
  clip.append(svg("rect", room));
  chart.replaceChildren(clip);
  for (const { at, label } of timeTicks(floor, high, 6)) {
    chart.append(svg("line", { class: "grid", x1: CHART.left, x2: width - CHART.right, y1: y(at), y2: y(at) }),
      svg("text", { x: CHART.left - 10, y: y(at) + 4, "text-anchor": "end" }, label));
  }
  const marks = axis === "seconds" ? timeTicks(0, last, width / 130) : ticks(0, last, width / 130).found.map((at) => ({ at, label: count(at) }));
  for (const { at, label } of marks) chart.append(svg("text", { x: x(at), y: CHART.height - CHART.bottom + 20, "text-anchor": "middle" }, label));
  chart.append(svg("text", { x: width - CHART.right, y: CHART.height - 4, "text-anchor": "end" }, axis === "seconds" ? "search time" : "evaluations"));
  if (boundOf(found)) chart.append(svg("path", { class: "bound", d: `M${CHART.left} ${y(bound)}H${width - CHART.right}` }));
  const lines = svg("g", { "clip-path": "url(#room)" });
  for (const { number, plan: { curve } } of found) {
    const stroke = colour(number), end = curve[axis].at(-1);
    lines.append(svg("path", { class: "average", stroke, d: pathOf(curve[axis], curve.average, x, y, false) }),
      svg("path", { class: number === state.number ? "best shown" : "best", stroke, d: pathOf(curve[axis], curve.best, x, y, true) }));
    if (Number.isFinite(end)) lines.append(svg("circle", { cx: x(end), cy: y(curve.best.at(-1)), r: 3.5, fill: stroke }));
  }
  chart.append(lines);
}

/** Returns the path through the points that are known; a staircase where values hold until the next point. */
function pathOf(across, up, x, y, isStair) {
  let path = "";
  for (let i = 0; i < up.length; i++) {
    if (!Number.isFinite(up[i]) || !Number.isFinite(across[i])) continue;
    path += !path ? `M${x(across[i]).toFixed(1)} ${y(up[i]).toFixed(1)}`
      : isStair ? `H${x(across[i]).toFixed(1)}V${y(up[i]).toFixed(1)}` : `L${x(across[i]).toFixed(1)} ${y(up[i]).toFixed(1)}`;
  }
  return path;
}
