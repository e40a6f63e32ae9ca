// SPDX-License-Identifier: Apache-2.0
// What the cards are doing: numbers, blocks, a drawing, a table, and what has happened since the page was opened. All
// text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 176, height: 126, across: 56, down: 36, margin: 12 };
// What a bar of a card leaves for its number.
const BAR = BOX.width - 64;

const one = (id) => document.getElementById(id);

/** An element with attributes, text or children. */
const make = (name, attributes = {}, ...inner) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inner);
  return element;
};

const draw = (name, attributes = {}, ...inner) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inner);
  return element;
};

const number = (value, digits = 1) =>
  Number.isFinite(value) ? value.toLocaleString("en", { maximumFractionDigits: digits }) : "–";

const percent = (part) => `${Math.round(Math.min(Math.max(part || 0, 0), 1) * 100)} %`;

const bytes = (count) => {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= size) return `${number(count / size)} ${unit}`;
  }
  return `${count} B`;
};

/** How far something is from its prediction, in words. */
const off = (measured, predicted) => {
  if (!(measured > 0) || !(predicted > 0)) return "";
  const by = Math.round((measured / predicted - 1) * 100);
  return by === 0 ? "as predicted" : `${Math.abs(by)} % ${by > 0 ? "above" : "below"} the prediction`;
};

const tile = (name, value, ...notes) =>
  make("div", {}, make("dt", {}, name),
    make("dd", {}, value, ...notes.filter((note) => note).map((note) => make("small", {}, note))));

const numbers = (status) => {
  const rate = status.tokens_per_second || {};
  const step = status.step_ms || {};
  const tiles = [
    tile("tokens in a second", number(rate.measured), rate.predicted && `predicted ${number(rate.predicted)}`,
      off(rate.measured, rate.predicted)),
    tile("a step", step.measured ? `${number(step.measured)} ms` : "–", step.predicted && `predicted ${number(step.predicted)} ms`),
    tile("requests", `${status.running ?? 0} of ${status.parallel ?? 0}`, `${status.waiting ?? 0} wait`,
      `${number(status.answered ?? 0, 0)} answered`),
    tile("tokens", number(status.tokens ?? 0, 0), `${number(status.prompt_tokens ?? 0, 0)} of prompts`,
      `${number(status.cached_tokens ?? 0, 0)} need not be computed`),
  ];
  for (const { clients, tokens_per_second: expected } of status.expected || []) {
    tiles.push(tile(`${clients} ${clients === 1 ? "client" : "clients"}`, number(expected), "tokens in a second expected"));
  }
  one("numbers").replaceChildren(...tiles);
};

const blocks = (kv) => {
  const total = kv?.total || 0;
  const each = kv?.tokens ? `; ${kv.tokens} tokens each` : "";
  const words = total
    ? `${kv.used} of ${total} blocks used, ${kv.cached} kept for prompts that begin the same${each}`
    : "no blocks";
  const width = (count) => (total ? (count / total) * 400 : 0);
  const bar = draw("svg", { viewBox: "0 0 400 14", role: "img", "aria-label": words },
    draw("rect", { class: "track", width: 400, height: 14, rx: 3 }),
    draw("rect", { class: "used", width: width(kv?.used || 0), height: 14 }),
    draw("rect", { class: "cached", x: width(kv?.used || 0), width: width(kv?.cached || 0), height: 14 }));
  one("blocks").replaceChildren(bar, make("p", { class: "legend" }, words));
};

