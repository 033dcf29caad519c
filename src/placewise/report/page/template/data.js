// The page's data, as page_data.py packs it.

const COLUMNS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array };

/** Returns a column of numbers from its base64. */
function unpack(column) {
  const text = atob(column.base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new COLUMNS[column.kind](bytes.buffer);
}

/** Returns an object with all columns unpacked, in the objects inside it too. */
function unpacked(entry) {
  if (Array.isArray(entry) || entry === null || typeof entry !== "object") return entry;
  if ("base64" in entry) return unpack(entry);
  if (ArrayBuffer.isView(entry)) return entry;
  return Object.fromEntries(Object.entries(entry).map(([name, value]) => [name, unpacked(value)]));
}

const data = JSON.parse(document.getElementById("data").textContent);
document.getElementById("data").remove();
data.problems = data.problems.map(unpacked);
for (const plan of data.plans) plan.curve = unpacked(plan.curve);
const opened = new Map();

/** Returns a plan; its columns are unpacked when it is first shown. */
function planOf(number) {
  if (!opened.has(number)) opened.set(number, unpacked(data.plans[number]));
  return opened.get(number);
}
