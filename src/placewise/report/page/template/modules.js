// The model as a tree of modules, each with its time by device.

/** Returns the tree: a node has its path, its seconds by device, and the nodes inside it. */
function treeOf(plan, problem) {
  const devices = problem.devices.length;
  const own = problem.paths.map(() => new Float64Array(devices));
  plan.seconds.forEach((time, op) => { own[problem.path[op]][plan.device[op]] += time; });
  const root = { path: "", word: "", times: new Float64Array(devices), inside: new Map() };
  problem.paths.forEach((path, number) => {
    let node = root;
    add(root.times, own[number]);
    const words = path ? path.split(".") : [];
    words.forEach((word, depth) => {
      if (!node.inside.has(word)) {
        node.inside.set(word, { path: words.slice(0, depth + 1).join("."), word, times: new Float64Array(devices), inside: new Map() });
      }
      node = node.inside.get(word);
      add(node.times, own[number]);
    });
    node.own = own[number];
  });
  return root;
}

const add = (sums, more) => more.forEach((value, i) => { sums[i] += value; });
const total = (column) => column.reduce((sum, value) => sum + value, 0);

/** Returns what is inside a node; its own ops beside modules are one more. */
function insideOf(node) {
  const inside = [...node.inside.values()];
  if (node.own && (inside.length || !node.path) && total(node.own) > 0) {
    const word = node.path ? "its own ops" : "ops in no module";
    inside.push({ path: `${node.path}.`, word, times: node.own, inside: new Map() });
  }
  return inside;
}

let openModules = new Set();

function showModules() {
  const tree = treeOf(state.plan, state.problem);
  const whole = total(tree.times) || 1;
  byId("devices").replaceChildren(...state.problem.devices.map((device, d) =>
    key(deviceColour(d), `${device.name} ${percent(tree.times[d] / whole)} of the ops' time`)));
  byId("modules").replaceChildren(...insideOf(tree).flatMap((node) => moduleRows(node, 0, whole)));
  markModule();
}

/** Returns the rows of a node and, where it is open, of what is inside it. */
function moduleRows(node, depth, whole) {
  const inside = insideOf(node), isOpen = openModules.has(node.path);
  const opener = make("button", "", inside.length ? (isOpen ? "▾" : "▸") : "");
  opener.setAttribute("aria-label", isOpen ? "close" : "open");
  opener.tabIndex = -1;
  const name = make("span", "name", opener, node.word);
  name.style.paddingLeft = `${depth * 18}px`;
  const time = total(node.times);
  const row = make("div", "module", name, make("span", "number", seconds(time)),
    make("span", "share", percent(time / whole)), shareBar(node.times, time));
  row.dataset.path = node.path;
  row.tabIndex = 0;
  row.setAttribute("role", "treeitem");
  if (inside.length) row.setAttribute("aria-expanded", isOpen);
  const flip = () => {
    if (!inside.length) return;
    if (isOpen) openModules.delete(node.path); else openModules.add(node.path);
    showModules();
    document.querySelectorAll("#modules .module").forEach((other) => { if (other.dataset.path === node.path) other.focus(); });
  };
  opener.addEventListener("click", (event) => { event.stopPropagation(); flip(); });
  row.addEventListener("click", () => chooseModule(node.path));
  row.addEventListener("keydown", (event) => {
    const wants = { Enter: () => chooseModule(node.path), ArrowRight: () => isOpen || flip(), ArrowLeft: () => isOpen && flip(),
      ArrowDown: () => row.nextElementSibling?.focus(), ArrowUp: () => row.previousElementSibling?.focus() }[event.key];
    if (!wants) return;
    event.preventDefault();
    event.stopPropagation();
    wants();
  });
  return [row, ...(isOpen ? inside.flatMap((child) => moduleRows(child, depth + 1, whole)) : [])];
}

function shareBar(times, time) {
  const parts = Array.from(times, (value, d) => {
    const part = make("i");
    part.style.cssText = `width: ${time ? (value / time) * 100 : 0}%; background: ${deviceColour(d)}`;
    return part;
  });
  const bar = make("span", "shares", ...parts);
  bar.title = Array.from(times, (value, d) => (value ? `${state.problem.devices[d].name} ${percent(value / time)}` : null))
    .filter((text) => text !== null).join(", ");
  return bar;
}

/** Shows a module's ops in the timeline; the same one again lets all through. */
function chooseModule(path) {
  state.module = state.module === path ? null : path;
  markModule();
  filterOps();
}

function markModule() {
  document.querySelectorAll("#modules .module").forEach((row) => row.setAttribute("aria-selected", row.dataset.path === state.module));
}
