// SPDX-License-Identifier: Apache-2.0
// Draws the page from its data. It adds and scales; predictions are in the data.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const own = data.own, plan = data.plan;
const $ = (id) => document.getElementById(id);

function el(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === 'style') Object.assign(node.style, value);
    else if (key.startsWith('on')) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, '');
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const color = (name) => `var(--${name})`;
const digits = (value) => {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.01 || size === 0 ? 2 : 4);
};
const ms = (value) => Math.abs(value) >= 1000 ? `${digits(value / 1000)} s` : Math.abs(value) >= 1 || value === 0 ? `${digits(value)} ms` : `${digits(value * 1000)} us`;
const signed = (value, write) => (value < 0 ? '-' : '+') + write(Math.abs(value));
const bytes = (value) => {
  for (const [unit, size] of [['GB', 1e9], ['MB', 1e6], ['kB', 1e3]]) if (value >= size) return `${digits(value / size)} ${unit}`;
  return `${value} B`;
};
const many = (count, word) => `${count} ${word}${count === 1 ? '' : 's'}`;
// 0, 1, 2, 5 as 0-2, 5
function runs(numbers) {
  const parts = [];
  for (const n of numbers) {
    const last = parts[parts.length - 1];
    if (last && last[1] === n - 1) last[1] = n; else parts.push([n, n]);
  }
  return parts.map(([from, to]) => from === to ? `${from}` : `${from}-${to}`).join(', ');
}

function table(header, rows, numeric = []) {
  const cell = (kind) => (value, index) => el(kind, { class: numeric.includes(index) ? 'n' : null }, value);
  return el('table', {}, el('thead', {}, el('tr', {}, ...header.map(cell('th')))),
    el('tbody', {}, ...rows.map((row) => el('tr', { class: row.own ? 'own' : null }, ...row.map(cell('td'))))));
}

function head() {
  const request = plan.request;
  $('title').textContent = data.title;
  $('request').textContent = `${plan.cluster.kinds}; context of ${request.context} tokens, keys and values as ${request.kv}, ${many(request.sequences, 'sequence')} at a time, best for ${request.objective}`;
  const range = plan.explanation && plan.explanation.low_ms ? ` ${ms(plan.explanation.low_ms)} to ${ms(plan.explanation.high_ms)} over the profiles' ranges` : '';
  const figure = (name, value, note) => el('div', {}, el('dt', {}, name), el('dd', {}, value, note ? el('small', {}, ` ${note}`) : null));
  $('figures').append(
    figure('predicted', `${digits(own.tokens_per_second)} tokens/s`),
    figure('a token', ms(own.decode_ms_per_token), range),
    figure(`first token after a prompt of ${request.prompt}`, ms(own.ttft_ms)),
    figure('loading', ms(own.load_ms)));
  const compared = data.comparison;
  if (compared) {
    const percent = 100 * compared.whole.gap_ms / compared.whole.predicted_ms;
    $('figures').append(figure('measured against predicted', `${signed(percent, (p) => `${p.toFixed(1)} %`)}`,
      `${digits(compared.whole.attributed_percent)} % of the gap has a cause`));
  }
  if (!own.fits) $('figures').append(figure('memory', el('span', { class: 'bad' }, 'does not fit')));
}

// A waterfall: rows of [name, value, color, kind]; kind 'sum' begins at 0.
function waterfall(rows, write) {
  let at = 0;
  const spans = rows.map(([name, value, paint, kind]) => {
    const from = kind === 'sum' ? 0 : at;
    at = from + value;
    return { name, value, paint, kind, from: Math.min(from, at), to: Math.max(from, at) };
  });
  const most = Math.max(...spans.map((span) => span.to), 1e-12), least = Math.min(0, ...spans.map((span) => span.from));
  const place = (value) => `${100 * (value - least) / (most - least)}%`;
  const box = el('div', { class: 'falls' });
  for (const span of spans) {
    const width = `${100 * (span.to - span.from) / (most - least)}%`;
    const sum = span.kind === 'sum' ? 'sum' : null;
    box.append(el('span', { class: sum }, span.name),
      el('span', { class: 'track' }, el('i', { style: { left: place(span.from), width, background: color(span.paint) } })),
      el('span', { class: sum }, sum ? write(span.value) : signed(span.value, write)));
  }
  return box;
}

