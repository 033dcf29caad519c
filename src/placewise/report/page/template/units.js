// Numbers for people, and helpers that make elements.

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]];

function withUnit(number, units) {
  if (!number) return `0 ${units === TIMES ? "s" : "B"}`;
  const [size, unit] = units.find(([size]) => Math.abs(number) >= size * 0.9995) || units.at(-1);
  const value = number / size;
  return `${Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(3))} ${unit}`;
}

const seconds = (number) => withUnit(number, TIMES);
const bytes = (number) => withUnit(number, SIZES);
/** Returns a time of the step with enough digits to tell ops apart. */
function moment(number) {
  const [size, unit] = TIMES.find(([size]) => number >= size) || TIMES[2];
  return `${Number((number / size).toPrecision(6))} ${unit}`;
}

const count = (number) => number.toLocaleString("en");
const percent = (share) => `${share >= 0.0995 || share === 0 ? Math.round(share * 100) : (share * 100).toFixed(1)}%`;
/** Returns a share rounded up to a tenth of a percent, so that "at most" holds. */
const percentUp = (share) => `${(Math.max(Math.ceil(share * 1000 - 1e-5), 0) / 10).toFixed(1)}%`;
const times = (ratio) => `${ratio >= 10 ? ratio.toFixed(0) : ratio.toFixed(2)}×`;

/** Returns about this many round numbers between two. */
function ticks(from, to, about) {
  const rough = (to - from) / Math.max(about, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to + step * 1e-9; i++) found.push(i * step || 0);  // never -0
  return { step, found };
}

/** Returns ticks of time with labels, all in one unit and with as many decimals as they need. */
function timeTicks(from, to, about) {
  const { step, found } = ticks(from, to, about);
  const [size, unit] = TIMES.find(([size]) => Math.max(Math.abs(from), Math.abs(to)) >= size) || TIMES.at(-1);
  const decimals = Math.min(Math.max(-Math.floor(Math.log10(step / size) + 1e-9), 0), 9);
  return found.map((at) => ({ at, label: `${(at / size).toFixed(decimals)} ${unit}` }));
}

const byId = (id) => document.getElementById(id);
const colours = new Map();

/** Returns a colour of the style sheet. */
function css(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return colours.get(name);
}

/** Returns a new element with elements and texts inside, never markup. */
function make(tag, className = "", ...inside) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...inside.map((part) => (part instanceof Node ? part : String(part))));
  return element;
}

/** Returns an entry of a legend. */
function key(colour, text, className = "") {
  const swatch = make("i", className);
  swatch.style.backgroundColor = colour;
  return make("span", "key", swatch, text);
}
