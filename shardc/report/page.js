"use strict";
// What the page shows is computed here, without a document; what shows it is `show`, below.
const BESIDE = "  beside";
function model(data) {
  const ops = data.ops.map(([text, kind, phase, module, source, cause, reads, us], at) => ({
    at, text, kind, phase, module: data.words[module], source: data.words[source], cause: data.words[cause], reads, us,
    users: [], collective: null, kernel: null, causes: [],
  }));
  for (const op of ops) for (const read of op.reads) ops[read].users.push(op.at);
  data.kernels.forEach((kernel, at) => kernel.ops.forEach((op) => { ops[op].kernel = at; }));
  data.collectives.forEach((c, at) => {
    ops[c.op].collective = at;
    for (const op of c.from) ops[op].causes.push(at);
  });
  // Under each lane is that of the step beside, if there is one.
  const beside = data.beside, us = Math.max(data.us, beside ? beside.us : 0) || 1;
  const below = (beside ? beside.bars : []).map((bar) => bar.lane);
  const primary = ["compute", ...new Set([...data.collectives.map((c) => c.axis), ...below.filter((lane) => lane !== "compute")])];
  const lanes = primary.flatMap((lane) => beside ? [lane, BESIDE] : [lane]);
  const bars = (lane) => beside.bars.filter((bar) => bar.lane === lane).map((bar) => ({ ...bar, op: null, at: null }));
  const spans = lanes.map((lane, n) => lane === BESIDE ? bars(lanes[n - 1])
    : lane === "compute"
    ? data.kernels.map((k, at) => ({ start: k.start, end: k.end, exposed: 0, kind: k.phase, kernel: k.kind, at, op: k.ops[0] }))
    : data.collectives.flatMap((c, at) => c.axis !== lane ? [] :
        [{ start: c.start, end: c.end, exposed: c.exposed, kind: c.kind, at, op: c.op }]));

  // Rows in order of one column; the order among equals stays.
  function sorted(rows, key, down) {
    const sign = down ? -1 : 1;
    const order = (a, b) => typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
    return [...rows].sort((a, b) => sign * order(a[key], b[key]));
  }
  // Rows of which some column has each word.
  function filtered(rows, text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return rows.filter((row) => {
      const all = Object.values(row).join(" ").toLowerCase();
      return words.every((word) => all.includes(word));
    });
  }
  // Positions of the ops whose line, module, source or cause has the text.
  function search(text) {
    const wanted = text.toLowerCase();
    if (!wanted) return [];
    return ops.filter((op) => [op.text, op.module, op.source, op.cause].some((part) =>
      part.toLowerCase().includes(wanted))).map((op) => op.at);
  }
  // The span of a lane at a time, if there is one.
  function hit(lane, us) {
    let low = 0, high = spans[lane].length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[lane][middle].end <= us) low = middle + 1; else high = middle;
    }
    const span = spans[lane][low];
    return span && span.start <= us ? span : null;
  }
  // Round times between two, for an axis on which at most seven fit: 1, 2 or 5 times a power of ten apart.
  function ticks(from, to, shown = to - from) {
    const power = 10 ** Math.floor(Math.log10(shown / 7));
    const apart = [1, 2, 5, 10].map((times) => times * power).find((step) => shown / step <= 7);
    const out = [];
    for (let n = Math.ceil(from / apart); n * apart <= to; n += 1) out.push(n * apart);
    return out;
  }
  // Memory at a time, as (microseconds, bytes by owner): the last sample not after it.
  function memoryAt(us) {
    let low = 0, high = data.memory.samples.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.memory.samples[middle][0] <= us) low = middle + 1; else high = middle;
    }
    return data.memory.samples[Math.max(low - 1, 0)];
  }
  const alike = (name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "");
  // Runs of alike layers, all but the first of each: a fold is as wide on the axis as one of the layers.
  function repeats() {
    const ids = new Map(), module = data.kernels.map((k) => ops[k.ops[0]].module);
    const sign = data.kernels.map((k, at) => {
      const key = `${k.phase} ${k.kind} ${alike(k.name)} ${alike(module[at])}`;
      if (!ids.has(key)) ids.set(key, ids.size);
      return ids.get(key);
    });
    const runs = [], count = sign.length;
    for (let period = 1; period <= Math.min(count / 3, 1000); period += 1) {
      for (let at = 0, length = 0; at + period <= count; at += 1) {
        if (at + period < count && sign[at] === sign[at + period]) { length += 1; continue; }
        if (length >= 2 * period) runs.push({ first: at - length, length: length + period, period });
        length = 0;
      }
    }
    const taken = new Array(count).fill(false), folds = [];
    runs.sort((a, b) => b.length - a.length || a.period - b.period);
    for (const { first, length, period } of runs) {
      const differs = (at) => module[at] !== module[at + period];
      const numbered = [...Array(period).keys()].map((n) => first + n).find(differs);
      if (numbered === undefined || taken[first] || taken[first + length - 1]) continue;
      // The part of a module's name that has the layer's number.
      const numberedPath = module[numbered].split("."), next = module[numbered + period].split(".");
      const depth = numberedPath.findIndex((part, n) => part !== next[n]) + 1;
      const layer = (at) => module[at].split(".").slice(0, depth).join(".");
      const inside = (at) => layer(at).replace(/\d+$/, "") === layer(numbered).replace(/\d+$/, "");
      let begin = first;  // where a layer begins
      while (begin < first + period && !(inside(begin) && (begin === 0 || layer(begin) !== layer(begin - 1)))) begin += 1;
      const layers = Math.floor((first + length - begin) / period);
      if (layers < 3) continue;
      const end = begin + layers * period - 1, rest = begin + period;
      taken.fill(true, begin, end + 1);
      folds.push({
        from: data.kernels[rest].start, to: data.kernels[end].end, wide: data.kernels[rest].start - data.kernels[begin].start,
        count: layers - 1, name: `${layer(rest)} to ${layer(rest + (layers - 2) * period)}`,
        ops: [Math.max(...data.kernels[rest - 1].ops) + 1, Math.max(...data.kernels[end].ops)],
      });
    }
    const wideFolds = folds.filter((fold) => fold.to - fold.from > data.us / 20).sort((a, b) => a.from - b.from);
    const open = wideFolds.reduce((left, fold) => left - (fold.to - fold.from), data.us);
    for (const fold of wideFolds) fold.wide = Math.min(Math.max(fold.wide, open / 14), fold.to - fold.from);  // room for a label
    return wideFolds;
  }
  // The axis of time, on which `folds` are narrower: the place of a time, and the time at a place.
  function axis(folds, us) {
    const parts = [[0, 0, 1]];
    for (const fold of folds) {
      const [time, place] = parts[parts.length - 1], at = place + fold.from - time;
      parts.push([fold.from, at, fold.wide / (fold.to - fold.from)], [fold.to, at + fold.wide, 1]);
    }
    const part = (value, key) => parts.findLast((entry) => entry[key] <= value) || parts[0];
    const place = (time) => { const [start, at, scale] = part(time, 0); return at + (time - start) * scale; };
    const time = (at) => { const [start, begin, scale] = part(at, 1); return start + (at - begin) / scale; };
    // Round times where nothing is folded.
    const open = (from, to) => parts.flatMap(([start, , scale], n) => {
      const low = Math.max(start, time(from)), high = Math.min(n + 1 < parts.length ? parts[n + 1][0] : us, time(to));
      return scale === 1 && low <= high ? ticks(low, high, (to - from) / (folds.length ? 2 : 1)) : [];
    });
    return { place, time, ticks: open, end: place(us) };
  }
  // Rows of collectives that differ only in the layer as one, with sums.
  function merged(rows) {
    const out = new Map();
    for (const row of rows) {
      const key = [row.kind, row.axis, row.dtype, row.wire, row.phase, alike(row.tensor), row.entry].join();
      const sum = out.get(key);
      if (!sum) { out.set(key, { ...row }); continue; }
      for (const name of ["count", "us", "exposed", "wire", "bytes"]) sum[name] += row[name];
      for (const name of ["tensor", "module"]) sum[name] = sum[name].replace(/(^|\.)\d+(?=\.|$)/g, "$1*");
    }
    return [...out.values()];
  }
  return { data, ops, lanes, spans, us, folds: beside ? [] : repeats(), axis, merged, sorted, filtered, search, hit, memoryAt, ticks };
}
const bytes = (n) => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (Math.abs(n) >= 1000 && at < units.length - 1) { n /= 1000; at += 1; }
  return `${at ? n.toFixed(2) : n} ${units[at]}`;
};
const time = (us) => us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : us >= 1000 ? `${(us / 1000).toFixed(3)} ms` : `${us.toFixed(2)} us`;
// A time in so many digits, without zeros behind the last.
const rounded = (us, digits = 6) => {
  const [size, unit] = us >= 1e6 ? [1e6, "s"] : us >= 1000 ? [1000, "ms"] : [1, "us"];
  return `${Number((us / size).toPrecision(digits))} ${unit}`;
};