const TERMS = [
  ['memory_ms', 'memory', 'memory', 'reading weights and the KV cache'],
  ['compute_ms', 'compute', 'compute', 'arithmetic beyond what memory hides'],
  ['fixed_ms', 'fixed costs', 'fixed', 'starting operators and steps, the way to the host'],
  ['communication_ms', 'exchanges', 'exchange', 'messages between cards'],
];

function scaling() {
  const one = plan.candidates.find((candidate) => candidate.strategy === 'one-card');
  const cards = own.cards, into = $('scaling');
  const terms = (candidate) => ({ ...candidate.terms, waiting_ms: candidate.waiting_ms });
  if (one && cards > 1 && plan.request.sequences === 1) {
    const speedup = one.decode_ms_per_token / own.decode_ms_per_token;
    const kinds = data.kinds.length > 1 ? ' (cards are of several kinds, so the ideal is a figure to compare with, not a bound)' : '';
    into.append(el('p', { id: 'speedup' }, `${cards} cards are ${digits(speedup)} and not ${cards} times as fast as one${one.fits ? '' : ' with memory enough'}${kinds}. From the ideal of one card's ${ms(one.decode_ms_per_token)} divided by ${cards}:`));
    const mine = terms(own), alone = terms(one);
    const rows = [[`one card / ${cards}`, one.decode_ms_per_token / cards, 'other', 'sum']];
    for (const [key, name, paint] of [...TERMS, ['waiting_ms', 'waiting for other sequences', 'waiting']]) {
      const lost = mine[key] - alone[key] / cards;
      if (Math.abs(lost) > own.decode_ms_per_token * 5e-4) rows.push([key === 'communication_ms' ? name : `${name}: not divided by ${cards}`, lost, paint]);
    }
    rows.push(['this plan', own.decode_ms_per_token, 'memory', 'sum']);
    into.append(waterfall(rows, ms));
  } else {
    into.append(el('p', {}, 'Where the time of a token goes:'));
    const mine = terms(own);
    const rows = [...TERMS, ['waiting_ms', 'waiting for other sequences', 'waiting']].filter(([key]) => mine[key] > 0).map(([key, name, paint]) => [name, mine[key], paint]);
    into.append(waterfall([...rows, ['a token', own.decode_ms_per_token, 'memory', 'sum']], ms));
  }
  $('reasons').append(...data.reasons.map((reason) => el('li', {}, reason)));
}

