// What is shown now, and the panels that show it.

const PHASE_COLOURS = ["--forward", "--backward", "--update", "--copy"];
const DEVICE_COLOURS = [  // Paul Tol's muted palette, safe for colour-blind readers
  "#44aa99", "#cc6677", "#6655c0", "#ddaa33", "#88ccee", "#882255", "#117733", "#aa4499", "#999933", "#bbbbbb",
];
const MANY_CHANNELS = 24;  // from here on their lanes are hidden at first

const state = {
  number: 0, plan: null, problem: null, lanes: [],
  from: 0, to: 1,          // the part of the step in view, in seconds
  module: null,            // path of the selected module
  query: "",               // what is searched for in the names of ops
  mask: null,              // [ops], 1 for ops that match module and query; null: all match
  critical: true, measured: true, channels: true, upToCapacity: true,
  hovered: null, pinned: null,  // { lane, index }
  pinnedAt: null,          // where the card of what is pinned is shown
  cursor: null,            // seconds under the pointer
  device: 0,               // whose peak memory is shown
  frames: 0,               // drawn so far
};

const deviceColour = (device) => DEVICE_COLOURS[device % DEVICE_COLOURS.length];

// --- panels ---

const panels = [];

/**
 * Adds a panel. The page calls its functions, all of which can be left out:
 *   show    another plan is shown
 *   filter  other ops match
 *   draw    before a frame, when the view, the matching ops or the pointer have changed
 *   paint   the colours or the width of the page have changed
 */
function addPanel(panel) {
  panels.push(panel);
}

const callPanels = (name) => panels.forEach((panel) => panel[name]?.());

/** Shows a plan in all panels. */
function showPlan(number) {
  state.number = number;
  state.plan = planOf(number);
  const problem = data.problems[state.plan.problem];
  const isOther = problem !== state.problem;
  Object.assign(state, { problem, hovered: null, pinned: null, lanes: lanesOf(state.plan, problem) });
  if (isOther) {
    const channels = state.lanes.filter((lane) => lane.type === "copy" && !lane.isMeasured).length <= MANY_CHANNELS;
    Object.assign(state, { channels, module: null, query: "", device: fullestDevice(state.plan, problem) });
  }
  markToggles();
  callPanels("show");
  hideCard();
  fitView();
  filterOps();
}

/** Returns the device that uses the largest share of its memory. */
function fullestDevice(plan, problem) {
  const shares = problem.devices.map((device, d) => plan.peak_bytes[d] / Math.max(device.memory_bytes, 1));
  return shares.indexOf(Math.max(...shares));
}

let isAsked = false;

/** Draws before the next frame, once however often it is called. */
function redraw() {
  if (isAsked) return;
  isAsked = true;
  requestAnimationFrame(() => {
    isAsked = false;
    callPanels("draw");
    state.frames++;
  });
}

// --- which ops match ---

/** Finds the ops that match the selected module and the query. */
function filterOps() {
  const { problem, module, query } = state;
  state.mask = null;
  if (module !== null || query) {
    const wanted = query.toLowerCase();
    const inside = problem.paths.map((path) => module === null || isInside(path, module));
    state.mask = Uint8Array.from(problem.names, (name, op) =>
      inside[problem.path[op]] && (!wanted || name.toLowerCase().includes(wanted)) ? 1 : 0);
  }
  callPanels("filter");
  redraw();
}

/** Returns whether a path is inside a module; a module that ends with a dot has only its own ops. */
function isInside(path, module) {
  if (module.endsWith(".")) return `${path}.` === module;
  return path === module || path.startsWith(`${module}.`);
}

/** Selects a module, or none if it is selected already. */
function selectModule(path) {
  state.module = state.module === path ? null : path;
  filterOps();
}

const moduleName = (module) => (module === "." ? "ops in no module" : module.endsWith(".") ? `${module.slice(0, -1)} itself` : module);

// --- buttons and keys ---

const toggles = [];
const KEYS = {};
const keyHelp = [];  // [key, what it does]

/** Makes a button and a key switch a part of the state on and off. */
function addToggle(id, name, key, help, onChange = () => {}) {
  const flip = () => {
    state[name] = !state[name];
    markToggles();
    onChange();
    redraw();
  };
  toggles.push([id, name]);
  byId(id).addEventListener("click", flip);
  addKey(key, help, flip);
}

function markToggles() {
  for (const [id, name] of toggles) byId(id).setAttribute("aria-pressed", state[name]);
}

/** Makes a key do something; keys without help are other spellings. */
function addKey(key, help, action) {
  KEYS[key] = action;
  if (help) keyHelp.push([key, help]);
}

function onKey(event) {
  const isTyping = event.target.matches("input");
  if (event.ctrlKey || event.metaKey || event.altKey || (isTyping && event.key !== "Escape")) return;
  if (byId("keys").open || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  if (isTyping) event.target.blur();
  KEYS[event.key]();
}