/** Where each card stands: copies below each other, stages from left to right, and the cards of a stage as a column. */
const places = (cards) => {
  const columns = new Map();
  for (const card of cards) {
    const serves = card.state === "serving";
    const key = serves ? `${card.copy}.${card.stage}` : "others";
    if (!columns.has(key)) columns.set(key, { copy: serves ? card.copy : Infinity, stage: serves ? card.stage : 0, cards: [] });
    columns.get(key).cards.push(card);
  }
  // One wide stage becomes rows.
  const groups = [...columns.values()].sort((a, b) => a.copy - b.copy || a.stage - b.stage);
  const most = groups.length > 1 ? 1 : 3;
  const at = new Map();
  let [top, copy, across, tallest, widest] = [0, groups[0]?.copy, 0, 0, 0];
  for (const group of groups) {
    if (group.copy !== copy) [top, copy, across, tallest] = [top + tallest, group.copy, 0, 0];
    const spread = group.copy === Infinity ? 3 : most;
    group.cards.forEach((card, index) => {
      at.set(card.number, { x: across + (index % spread), y: top + Math.floor(index / spread) });
    });
    across += Math.min(spread, group.cards.length);
    tallest = Math.max(tallest, Math.ceil(group.cards.length / spread));
    widest = Math.max(widest, across);
  }
  return { at, width: Math.max(widest, 1), height: Math.max(top + tallest, 1) };
};

const share = (value, y, kind) => {
  const width = Math.min(Math.max(value || 0, 0), 1) * BAR;
  const bar = [draw("rect", { class: "track", x: 12, y, width: BAR, height: 8, rx: 2 }),
    draw("rect", { class: kind, x: 12, y, width, height: 8, rx: 2 }),
    draw("text", { class: "small number", x: BOX.width - 12, y: y + 8 }, percent(value))];
  if (kind === "waiting") {
    let lines = "";
    for (let x = 12; x + 6 <= 12 + width; x += 6) lines += `M${x} ${y + 8}L${x + 6} ${y}`;
    if (lines) bar.push(draw("path", { class: "hatch", d: lines }));
  }
  return bar;
};

/** A text that is not longer than there is room for. */
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

const layers = ({ layers: [first, end] }) => (end > first ? `${first}–${end - 1}` : "none");

const box = (card, { x, y }) => {
  const text = (y, words, kind = "") => draw("text", { x: 12, y, class: kind }, words);
  const title = `card ${card.number}, ${card.profile}: ${card.state}, computes ${percent(card.busy)}, waits ${percent(card.waiting)}`;
  const what = card.state === "serving"
    ? [text(58, `layers ${layers(card)}`), text(74, `${card.heads[0]} of ${card.heads[1]} heads`),
      ...share(card.busy, 84, "busy"), ...share(card.waiting, 97, "waiting")]
    : [text(66, card.state, "state")];
  const held = `${bytes(card.bytes.weights + card.bytes.kv + card.bytes.buffers)} of ${bytes(card.capacity)}`;
  const group = draw("g", { class: card.state, transform: `translate(${x} ${y})`, role: "img", "aria-label": title },
    draw("rect", { class: "box", width: BOX.width, height: BOX.height, rx: 8 }),
    text(23, `card ${card.number}`, "name"), text(39, cut(card.profile, 25), "small"), ...what,
    text(118, held, "small"));
  if (card.state === "lost") {
    const right = BOX.width - 14;
    group.append(draw("path", { class: "cross", d: `M${right - 14} 12l14 14m0-14l-14 14` }));
  }
  return group;
};

const drawing = (cards, links) => {
  if (!cards.length) {
    one("drawing").replaceChildren(make("p", { class: "legend" }, "No card has been heard of yet."));
    return;
  }
  const { at, width, height } = places(cards);
  const corner = ({ x, y }) => ({
    x: BOX.margin + x * (BOX.width + BOX.across), y: BOX.margin + y * (BOX.height + BOX.down),
  });
  const size = {
    x: 2 * BOX.margin + width * (BOX.width + BOX.across) - BOX.across,
    // A link that goes round a card of the last row has room below it.
    y: 2 * BOX.margin + height * (BOX.height + BOX.down) - BOX.down / 2,
  };
  const svg = draw("svg", { viewBox: `0 0 ${size.x} ${size.y}`, role: "group", "aria-label": "cards and their links" });
  const middle = (place) => {
    const { x, y } = corner(place);
    return { x: x + BOX.width / 2, y: y + BOX.height / 2 };
  };
  const alive = new Set(cards.filter((card) => card.state !== "lost").map((card) => card.number));
  for (const [from, to] of links) {
    if (!at.has(from) || !at.has(to) || !alive.has(from) || !alive.has(to)) continue;
    const [a, b] = [middle(at.get(from)), middle(at.get(to))];
    // Links that would pass behind another card go round it.
    const far = Math.abs(at.get(from).x - at.get(to).x) > 1 || Math.abs(at.get(from).y - at.get(to).y) > 1;
    const flat = Math.abs(a.y - b.y) < Math.abs(a.x - b.x);
    const bend = far ? (flat ? BOX.height : BOX.width) * 1.25 : 0;
    const [x, y] = [(a.x + b.x) / 2 + (flat ? 0 : bend), (a.y + b.y) / 2 + (flat ? bend : 0)];
    svg.append(draw("path", { class: "link", d: `M${a.x} ${a.y}Q${x} ${y} ${b.x} ${b.y}` }));
  }
  for (const card of cards) svg.append(box(card, corner(at.get(card.number))));
  // Few cards are not drawn larger than many.
  svg.setAttribute("width", size.x);
  svg.style.maxWidth = `${size.x * 1.15}px`;
  one("drawing").replaceChildren(svg);
};