function layout() {
  const layers = plan.model.layers, into = $('layout');
  const grid = el('div', { class: 'grid', role: 'table', 'aria-label': 'cards and the layers that they hold', style: { gridTemplateColumns: `max-content repeat(${layers}, minmax(0, 1fr))` } });
  const copies = new Set(own.stages.map((stage) => stage.replica)).size;
  const mark = (from, span, node) => { node.style.gridColumn = `${from + 2} / span ${span}`; return node; };
  const rows = new Map();
  for (const stage of own.stages) stage.cards.forEach((card, rank) => {
    if (!rows.has(card)) rows.set(card, []);
    rows.get(card).push({ stage, rank });
  });
  const said = new Map();
  for (const [card, parts] of [...rows.entries()].sort((a, b) => a[0] - b[0])) {
    const key = JSON.stringify(parts.map(({ stage, rank }) => [stage.replica, stage.layers, stage.heads[rank][1] - stage.heads[rank][0], stage.shares[rank].toFixed(4)]));
    if (!said.has(key)) said.set(key, { cards: [], parts });
    said.get(key).cards.push(card);
  }
  // Cards with parts of the same size share a row where there are many.
  const shown = rows.size > 16 ? [...said.values()] : [...rows.entries()].sort((a, b) => a[0] - b[0]).map(([card, parts]) => ({ cards: [card], parts }));
  shown.forEach(({ cards, parts }, row) => {
    grid.append(el('span', { class: 'name', style: { gridRow: row + 1, gridColumn: 1 } }, cards.length > 1 ? `cards ${runs(cards)}` : `card ${cards[0]}`));
    for (const { stage, rank } of parts) {
      const [from, to] = stage.layers, [first, end] = stage.heads[rank];
      const heads = end === first ? 'no head' : cards.length > 1 ? `${many(end - first, 'head')} each` : `heads ${end - first === 1 ? first : `${first}-${end - 1}`}`;
      const copy = copies > 1 ? `copy ${stage.replica}, ` : '';
      const text = `${copy}layers ${from}-${to - 1}, ${heads}, ${(100 * stage.shares[rank]).toFixed(1)} % of rows`;
      const share = el('div', { class: 'share', style: { width: `${100 * stage.shares[rank]}%` } });
      const cell = mark(from, to - from, el('div', { class: 'cell', title: text }, text, share));
      cell.style.gridRow = row + 1;
      grid.append(cell);
    }
  });
  into.append(grid, el('p', { class: 'quiet' }, `From left to right ${many(layers, 'layer')}. The white bar is the card's share of each matrix.`));
  const used = new Set(own.card_ids), idle = [...Array(plan.cluster.cards).keys()].filter((card) => !used.has(card));
  if (idle.length) into.append(el('p', {}, `Left out, because they would only slow it down: card${idle.length > 1 ? 's' : ''} ${runs(idle)}.`));
  const list = data.exchanges.flatMap((stage, index) => stage.map((exchange) => [data.exchanges.length > 1 ? `${index}` : null, exchange.after, exchange.collective, exchange.algorithm, bytes(exchange.bytes), ms(exchange.time * 1e3)].filter((cell) => cell !== null)));
  if (list.length) {
    const header = ['after', 'collective', 'algorithm', 'bytes', 'takes'];
    const stages = data.exchanges.length > 1;
    $('exchanges').append(el('h3', {}, 'Exchanges of a layer'), table(stages ? ['stage', ...header] : header, list, stages ? [4, 5] : [3, 4]));
  }
}

function memory() {
  const parts = [['weights_bytes', 'weights', 'memory'], ['kv_bytes', 'KV cache', 'kv'], ['buffers_bytes', 'activations and messages', 'buffers'], ['reserved_bytes', 'reserved', 'reserved']];
  const most = Math.max(...own.memory.map((card) => Math.max(card.capacity_bytes, card.weights_bytes + card.kv_bytes + card.buffers_bytes + card.reserved_bytes)));
  const groups = new Map();
  for (const card of own.memory) {
    const key = [...parts.map(([name]) => card[name]), card.capacity_bytes].join();
    if (!groups.has(key)) groups.set(key, { ...card, cards: [] });
    groups.get(key).cards.push(card.card);
  }
  const box = el('div', { class: 'bars' });
  for (const group of groups.values()) {
    const used = parts.reduce((sum, [key]) => sum + group[key], 0), free = group.capacity_bytes - used;
    const words = parts.filter(([key]) => group[key]).map(([key, name]) => `${name} ${bytes(group[key])}`).join(', ');
    const bar = el('div', { class: 'bar', role: 'img', 'aria-label': words, title: words, style: { width: `${100 * Math.max(group.capacity_bytes, used) / most}%` } });
    for (const [key, , paint] of parts) bar.append(el('i', { style: { width: `${100 * group[key] / Math.max(group.capacity_bytes, used)}%`, background: color(paint) } }));
    box.append(el('span', {}, group.cards.length > 1 ? `cards ${runs(group.cards)}` : `card ${group.cards[0]}`), bar,
      el('span', { class: free < 0 ? 'bad' : null }, free < 0 ? `${bytes(-free)} too much` : `${bytes(free)} of ${bytes(group.capacity_bytes)} free`));
  }
  $('memory').append(el('ul', { class: 'legend' }, ...parts.map(([, name, paint]) => el('li', {}, el('i', { style: { background: color(paint) } }), name)), el('li', {}, el('i'), 'free')), box);
}

const CAUSES = [['memory_ms', 'memory', 'memory'], ['compute_ms', 'compute', 'compute'], ['link_latency_ms', 'link latency', 'exchange'], ['link_bandwidth_ms', 'link bandwidth', 'exchange'], ['host_ms', 'host', 'host'], ['recovery_ms', 'recovery', 'reserved'], ['not_in_program_ms', 'not in the program', 'fixed'], ['unexplained_ms', 'unexplained', 'fixed']];