function show(m) {
  const { data, ops } = m;
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, className) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  };
  const OWNERS = ["#4c6ef5", "#7950f2", "#868e96", "#f59f00", "#12b886", "#e64980", "#fd7e14", "#adb5bd"];
  const KINDS = { forward: "#74a9d8", backward: "#4a6fa5", recompute: "#b08968", all_gather: "#2f9e44", reduce_scatter: "#e8590c", all_reduce: "#ae3ec9",
    all_to_all: "#0c8599", permute_ranks: "#a6761d", to_device: "#66a80f", to_host: "#c2255c", broadcast: "#5c7cfa",
    product: "#4a6fa5", attention: "#9c6ade", fused: "#c9a227" };
  const colour = (span) => KINDS[span.kernel && $("shade").value === "kernel" ? span.kernel.split(",")[0] : span.kind] || "#888";
  let chosen = { op: null };

  $("title").textContent = data.title;
  if (data.beside) $("under").textContent = `Under each row: ${data.beside.title}`;
  for (const [name, value, bad] of [
    ["step", time(data.us)], ...(data.tokens ? [["tokens/s", Math.round(data.tokens).toLocaleString("en")]] : []), ["compute", time(data.compute)], ["exposed", time(data.exposed)],
    ["on the wire, a rank", bytes(data.wire)], ["MFU at most", `${(100 * data.mfu).toFixed(1)} %`],
    [`peak memory of ${bytes(data.memory.capacity)}`, bytes(data.peak), data.peak > data.memory.capacity],
  ]) {
    const box = make("div", undefined, bad ? "number bad" : "number");
    box.append(make("b", value), make("span", name));
    $("numbers").append(box);
  }

  // --- timeline

  const canvas = $("time"), LANE = 24, LEFT = 96, CURVE = 170, AXIS = 20;
  let folds = m.folds, axis = m.axis(folds, m.us), from = 0, to = axis.end, dragged = null, lanesEnd = 0;
  const height = AXIS + m.lanes.length * LANE + 10 + CURVE;
  canvas.style.height = `${height}px`;
  const most = 1.05 * Math.max(data.memory.peak, 1);
  function draw() {
    const scale = window.devicePixelRatio || 1, width = canvas.clientWidth || 900;
    canvas.width = width * scale; canvas.height = height * scale;
    const c = canvas.getContext("2d"), style = getComputedStyle(document.body);
    const text = style.getPropertyValue("--text"), dim = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
    c.scale(scale, scale);
    c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
    const x = (us) => LEFT + (axis.place(us) - from) / (to - from) * (width - LEFT);
    let labelled = -Infinity;
    for (const us of axis.ticks(from, to)) {
      if (x(us) < labelled + 60) continue;
      labelled = x(us);
      c.fillStyle = line; c.fillRect(x(us), AXIS - 4, 1, height);
      c.fillStyle = dim; c.textAlign = x(us) > width - 40 ? "right" : us ? "center" : "left";
      c.fillText(us ? rounded(us) : "0", x(us), 8);
    }
    c.textAlign = "left";
    m.spans.forEach((spans, lane) => {
      const y = AXIS + lane * LANE;
      c.save(); c.beginPath(); c.rect(LEFT, y, width - LEFT, LANE); c.clip();
      for (const span of spans) {
        if (span.end < axis.time(from) || span.start > axis.time(to)) continue;
        const wide = Math.max(x(span.end) - x(span.start), 0.7);
        c.fillStyle = colour(span);
        c.fillRect(x(span.start), y + 2, wide, LANE - 5);
        if (span.exposed > 0) {
          c.fillStyle = "#e03131";
          c.fillRect(x(span.end - span.exposed), y + LANE - 6, Math.max(x(span.end) - x(span.end - span.exposed), 0.7), 3);
        }
        if ((span.op !== null && span.op === chosen.op) || (span.kernel && chosen.op !== null && ops[chosen.op].kernel === span.at)) {
          c.strokeStyle = text; c.lineWidth = 2; c.strokeRect(x(span.start), y + 2, Math.max(wide, 3), LANE - 5);
        }
        if (wide > 60) {
          c.save(); c.beginPath(); c.rect(x(span.start), y, wide - 4, LANE); c.clip(); c.fillStyle = "#fff";
          const name = span.at === null ? span.name : span.kernel ? data.kernels[span.at].name : `${span.kind} ${data.collectives[span.at].tensor}`;
          c.fillText(name, Math.max(x(span.start), LEFT) + 4, y + LANE / 2 - 1); c.restore();
        }
      }
      c.restore();
      c.fillStyle = m.lanes[lane] === BESIDE ? dim : text; c.fillText(m.lanes[lane], 6, y + LANE / 2);
    });
    lanesEnd = AXIS + m.lanes.length * LANE;
    const floor = height - 4, y = (size) => floor - size / most * (CURVE - 8);
    c.save(); c.beginPath(); c.rect(LEFT, lanesEnd, width - LEFT, CURVE + 10); c.clip();
    const shown = data.memory.samples.filter(([us], at, all) =>
      us <= axis.time(to) && (at + 1 === all.length || all[at + 1][0] >= axis.time(from)));
    const below = shown.map(() => 0);
    data.memory.owners.forEach((_, owner) => {
      if (!shown.some((sample) => sample[owner + 1])) return;
      c.beginPath();
      const end = (at) => at + 1 < shown.length ? shown[at + 1][0] : data.us;
      shown.forEach((sample, at) => {
        const top = below[at] + sample[owner + 1];
        c.lineTo(x(sample[0]), y(top)); c.lineTo(x(end(at)), y(top));
      });
      for (let at = shown.length - 1; at >= 0; at -= 1) { c.lineTo(x(end(at)), y(below[at])); c.lineTo(x(shown[at][0]), y(below[at])); }
      c.closePath(); c.fillStyle = OWNERS[owner]; c.fill();
      shown.forEach((sample, at) => { below[at] += sample[owner + 1]; });
    });
    if (data.memory.capacity < most) {
      c.fillStyle = "#e03131"; c.fillRect(LEFT, y(data.memory.capacity), width, 1.5);
    }
    c.restore();
    const back = style.getPropertyValue("--panel");
    for (const fold of folds) {
      const left = Math.max(x(fold.from), LEFT), wide = Math.min(x(fold.to), width) - left;
      if (wide <= 0) continue;
      c.globalAlpha = 0.75; c.fillStyle = back; c.fillRect(left, AXIS, wide, height); c.globalAlpha = 1;
      c.strokeStyle = dim; c.setLineDash([4, 3]); c.lineWidth = 1; c.strokeRect(left, AXIS, wide, height - AXIS); c.setLineDash([]);
      c.save(); c.beginPath(); c.rect(left, AXIS, wide, height); c.clip(); c.fillStyle = text; c.textAlign = "center";
      [`${fold.count} more`, "alike", rounded(fold.to - fold.from, 3)].forEach((words, n) =>
        c.fillText(words, left + wide / 2, lanesEnd + 40 + 16 * n));
      c.restore(); c.textAlign = "left";
    }
    c.fillStyle = text; c.fillText("memory", 6, lanesEnd + 18);
    c.fillStyle = dim; c.fillText(bytes(data.memory.peak), 6, y(data.memory.peak) + 12); c.fillText("0 B", 6, floor - 6);
  }
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = from + (event.clientX - box.left - LEFT) / (box.width - LEFT) * (to - from);
    return { place, us: axis.time(place), y: event.clientY - box.top };
  };
  const foldAt = (us) => folds.find((fold) => fold.from < us && us < fold.to);
  // Folds `shown` and shows the rest; the part of the axis that is seen stays, if it is a part.
  function fold(shown) {
    const all = to - from >= axis.end, low = axis.time(from), high = axis.time(to);
    folds = shown; axis = m.axis(folds, m.us);
    [from, to] = all ? [0, axis.end] : [axis.place(low), axis.place(high)];
    $("fold").checked = folds.length > 0;
    draw(); count(rows.fill()); fillGraph();
  }
  const keep = () => {
    const wide = Math.min(to - from, axis.end);
    from = Math.max(0, Math.min(from, axis.end - wide)); to = from + wide; draw();
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { place } = at(event), zoom = Math.exp(event.deltaY * 0.0015);
    if ((to - from) * zoom < axis.end * 1e-6) return;
    from = place - (place - from) * zoom; to = place + (to - place) * zoom; keep();
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { dragged = { x: event.clientX, from, to, far: false }; });
  window.addEventListener("pointerup", (event) => {
    const was = dragged; dragged = null;
    if (!was || was.far || event.target !== canvas) return;
    const { us, y } = at(event), lane = Math.floor((y - AXIS) / LANE), folded = foldAt(us);
    if (folded) fold(folds.filter((entry) => entry !== folded));
    else if (lane >= 0 && lane < m.lanes.length) { const span = m.hit(lane, us); if (span && span.op !== null) go(span.op); }
  });
  window.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    const far = event.clientX - dragged.x, wide = dragged.to - dragged.from;
    if (Math.abs(far) > 3) dragged.far = true;
    from = dragged.from - far / (canvas.clientWidth - LEFT) * wide; to = from + wide; keep();
  });
  canvas.addEventListener("dblclick", () => { from = 0; to = axis.end; draw(); });
  $("fold").checked = folds.length > 0;
  $("fold").addEventListener("change", () => fold($("fold").checked ? m.folds : []));
  $("shade").addEventListener("change", () => { draw(); legends(); });
  if (!m.folds.length) $("fold").parentElement.remove();
  canvas.addEventListener("mousemove", (event) => {
    const { us, y } = at(event), lane = Math.floor((y - AXIS) / LANE);
    if (us < 0 || us > m.us) return;
    const folded = foldAt(us);
    if (folded) { $("span").textContent = `${folded.name}: ${folded.count} more alike, ${time(folded.to - folded.from)}; a click shows them`; return; }
    if (y > lanesEnd) {
      const [, ...byOwner] = m.memoryAt(us);
      const parts = data.memory.owners.flatMap((owner, n) => byOwner[n] ? [`${owner} ${bytes(byOwner[n])}`] : []);
      $("span").textContent = `${time(us)}: ${bytes(byOwner.reduce((a, b) => a + b, 0))} = ${parts.join(" + ")}`;
      return;
    }
    const span = lane >= 0 && lane < m.lanes.length ? m.hit(lane, us) : null;
    $("span").textContent = span ? `${time(span.end - span.start)}: ${span.op === null ? span.name : ops[span.op].text}` : "";
  });
  window.addEventListener("resize", draw);
  const legend = (color, name) => {
    const item = make("span"), box = make("i");
    box.style.background = color; item.append(box, name); $("legend").append(item);
  };
  function legends() {
    $("legend").replaceChildren();
    const names = new Map(m.spans.flat().map((span) =>
      [span.kernel && $("shade").value === "kernel" ? span.kernel.split(",")[0] : span.kind, colour(span)]));
    for (const [name, shade] of names) legend(shade, name);
    data.memory.owners.forEach((owner, n) => { if (data.memory.samples.some((sample) => sample[n + 1])) legend(OWNERS[n], owner); });
  }
  legends();

  // --- tables

  const text = (value) => value, number = (value) => String(value);
  function table(where, columns, rows, first, open, join = (shown) => shown) {
    let key = first, down = true, words = "";
    const element = $(where);
    function fill() {
      const head = make("tr"), body = make("tbody"), shown = m.sorted(join(m.filtered(rows, words)), key, down);
      for (const [name, title, format] of columns) {
        const cell = make("th", title, [name === key ? (down ? "down" : "up") : "", format === text ? "" : "n"].join(" ").trim());
        cell.addEventListener("click", () => { down = name === key ? !down : format !== text; key = name; fill(); });
        head.append(cell);
      }
      for (const row of shown) {
        const line = make("tr");
        for (const [name, , format] of columns) line.append(make("td", format(row[name]) || "-", format === text ? "" : "n"));
        if (open) {
          line.dataset.at = row.op;
          line.addEventListener("click", () => go(row.op));
          if (row.op === chosen.op) line.className = "chosen";
        }
        body.append(line);
      }
      const top = make("thead");
      top.append(head);
      element.replaceChildren(top, body);
      return shown.reduce((sum, row) => sum + (row.count || 1), 0);
    }
    return { fill, filter: (text) => { words = text; return fill(); } };
  }
  const rows = table("collectives", [
    ["kind", "kind", text], ["axis", "axis", text], ["count", "count", number], ["tensor", "tensor", text], ["module", "module", text],
    ["exposed", "exposed", time], ["us", "takes", time], ["start", "start", time], ["wire", "wire", bytes],
    ["phase", "phase", text], ["hidden_by", "hidden by", text], ["entry", "plan entry", text],
    ["source", "source", text], ["bytes", "handed in", bytes], ["ranks", "ranks", number], ["dtype", "dtype", text],
    ["algorithm", "algorithm", text], ["link", "link", text],
  ], data.collectives.map((c) => ({ ...c, count: 1, us: c.end - c.start, from: 0, name: ops[c.op].text })), "exposed", true,
  (rows) => folds.length ? m.merged(rows) : rows);
  if (data.findings.length) table("findings", [
    ["severity", "severity", text], ["us", "costs", time], ["bytes", "a rank", bytes], ["subject", "subject", text],
    ["message", "what", text], ["change", "instead", text], ["source", "source", text],
  ], data.findings, "us").fill(); else $("advice").remove();
  for (const { title, head, rows: body, left: words } of data.beside ? data.beside.tables.filter((entry) => entry.rows.length) : []) {
    const left = (n) => n === 0 || words.includes(head[n]) ? "" : "n", top = make("tr"), shown = make("table");
    head.forEach((name, n) => top.append(make("th", name, left(n))));
    shown.append(top);
    for (const row of body) {
      const line = make("tr");
      row.forEach((cell, n) => line.append(make("td", cell, left(n))));
      shown.append(line);
    }
    const box = make("div", undefined, "table");
    box.append(shown);
    $("differs").append(make("h2", title), box);
  }
  const count = (n) => { $("count").textContent = `${n} of ${data.collectives.length}`; };
  count(rows.fill());
  $("filter").addEventListener("input", () => count(rows.filter($("filter").value)));
  for (const by of Object.keys(data.totals)) $("by").append(make("option", by));
  function totals() {
    const by = $("by").value;
    table("totals", [["key", by, text], ["count", "count", number], ["wire", "wire", bytes], ["us", "takes", time],
      ["exposed", "exposed", time]], data.totals[by], "exposed").fill();
  }
  $("by").addEventListener("change", totals);
  totals();
  table("memory", [["owner", "owner", text], ["size", "bytes", bytes]],
    data.memory.owners.map((owner, n) => ({ owner, size: data.memory.at_peak[n] })), "size").fill();

  // --- graph

  const graph = $("graph"), HIGH = 18;
  let matches = [], place = -1;
  let listed = [];  // positions of ops, and folds in place of theirs
  function fillGraph() {
    listed = [];
    for (let n = 0; n < ops.length; n += 1) {
      const folded = folds.find((entry) => entry.ops[0] === n);
      listed.push(folded || n);
      if (folded) n = folded.ops[1];
    }
    $("space").style.height = `${listed.length * HIGH}px`;
    lines();
  }
  function lines() {
    const first = Math.max(0, Math.floor(graph.scrollTop / HIGH) - 10), last = Math.min(listed.length, first + graph.clientHeight / HIGH + 30);
    const marked = new Set(matches), shown = [];
    for (let line = first; line < last; line += 1) {
      const n = listed[line];
      if (typeof n === "object") {
        const row = make("div", `${n.name}: ${n.count} more alike, ${n.ops[1] - n.ops[0] + 1} lines; a click shows them`, "op fold");
        row.addEventListener("click", () => fold(folds.filter((entry) => entry !== n)));
        shown.push(row);
        continue;
      }
      const op = ops[n], row = make("div", undefined, "op");
      if (op.collective !== null) row.classList.add("moves");
      if (marked.has(n)) row.classList.add("matches");
      if (n === chosen.op) row.classList.add("chosen");
      const why = [op.module, op.source, op.cause].filter(Boolean).join(" | ");
      row.append(make("span", op.kind === "input" ? op.kind : time(op.us), "at"), op.text, make("span", why && `  # ${why}`, "why"));
      row.addEventListener("click", () => go(n));
      shown.push(row);
    }
    $("lines").style.top = `${first * HIGH}px`;
    $("lines").replaceChildren(...shown);
  }
  graph.addEventListener("scroll", lines);
  function reveal(n) {
    const hides = folds.find((entry) => entry.ops[0] <= n && n <= entry.ops[1]);
    if (hides) fold(folds.filter((entry) => entry !== hides));
    graph.scrollTop = Math.max(0, listed.indexOf(n) * HIGH - graph.clientHeight / 2); lines();
  }
  function step(by) {
    if (!matches.length) return;
    place = (place + by + matches.length) % matches.length;
    $("matches").textContent = `${place + 1} of ${matches.length}`;
    go(matches[place]);
  }
  $("search").addEventListener("input", () => {
    matches = m.search($("search").value); place = -1;
    $("matches").textContent = $("search").value ? `${matches.length} lines` : "";
    if (matches.length) reveal(matches[0]); else lines();
  });
  $("search").addEventListener("keydown", (event) => { if (event.key === "Enter") step(event.shiftKey ? -1 : 1); });
  $("next").addEventListener("click", () => step(1));
  $("back").addEventListener("click", () => step(-1));

  // --- one op: where it comes from, what it causes

  const link = (n) => { const a = make("a", ops[n].text, "code"); a.href = `#op=${n}`; return a; };
  function list(title, positions) {
    if (!positions.length) return [];
    const items = make("ul");
    for (const n of positions) { const item = make("li"); item.append(link(n)); items.append(item); }
    return [make("h2", `${title} (${positions.length})`), items];
  }
  function side() {
    const parts = [];
    if (chosen.op === null) {
      parts.push(make("h2", "Nothing chosen"), make("p", "Choose a span, a row or a line: here stand its cause, its cost, what it reads and what it causes.", "hint"));
    } else {
      const op = ops[chosen.op], facts = make("dl");
      const fact = (name, value) => { if (value) { facts.append(make("dt", name)); const cell = make("dd"); cell.append(value); facts.append(cell); } };
      parts.push(make("h2", op.collective !== null ? "Collective" : op.kind === "input" ? "Input" : "Op"), make("code", op.text));
      fact("phase", op.phase); fact("module", op.module); fact("source", op.source);
      if (op.collective !== null) {
        const c = data.collectives[op.collective];
        fact("plan entry", c.entry); fact("reason", c.reason); fact("tensor", c.tensors.join(", "));
        fact("over", `${c.axis}, groups of ${c.ranks}, ${c.algorithm} on ${c.link}`);
        fact("handed in", bytes(c.bytes)); fact("wire", bytes(c.wire));
        fact("runs", `${time(c.start)} to ${time(c.end)} (${time(c.end - c.start)})`);
        fact("exposed", time(c.exposed)); fact("hidden by", c.hidden_by);
        parts.push(facts, ...list("Caused by", c.from));
      } else {
        fact("cause", op.cause);
        if (op.kernel !== null) {
          const k = data.kernels[op.kernel];
          fact("kernel", `${k.name}, ${k.ops.length} ops`); fact("runs", `${time(k.start)} to ${time(k.end)}`);
          fact("flops", k.flops.toExponential(3)); fact("memory", bytes(k.bytes));
        }
        parts.push(facts);
      }
      parts.push(...list("Causes these collectives", op.causes.map((n) => data.collectives[n].op)), ...list("Reads", op.reads), ...list("Read by", op.users));
    }
    $("side").replaceChildren(...parts);
  }
  function go(n) { if (location.hash === `#op=${n}`) choose(); else location.hash = `op=${n}`; }
  function choose() {
    const match = /^#op=(\d+)$/.exec(location.hash);
    chosen.op = match && Number(match[1]) < ops.length ? Number(match[1]) : null;
    side(); draw();
    for (const row of document.querySelectorAll("#collectives tr.chosen")) row.classList.remove("chosen");
    const row = chosen.op === null ? null : document.querySelector(`#collectives tr[data-at="${chosen.op}"]`);
    if (row) { row.classList.add("chosen"); const box = row.closest(".table"); box.scrollTop = row.offsetTop - box.clientHeight / 2; }
    if (chosen.op !== null) reveal(chosen.op); else lines();
  }
  window.addEventListener("hashchange", choose);
  fillGraph();
  choose();
}
if (typeof document !== "undefined") show(model(JSON.parse(document.getElementById("data").textContent)));