const table = (cards) => {
  const rows = cards.map((card) => {
    const serves = card.state === "serving";
    const held = `${bytes(card.bytes.weights + card.bytes.kv + card.bytes.buffers)} of ${bytes(card.capacity)}`;
    const cells = [card.state, serves ? layers(card) : "–", serves ? `${card.heads[0]} of ${card.heads[1]}` : "–", held,
      serves ? percent(card.busy) : "–", serves ? percent(card.waiting) : "–"];
    return make("tr", { class: card.state }, make("th", { scope: "row" }, `${card.number} (${card.profile})`),
      ...cells.map((cell) => make("td", {}, cell)));
  });
  document.querySelector("#table tbody").replaceChildren(...rows);
  one("table").hidden = !rows.length;
};

let before = null;

/** What has changed since the last time, in words. */
const changes = (status) => {
  const states = new Map((status.cards || []).map((card) => [card.number, card.state]));
  const said = [];
  if (before) {
    for (const [card, state] of states) {
      const was = before.states.get(card);
      if (was && was !== state) {
        said.push(state === "lost" ? `card ${card} was lost` : was === "lost" ? `card ${card} is back` : `card ${card} is ${state} now`);
      }
    }
    if (before.layout && status.layout && before.layout !== status.layout) said.push(`the model is laid out as ${status.layout} now`);
    if (before.state !== status.state) said.push(`the server is ${status.state}`);
    if ((status.recomputed || 0) > before.recomputed) said.push("tokens of answers are computed again");
  }
  before = { states, layout: status.layout, state: status.state, recomputed: status.recomputed || 0 };
  const time = new Date().toLocaleTimeString();
  for (const what of said) one("events").prepend(make("li", {}, `${time}: ${what}`));
  while (one("events").children.length > 50) one("events").lastChild.remove();
};

const headline = (status) => {
  const words = [status.model, status.layout, status.fabric].filter((word) => word);
  one("model").textContent = status.state === "ready" ? words.join(" · ") : `${status.model} · ${status.state}`;
  one("model").classList.toggle("bad", status.state === "broken" || status.state === "ending");
  const lost = (status.cards || []).filter((card) => card.state === "lost").map((card) => card.number);
  const notices = [];
  if (status.broken) notices.push(`Nothing runs any more: ${status.broken}`);
  else if (lost.length) notices.push(`Lost: card ${lost.join(", card ")}. Answers go on with the cards that are left.`);
  const text = notices.join(" ");
  if (one("notice").textContent !== text) one("notice").textContent = text;
  // A phone shows the chat or the cards.
  one("show-cards").textContent = lost.length ? `Cards: ${lost.length} lost` : "Cards";
};

/** Shows a status, as /status gives it. */
export const show = (status) => {
  headline(status);
  changes(status);
  numbers(status);
  blocks(status.kv_blocks);
  drawing(status.cards || [], status.links || []);
  table(status.cards || []);
};

/** Says that the server does not answer. */
export const lose = (why) => {
  one("model").textContent = why;
  one("model").classList.add("bad");
};