function gap() {
  const compared = data.comparison;
  if (!compared) return;
  $('difference').hidden = false;
  const picked = el('select', { id: 'gap-of' }), shown = el('div', { id: 'gap-shown' });
  const choices = [['all steps', compared.whole], ...compared.cards.map((card) => [`all steps, as card ${card.card} saw it`, card]), ...compared.steps.slice(0, 400).map((step) => [`token ${step.token}`, step])];
  choices.forEach(([name], index) => picked.append(el('option', { value: index }, name)));
  const draw = () => {
    const one = choices[Number(picked.value)][1], causes = one.causes;
    const waiting = Object.entries(causes.waiting_for_card_ms || {}).map(([card, value]) => [`waiting for card ${card}`, value, 'waiting']);
    const parts = CAUSES.map(([key, name, paint]) => [name, causes[key] || 0, paint]);
    const rows = [...parts.slice(0, 4), ...waiting, ...parts.slice(4)].filter(([, value]) => Math.abs(value) > one.predicted_ms * 5e-5);
    shown.replaceChildren(waterfall([['predicted', one.predicted_ms, 'memory', 'sum'], ...rows, ['measured', one.measured_ms, 'other', 'sum']], ms),
      el('p', {}, `${signed(one.gap_ms, ms)}: ${one.gap_percent === null ? '' : `${signed(one.gap_percent, (p) => `${p.toFixed(2)} %`)} of the prediction, `}${digits(one.attributed_percent)} % of it with a cause.`));
  };
  picked.addEventListener('change', draw);
  const left = compared.left_out.length ? el('p', { class: 'quiet' }, `Not compared: ${compared.left_out.slice(0, 6).map((one) => `token ${one.token} (${one.why})`).join('; ')}`) : null;
  $('gap').append(el('div', { class: 'controls' }, el('label', {}, 'of', picked)), shown, ...(left ? [left] : []));
  draw();
}

const PAINTS = { host: 'host', embed: 'memory', attention: 'memory', output: 'memory', up: 'memory', down: 'memory', head: 'memory', exchange: 'exchange', 'hand-off': 'exchange', stall: 'waiting', reload: 'reserved' };
const PARTS = ['memory', 'compute', 'fixed', 'link latency', 'link bandwidth', 'waiting'];

// Thirteen numbers a mark: gap, duration, activity, layer, step, operator, operators, six parts.
function marksOf(numbers) {
  const marks = [];
  for (let at = 0, time = 0; at < numbers.length; at += 13) {
    const start = time + numbers[at], end = start + numbers[at + 1];
    marks.push({ start, end, activity: data.timeline.activities[numbers[at + 2]], layer: numbers[at + 3], token: numbers[at + 4], op: numbers[at + 5], ops: numbers[at + 6], parts: numbers.slice(at + 7, at + 13) });
    time = end;
  }
  return marks;
}

