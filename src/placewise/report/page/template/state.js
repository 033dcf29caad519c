// What is shown now. Whoever changes it calls `redraw`.

const PHASE_COLOURS = ["--forward", "--backward", "--update", "--copy"];
const DEVICE_COLOURS = [  // Paul Tol's muted palette, safe for colour-blind readers
  "#44aa99", "#cc6677", "#6655c0", "#ddaa33", "#88ccee", "#882255", "#117733", "#aa4499", "#999933", "#bbbbbb",
];

const state = {
  number: 0, plan: null, problem: null, lanes: [],
  from: 0, to: 1,          // seconds of the step that are in view
  module: null,            // the path of the module that is chosen
  query: "",               // what is looked for in the ops' names
  mask: null,              // [ops], 1 for those that both let through; null: all
  critical: true, measured: true, channels: true, upToLimit: true,
  hovered: null, pinned: null,  // { lane, index }
  pinnedAt: null,          // where the card of what is pinned stands
  cursor: null,            // seconds under the pointer
  device: 0,               // whose memory is told
  frames: 0,               // drawn so far
};

const deviceColour = (device) => DEVICE_COLOURS[device % DEVICE_COLOURS.length];

let asked = false;

/** Draws what depends on view, filter and pointer, once before the next frame. */
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    drawTimeline();
    drawMemory();
    state.frames++;
  });
}

/** Works out which ops the chosen module and the text let through. */
function filterOps() {
  const { problem, module, query } = state;
  state.mask = null;
  if (module !== null || query) {
    const wanted = query.toLowerCase();
    const inside = problem.paths.map((path) => module === null || isInside(path, module));
    state.mask = Uint8Array.from(problem.names, (name, op) =>
      inside[problem.path[op]] && (!wanted || name.toLowerCase().includes(wanted)) ? 1 : 0);
  }
  const found = state.mask === null ? 0 : state.mask.reduce((sum, bit) => sum + bit, 0);
  byId("found").textContent = state.mask === null ? "" : `${count(found)} of ${count(problem.names.length)} ops`;
  byId("filter").hidden = module === null;
  byId("filter").textContent = module === null ? "" : `${moduleName(module)} ✕`;
  redraw();
}

/** Returns whether a path lies in a module; a module that ends with a dot is its own ops alone. */
function isInside(path, module) {
  if (module.endsWith(".")) return `${path}.` === module;
  return path === module || path.startsWith(`${module}.`);
}

const moduleName = (module) => (module === "." ? "ops in no module" : module.endsWith(".") ? `${module.slice(0, -1)} itself` : module);