function timeline() {
  const { traces, detail, steps, all_steps: all } = data.timeline, into = $('timeline');
  const lanes = traces.map((trace) => {
    const of = new Map();
    trace.lanes.forEach((lane, index) => { const marks = marksOf(lane.marks); lane.cards.forEach((card) => of.set(card, { index, marks })); });
    return of;
  });
  if (!lanes.length || !lanes[0].size) { into.append(el('p', {}, 'No trace.')); return; }
  const grouped = new Map();
  for (const card of [...lanes[0].keys()].sort((a, b) => a - b)) {
    const key = lanes.map((of) => of.get(card)?.index ?? '-').join();
    if (!grouped.has(key)) grouped.set(key, { cards: [], lanes: lanes.map((of) => of.get(card)?.marks ?? []) });
    grouped.get(key).cards.push(card);
  }
  const rows = [...grouped.values()];
  // Both traces lie in slots, one for a step, as long as the longer of the two.
  const extents = traces.map((_, index) => {
    const of = new Map();
    for (const row of rows) for (const mark of row.lanes[index]) {
      const known = of.get(mark.token) ?? [Infinity, -Infinity];
      of.set(mark.token, [Math.min(known[0], mark.start), Math.max(known[1], mark.end)]);
    }
    return of;
  });
  const slots = new Map();
  let total = 0;
  for (const token of [...extents[0].keys()].sort((a, b) => a - b)) {
    slots.set(token, total);
    total += Math.max(...extents.map((of) => { const [from, to] = of.get(token) ?? [0, 0]; return to - from; }));
  }
  rows.forEach((row) => row.lanes.forEach((marks, index) => marks.forEach((mark) => {
    const shift = slots.get(mark.token) - extents[index].get(mark.token)[0];
    mark.from = mark.start + shift; mark.to = mark.end + shift; mark.text = `${mark.activity} layer ${mark.layer} token ${mark.token}`;
  })));

  const LEFT = 92, LANE = 15, GAP = 7, TOP = 20;
  const height = TOP + rows.length * (traces.length * LANE + GAP) + 4;
  const canvas = el('canvas', { tabindex: '0', role: 'application', height, 'aria-label': 'timeline: left and right go from mark to mark, up and down from lane to lane, plus and minus zoom, 0 shows everything', style: { height: `${height}px` } });
  const readout = el('p', { class: 'mark', 'aria-live': 'polite', id: 'mark' }), found = el('span', { class: 'quiet', id: 'found' });
  const search = el('input', { type: 'search', id: 'search', placeholder: 'attention layer 3', size: 22 });
  let view = [0, total], chosen = null, hits = null;
  const paints = {};
  const paint = (name) => paints[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const show = (from, to) => {
    const width = Math.min(Math.max(to - from, total * 1e-6, 10), total);
    const start = Math.min(Math.max(from, 0), total - width);
    view = [start, start + width]; draw();
  };
  const zoom = (factor, at = (view[0] + view[1]) / 2) => show(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  const top = (row, lane) => TOP + row * (traces.length * LANE + GAP) + lane * LANE;

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth || 800;
    canvas.width = width * ratio; canvas.height = height * ratio;
    const pen = canvas.getContext('2d');
    pen.scale(ratio, ratio); pen.font = '11px system-ui, sans-serif'; pen.textBaseline = 'middle';
    const scale = (width - LEFT) / (view[1] - view[0]), x = (time) => LEFT + (time - view[0]) * scale;
    pen.fillStyle = paint('quiet');
    const step = 10 ** Math.floor(Math.log10((view[1] - view[0]) / 4));
    for (let at = Math.ceil(view[0] / step) * step; at < view[1]; at += step) {
      if ((view[1] - view[0]) / step > 20 && Math.round(at / step) % 5) continue;
      pen.fillText(ms(at / 1e6), x(at) + 2, 9); pen.fillRect(x(at), 0, 1, TOP - 3);
    }
    rows.forEach((row, index) => {
      pen.fillStyle = paint('ink');
      pen.fillText(row.cards.length > 1 ? `cards ${runs(row.cards)}`.slice(0, 15) : `card ${row.cards[0]}`, 2, top(index, 0) + LANE * traces.length / 2);
      row.lanes.forEach((marks, lane) => {
        const y = top(index, lane);
        if (traces.length > 1) { pen.fillStyle = paint('quiet'); pen.fillText(traces[lane].name[0].toUpperCase(), LEFT - 13, y + LANE / 2); }
        let edge = -1;
        for (const mark of marks) {
          if (mark.to < view[0] || mark.from > view[1]) continue;
          const from = Math.max(x(mark.from), LEFT), to = x(mark.to);
          if (to < edge + 0.4 && mark !== chosen) continue;
          edge = to;
          pen.globalAlpha = hits && !hits.has(mark) ? 0.18 : mark.layer % 2 ? 0.78 : 1;
          pen.fillStyle = paint(PAINTS[mark.activity] ?? 'other');
          pen.fillRect(from, y, Math.max(to - from, 0.5), LANE - 2);
          pen.globalAlpha = 1;
          if (mark === chosen) { pen.strokeStyle = paint('ink'); pen.lineWidth = 2; pen.strokeRect(from, y, Math.max(to - from, 2), LANE - 2); }
          if (to - from > 60) { pen.fillStyle = '#fff'; pen.fillText(`${mark.activity} ${mark.layer}`, from + 4, y + LANE / 2 - 1); }
        }
      });
    });
  }

  function choose(row, lane, mark) {
    chosen = mark;
    const place = `${traces[lane].name}, ${rows[row].cards.length > 1 ? `cards ${runs(rows[row].cards)}` : `card ${rows[row].cards[0]}`}`;
    const ops = mark.ops > 1 ? `operators ${mark.op} to ${mark.op + mark.ops - 1}` : mark.ops ? `operator ${mark.op}` : 'not in the program';
    const parts = mark.parts.map((value, index) => [PARTS[index], value]).filter(([, value]) => value > 0).map(([name, value]) => `${name} ${ms(value / 1e6)}`).join(', ');
    const twin = rows[row].lanes[1 - lane]?.find((other) => other.token === mark.token && other.activity === mark.activity && other.layer === mark.layer && other.op <= mark.op && other.op + Math.max(other.ops, 1) > mark.op);
    const against = twin ? `; ${traces[1 - lane].name} ${ms((twin.end - twin.start) / 1e6)}` : '';
    readout.textContent = `${place}: ${mark.activity} of layer ${mark.layer}, token ${mark.token}, ${ops}: ${ms((mark.end - mark.start) / 1e6)}${against}${parts ? ` (${parts})` : ''}`;
    chosen.at = [row, lane];
    if (mark.to < view[0] || mark.from > view[1]) show(mark.from - (view[1] - view[0]) / 2, mark.from + (view[1] - view[0]) / 2); else draw();
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(), y = event.clientY - box.top;
    const time = view[0] + (event.clientX - box.left - LEFT) / (canvas.clientWidth - LEFT) * (view[1] - view[0]);
    for (let row = 0; row < rows.length; row++) for (let lane = 0; lane < traces.length; lane++) {
      if (y < top(row, lane) || y >= top(row, lane) + LANE) continue;
      const mark = rows[row].lanes[lane].find((one) => one.from <= time && time <= one.to);
      return mark ? [row, lane, mark] : null;
    }
    return null;
  }
  canvas.addEventListener('click', (event) => { const hit = under(event); if (hit) choose(...hit); });
  canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.deltaX) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect(), wide = view[1] - view[0];
    if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, view[0] + (event.clientX - box.left - LEFT) / (canvas.clientWidth - LEFT) * wide);
    else show(view[0] + (event.deltaX || event.deltaY) / canvas.clientWidth * wide, view[1] + (event.deltaX || event.deltaY) / canvas.clientWidth * wide);
  }, { passive: false });
  let drag = null;
  canvas.addEventListener('pointerdown', (event) => { drag = [event.clientX, ...view]; });
  window.addEventListener('pointerup', () => { drag = null; });
  canvas.addEventListener('pointermove', (event) => {
    if (!drag || !(event.buttons & 1)) return;
    const moved = (drag[0] - event.clientX) / (canvas.clientWidth - LEFT) * (drag[2] - drag[1]);
    show(drag[1] + moved, drag[2] + moved);
  });
  canvas.addEventListener('keydown', (event) => {
    const [row, lane] = chosen?.at ?? [0, 0], marks = rows[row].lanes[lane], index = chosen ? marks.indexOf(chosen) : -1;
    const nearest = (to, into) => { const list = rows[to].lanes[into]; if (list.length) choose(to, into, chosen ? list.reduce((a, b) => Math.abs(b.from - chosen.from) < Math.abs(a.from - chosen.from) ? b : a) : list[0]); };
    const keys = {
      ArrowRight: () => { if (index + 1 < marks.length) choose(row, lane, marks[index + 1]); },
      ArrowLeft: () => { if (index > 0) choose(row, lane, marks[index - 1]); },
      ArrowDown: () => { if (lane + 1 < traces.length) nearest(row, lane + 1); else if (row + 1 < rows.length) nearest(row + 1, 0); },
      ArrowUp: () => { if (lane > 0) nearest(row, lane - 1); else if (row > 0) nearest(row - 1, traces.length - 1); },
      '+': () => zoom(0.5, chosen ? (chosen.from + chosen.to) / 2 : undefined), '=': () => zoom(0.5), '-': () => zoom(2), 0: () => show(0, total),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  search.addEventListener('input', () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), wanted = words.join(' ');
    hits = words.length ? new Set() : null;
    let first = null;
    if (hits) rows.forEach((row, r) => row.lanes.forEach((marks, lane) => marks.forEach((mark) => {
      const text = ` ${mark.text} `, whole = words.every((word, i) => /^\d+$/.test(word) ? text.includes(` ${words[i - 1] ?? 'layer'} ${word} `) : text.includes(word));
      if (whole && wanted) { hits.add(mark); first ??= [r, lane, mark]; }
    })));
    found.textContent = hits ? `${many(hits.size, 'mark')}` : '';
    if (first) choose(...first); else draw();
  });
  // A prompt takes so much longer than a token that steps are picked by name.
  const tokens = [...slots.keys()], picked = el('select', { id: 'step' }, el('option', { value: '' }, 'everything'), ...tokens.map((token) => el('option', { value: token }, `token ${token}`)));
  picked.addEventListener('change', () => {
    const at = tokens.indexOf(Number(picked.value));
    if (picked.value === '' || at < 0) show(0, total); else show(slots.get(tokens[at]), slots.get(tokens[at + 1]) ?? total);
  });
  const button = (text, name, act) => el('button', { type: 'button', 'aria-label': name, onclick: act }, text);
  into.append(
    el('p', { class: 'quiet' }, `${traces.length > 1 ? 'Two lanes for each card: predicted (P) above measured (M); each step begins at the same place in both.' : `One lane for each card: ${traces[0].name}.`} Shown: ${steps < all ? `the first ${many(steps, 'step')} of ${all}` : many(steps, 'step')}, by ${detail}.`),
    el('div', { class: 'controls' }, button('+', 'zoom in', () => zoom(0.5)), button('-', 'zoom out', () => zoom(2)), button('all', 'show everything', () => { picked.value = ''; show(0, total); }), el('label', {}, 'step', picked), el('label', {}, 'search', search), found),
    el('ul', { class: 'legend' }, ...[['memory', 'operators'], ['exchange', 'exchanges'], ['host', 'host'], ['waiting', 'stall']].map(([name, text]) => el('li', {}, el('i', { style: { background: color(name) } }), text))),
    el('div', { class: 'lanes' }, canvas), readout);
  const incidents = traces.flatMap((trace) => trace.incidents.map(([at, what]) => `${trace.name}, ${ms(at * 1e3)}: ${what}`));
  if (incidents.length) into.append(el('ul', {}, ...incidents.slice(0, 20).map((line) => el('li', {}, line))));
  readout.textContent = 'Click a mark, or give the timeline the focus and press an arrow key.';
  new ResizeObserver(draw).observe(canvas);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { for (const name of Object.keys(paints)) delete paints[name]; draw(); });
  draw();
}

function whatif() {
  const scenarios = data.scenarios;
  if (!scenarios || scenarios.planned.length < 2) return;
  $('whatif').hidden = false;
  const of = new Map(scenarios.planned.map((one) => [one[0].join(), one]));
  const present = scenarios.axes.map((axis) => axis.present);
  const answer = el('div', { class: 'answer', 'aria-live': 'polite', id: 'answer' });
  const pickers = scenarios.axes.map((axis, index) => el('select', { id: `if-${index}` }, ...axis.choices.map((text, choice) => el('option', { value: choice, selected: choice === axis.present }, text))));
  const words = (one) => one && one.length > 1 ? `${digits(one[2])} tokens/s` : 'does not fit';
  const draw = () => {
    const choices = pickers.map((picker) => Number(picker.value)), one = of.get(choices.join());
    if (!one) { answer.replaceChildren(`Not among the ${scenarios.planned.length} plans of this page: ask spanker plan.`); return; }
    if (one.length < 2) { answer.replaceChildren(el('b', {}, 'Does not fit.')); return; }
    const [, layout, rate, token, first] = one, factor = rate / own.tokens_per_second;
    answer.replaceChildren(el('b', {}, `${digits(rate)} tokens/s`), ` in all, ${digits(factor)} times the plan of this page; ${ms(token)} from token to token, ${ms(first)} to the first token: ${layout}`);
  };
  pickers.forEach((picker) => picker.addEventListener('change', draw));
  const back = el('button', { type: 'button', onclick: () => { pickers.forEach((picker, index) => { picker.value = present[index]; }); draw(); } }, 'as planned');
  const alone = scenarios.planned.filter((one) => one[0].filter((choice, index) => choice !== present[index]).length === 1).map((one) => {
    const axis = one[0].findIndex((choice, index) => choice !== present[index]);
    const factor = one.length > 1 ? one[2] / own.tokens_per_second : null;
    return [scenarios.axes[axis].name, scenarios.axes[axis].choices[one[0][axis]], words(one), factor === null ? '' : `${digits(factor)} x`];
  });
  $('scenarios').append(el('p', { class: 'quiet' }, 'Every answer is a plan that was searched for when this page was made.'),
    el('div', { class: 'controls' }, ...scenarios.axes.map((axis, index) => el('label', { for: `if-${index}` }, axis.name, pickers[index])), back), answer,
    el('details', {}, el('summary', {}, 'One change at a time'), table(['change', 'to', 'tokens/s in all', 'against the plan'], alone, [2, 3])));
  draw();
}

function candidates() {
  const best = own.decode_ms_per_token;
  const same = (one) => JSON.stringify(one.stages) === JSON.stringify(own.stages);
  const why = (one) => {
    if (!one.fits) {
      const over = Math.max(...one.memory.map((card) => card.weights_bytes + card.kv_bytes + card.buffers_bytes + card.reserved_bytes - card.capacity_bytes));
      return `does not fit: ${bytes(over)} too much on a card`;
    }
    if (same(one)) return 'this plan';
    if (!one.runnable) return one.not_runnable_because;
    const terms = TERMS.map(([key, name]) => [name, one.terms[key] - own.terms[key]]).sort((a, b) => b[1] - a[1]);
    const [name, more] = terms[0];
    if (plan.request.objective !== 'latency') return `${digits(one.tokens_per_second)} against ${digits(own.tokens_per_second)} tokens/s, ${ms(one.ttft_ms)} against ${ms(own.ttft_ms)} to the first token`;
    if (one.decode_ms_per_token < best) return one.strategy === 'tensor-reduce' ? 'faster, but its bits depend on the number of cards' : 'faster';
    return more > 0 ? `${ms(more)} more ${name}` : 'slower';
  };
  const rows = plan.candidates.map((one) => {
    const row = [one.strategy, `${one.cards}`, ms(one.decode_ms_per_token), digits(one.tokens_per_second), ms(one.ttft_ms), bytes(Math.max(...one.memory_bytes_per_card)), why(one)];
    row.own = same(one);
    return row;
  });
  $('candidates').append(table(['layout', 'cards', 'a token', 'tokens/s', 'first token', 'fullest card', 'why'], rows, [1, 2, 3, 4, 5]),
    el('p', { class: 'quiet' }, plan.exact ? 'The best of each kind. Nothing better exists among the layouts that are considered.' : 'The best of each kind that was found; the search was not exhaustive.'));
}

function profiles() {
  const write = (value) => typeof value === 'number' ? (Math.abs(value) >= 1e5 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(3) : `${+value.toPrecision(6)}`) : value === undefined || value === null ? '' : `${value}`;
  for (const kind of data.kinds) {
    const rows = kind.values.map((row) => [row.name, write(row.value), row.low === undefined && row.high === undefined ? '' : `${write(row.low)} to ${write(row.high)}`, row.provenance ?? '', row.confidence ?? '', row.source ?? '']);
    const marks = rows.filter((row) => row[3] === 'assumed').length;
    $('profiles').append(el('details', {}, el('summary', {}, `${kind.name} (card${kind.cards.length > 1 ? 's' : ''} ${runs(kind.cards)})${marks ? `, ${many(marks, 'number')} assumed` : ''}`), el('p', {}, kind.summary), el('div', { class: 'scroll' }, table(['number', 'value', 'range', 'how', 'trust', 'source'], rows, [1]))));
  }
}

function source() {
  $('source').append(el('pre', {}, data.source.commands.join('\n')), el('p', { class: 'quiet' }, `Made by spanker ${data.source.version}.`));
}

for (const part of [head, scaling, layout, memory, gap, timeline, whatif, candidates, profiles, source]) part();
document.documentElement.dataset.ready = 'yes';
window.addEventListener('beforeprint', () => document.querySelectorAll('details').forEach((one) => { one.open = true; }));
