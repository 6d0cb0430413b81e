// Draws every figure of the page from the data in it: lines and stacked bars as SVG, values on hover or touch.
"use strict";
(() => {
  const { figures, colours } = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const colour = label => `var(--c${(colours[label] ?? 0) % 8})`;
  // Lines that coincide are told apart by their dashes: the gaps of the later one show the earlier one.
  const DASHES = ["", "10 5", "7 7", "14 4 3 4", "16 4", "5 4", "2 3", "18 6"];
  const dash = label => DASHES[((colours[label] ?? 0) + ((colours[label] ?? 0) >> 3)) % 8];

  const { digits, say, scale, measured, labelled } = scales;

  const element = (name, attributes, parent, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) if (value !== "") made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };
  const canvas = (plot, width, height, title) => {
    plot.replaceChildren();
    return element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, plot);
  };
  const heading = (axis, note) => axis.title + (note ? ` (${note})` : "");
  const last = values => values[values.length - 1];

  // Axes with their grid, for lines and for points. Returns the two scales and the edges of the field.
  function field(figure, svg, width, height, xs, ys, ends, room) {
    const y = scale(figure.y, ys, ends.y, height - 44, 26, 5);
    const left = 12 + Math.max(...y.ticks.map(([, text]) => measured(text))), right = width - 14, edge = right - room;
    const x = scale({ ...figure.x, tight: !figure.points }, xs, ends.x, left, edge, width < 420 ? 4 : 7);
    for (const [value, text] of y.ticks) {
      element("line", { class: "grid", x1: left, x2: right, y1: y.place(value), y2: y.place(value) }, svg);
      element("text", { x: left - 7, y: y.place(value) + 4, "text-anchor": "end" }, svg, text);
    }
    element("line", { class: "axis", x1: left, x2: right, y1: height - 44, y2: height - 44 }, svg);
    for (const [value, text] of x.ticks) {
      element("line", { class: "axis", x1: x.place(value), x2: x.place(value), y1: height - 44, y2: height - 40 }, svg);
      element("text", { x: x.place(value), y: height - 26, "text-anchor": x.place(value) > right - 8 ? "end" : "middle" }, svg, text);
    }
    element("text", { class: "title", x: 0, y: 12 }, svg, heading(figure.y, y.note));
    element("text", { class: "title", x: right, y: height - 6, "text-anchor": "end" }, svg, heading(figure.x, x.note));
    return { x, y, left, right, box: [left, 14, width, height - 44] };
  }
  const sized = plot => {
    const width = Math.max(240, plot.clientWidth);
    return [width, Math.round(Math.min(340, Math.max(230, width * 0.52)))];
  };
  const empty = (svg, width, height) => element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "all lines are hidden");
  // Room for labels at the right edge, if they are short enough for this width.
  const roomFor = (labels, width) => {
    const wide = Math.max(...labels.map(label => measured(label, 600))) + 16;
    return wide < width * 0.32 ? wide : 0;
  };
  // A dot as a line that labels keep away from.
  const ring = (x, y, radius) => [[0, 0], [-1, 0], [0, -1], [1, 0], [0, 1]].map(([a, b]) => [x + a * radius, y + b * radius]);
  function write(svg, labels, lines, marks, box) {
    for (const { text, at: [x, y], box: [from, , to], ...label } of labelled(labels, lines, marks, box)) {
      const near = Math.min(to, Math.max(from, label.x));
      if (Math.hypot(near - label.x, y - label.y) > 14) element("line", { class: "leader", x1: label.x, y1: label.y, x2: near, y2: y + (y < label.y ? 6 : -6) }, svg);
      element("text", { class: "name", x, y: y + 4, style: `fill:${colour(text)}` }, svg, text);
    }
  }

  // --- lines ------------------------------------------------------------------------------------------
  // Of a seed only what comes after the end of the mean, where another seed has ended.
  const drawn = series => {
    const ends = new Map(series.filter(one => one.kind === "mean" && one.z).map(one => [one.label, last(one.z) ?? 0]));
    return series.flatMap(one => {
      if (one.kind !== "seed" || !ends.has(one.label) || !one.z) return [one];
      const from = one.z.findIndex(z => z >= ends.get(one.label));
      const cut = values => values.slice(from);
      const rest = { ...one, x: cut(one.x), y: cut(one.y), z: cut(one.z), reached: one.reached === undefined ? undefined : one.reached - from };
      return from < 0 || rest.reached < 0 ? [] : [rest];
    });
  };
  function lines(figure, plot) {
    const [width, height] = sized(plot);
    const shown = drawn(figure.series.filter(one => !hidden.has(one.label)));
    const svg = canvas(plot, width, height, figure.title);
    const full = shown.filter(one => one.x.length);
    if (!full.length) { empty(svg, width, height); return; }
    const means = full.filter(one => one.kind === "mean");
    // An axis that need not start at 0 leaves out the first quarter of the lines, where they only rise.
    const story = one => (figure.y.zero || one.kind !== "mean" ? one.y : one.y.slice(Math.floor(one.y.length / 4)));
    const ys = full.flatMap(one => [...story(one), ...(one.high ?? [])]).concat(figure.target ?? []);
    const names = [...new Set(means.map(one => one.label))], room = names.length > 1 ? roomFor(names, width) : 0;
    const ends = { x: means.map(one => last(one.x)), y: means.map(one => last(one.y)) };
    const { x, y, left, right, box } = field(figure, svg, width, height, full.flatMap(one => one.x), ys, ends, room);
    const frame = `frame-${figure.id}`;
    element("rect", { x: left, y: 20, width: right - left + 14, height: height - 64 }, element("clipPath", { id: frame }, svg));
    const inside = element("g", { "clip-path": `url(#${frame})` }, svg);
    if (figure.target) {
      const at = y.place(figure.target);
      element("line", { class: "target", x1: left, x2: right, y1: at, y2: at }, svg);
    }
    const path = (xs, values) => xs.map((value, i) => `${x.place(value).toFixed(1)} ${y.place(values[i]).toFixed(1)}`);
    for (const one of full.filter(one => one.low)) {
      const outline = [...path(one.x, one.high), ...path(one.x, one.low).reverse()];
      element("path", { class: "band", d: "M" + outline.join("L") + "Z", style: `fill:${colour(one.label)}` }, inside);
    }
    // Solid lines first: the gaps of a dashed line show what is below it.
    const order = one => ({ seed: 0, mean: 1, theory: 3 })[one.kind] + (one.kind === "mean" && dash(one.label) ? 1 : 0);
    for (const one of [...full].sort((a, b) => order(a) - order(b))) {
      const style = `stroke:${one.kind === "theory" ? "var(--ink)" : colour(one.label)}` + (one.kind === "mean" && dash(one.label) ? `;stroke-dasharray:${dash(one.label)}` : "");
      if (one.x.length > 1) element("path", { class: one.kind, d: "M" + path(one.x, one.y).join("L"), style }, inside);
      else if (one.kind === "mean") element("circle", { cx: x.place(one.x[0]), cy: y.place(one.y[0]), r: 4, style: `fill:${colour(one.label)}` }, inside);
    }
    for (const one of full) {
      if (one.reached === undefined) continue;
      const [cx, cy] = [x.place(one.x[one.reached]), y.place(one.y[one.reached])];
      element("circle", { cx, cy, r: one.kind === "seed" ? 4 : 5, style: `fill:${colour(one.label)}` }, svg);
    }
    if (room) {
      const tips = means.map(one => ({ text: one.label, x: x.place(last(one.x)), y: y.place(last(one.y)), radius: 5 }));
      const strokes = full.map(one => one.x.map((value, i) => [x.place(value), y.place(one.y[i])]));
      const dots = full.filter(one => one.reached !== undefined).map(one => [x.place(one.x[one.reached]), y.place(one.y[one.reached])]);
      const target = figure.target ? [[left, right].map(end => [end, y.place(figure.target)])] : [];
      write(svg, tips, strokes, [...dots.map(([a, b]) => ring(a, b, 5)), ...target], box);
    }
    const cursor = element("g", {}, svg);
    hover(plot, svg, width, left, right, at => {
      cursor.replaceChildren();
      if (at === null) return null;
      const found = nearest(full, x.place, at);
      if (!found.length) return null;
      const middle = x.place(found[0].one.x[found[0].i]);
      element("line", { class: "cursor", x1: middle, x2: middle, y1: 20, y2: height - 44 }, cursor);
      for (const { one, i } of found) {
        if (y.place(one.y[i]) < height - 40) element("circle", { cx: x.place(one.x[i]), cy: y.place(one.y[i]), r: 4.5, style: `fill:${colour(one.label)}` }, cursor);
      }
      const sameX = found.every(({ one, i }) => one.x[i] === found[0].one.x[found[0].i]);
      const across = value => say(value, figure.x.unit, figure.x.unit === "seconds" ? x.unit : undefined);
      const rows = found.map(({ one, i }) => [
        one, [
          one.label + (one.kind === "theory" ? " (expected)" : one.kind === "seed" ? ` (seed ${one.seed})` : ""),
          say(one.y[i], figure.y.unit),
          one.low ? `${say(one.low[i], figure.y.unit)} to ${say(one.high[i], figure.y.unit)}` : "",
          sameX ? "" : across(one.x[i]),
          one.z && figure.z && !(sameX && figure.z === "round" && figure.x.title === "round") ? (figure.z === "round" ? `round ${digits(one.z[i], 0)}` : `${digits(one.z[i], 0)} ${figure.z}`) : "",
        ],
      ]);
      return { at: middle, title: sameX ? `${figure.x.title}: ${across(found[0].one.x[found[0].i])}` : "", rows };
    });
  }

  // --- points -----------------------------------------------------------------------------------------
  function points(figure, plot) {
    const [width, height] = sized(plot);
    const svg = canvas(plot, width, height, figure.title);
    const shown = figure.series.filter(one => !hidden.has(one.label)), means = shown.filter(one => one.kind === "mean");
    if (!means.length) { empty(svg, width, height); return; }
    const ends = { x: means.map(one => one.x[0]), y: means.map(one => one.y[0]) };
    const { x, y, box } = field(figure, svg, width, height, shown.flatMap(one => one.x), shown.flatMap(one => one.y), ends, Math.max(30, roomFor(means.map(one => one.label), width)));
    const front = figure.front.map(label => means.find(one => one.label === label)).filter(Boolean).map(one => [x.place(one.x[0]), y.place(one.y[0])]);
    const steps = front.flatMap(([a, b], i) => (i ? [[a, front[i - 1][1]], [a, b]] : [[a, b]]));
    if (front.length > 1) element("path", { class: "front", d: "M" + steps.join("L") }, svg);
    const covered = [];
    for (const one of shown) {
      one.x.forEach((value, i) => {
        const at = { cx: x.place(value), cy: y.place(one.y[i]), r: one.kind === "seed" ? 3 : 8 };
        // A point on top of another one is smaller, so that the other one shows as a ring.
        if (one.kind === "mean") at.r -= 3 * Math.min(2, covered.filter(other => Math.hypot(other.cx - at.cx, other.cy - at.cy) < 12).length);
        if (one.kind === "mean") covered.push(at);
        const style = one.unreached ? `fill:var(--card);stroke:${colour(one.label)}` : `fill:${colour(one.label)}`;
        element("circle", { ...at, class: one.kind, style }, svg);
      });
    }
    const tips = means.map(one => ({ text: one.label, x: x.place(one.x[0]), y: y.place(one.y[0]), radius: 8 }));
    const dots = shown.flatMap(one => one.x.map((value, i) => ring(x.place(value), y.place(one.y[i]), one.kind === "seed" ? 3 : 8)));
    write(svg, tips, [], [...dots, steps], box);
    hover(plot, svg, width, 0, width, (at, down) => {
      if (at === null) return null;
      const away = one => Math.hypot(x.place(one.x[0]) - at, y.place(one.y[0]) - down);
      const rows = [...means].sort((a, b) => away(a) - away(b)).map(one => [
        one, [one.label, (one.unreached ? "> " : "") + say(one.y[0], "bytes"), (one.unreached ? "> " : "") + say(one.x[0], figure.x.unit, x.unit)],
      ]);
      return { at: x.place(ends.x[0]), title: "", rows };
    });
  }

  // Of every label its mean, or where that has ended its single seeds; the one nearest to the pointer first.
  function nearest(shown, place, at) {
    const found = [];
    for (const one of shown) {
      let i = 0;
      one.x.forEach((value, j) => { if (Math.abs(place(value) - at) < Math.abs(place(one.x[i]) - at)) i = j; });
      const away = Math.abs(place(one.x[i]) - at);
      const inside = at >= place(one.x[0]) - 14 && at <= place(one.x.at(-1)) + 14;
      if (inside) found.push({ one, i, away });
    }
    const means = new Set(found.filter(({ one }) => one.kind === "mean").map(({ one }) => one.label));
    const kept = found.filter(({ one }) => one.kind !== "seed" || !means.has(one.label));
    const first = kept.reduce((best, next) => (best && best.away <= next.away ? best : next), null);
    return first ? [first, ...kept.filter(one => one !== first)].sort((a, b) => b.one.y[b.i] - a.one.y[a.i]) : [];
  }

  // --- stacked bars -----------------------------------------------------------------------------------
  function bars(figure, plot) {
    const kept = figure.bars.map((label, i) => ({ label, i })).filter(({ label }) => !hidden.has(label));
    const width = Math.max(240, plot.clientWidth), row = Math.min(64, Math.max(40, 180 / Math.max(1, kept.length))), height = 34 + row * Math.max(1, kept.length);
    const svg = canvas(plot, width, height, figure.title);
    const totals = kept.map(({ i }) => figure.series.reduce((sum, one) => sum + one.y[i], 0));
    const left = Math.min(width * 0.35, 14 + Math.max(28, ...kept.map(({ label }) => measured(label)))), right = width - 14;
    const x = scale({ ...figure.x, tight: false }, [0, ...totals], totals, left, right, width < 420 ? 4 : 7);
    for (const [value, text] of x.ticks) {
      element("line", { class: "grid", x1: x.place(value), x2: x.place(value), y1: 4, y2: height - 34 }, svg);
      const anchor = x.place(value) > right - 8 ? "end" : "middle";
      element("text", { x: x.place(value), y: height - 20, "text-anchor": anchor }, svg, text);
    }
    element("text", { class: "title", x: right, y: height - 3, "text-anchor": "end" }, svg, figure.x.title.replace("seconds", { s: "seconds", min: "minutes", h: "hours" }[x.unit[1]]));
    kept.forEach(({ label, i }, place) => {
      const top = 6 + row * place;
      let from = 0;
      const room = Math.floor((left - 10) / 6.6);
      element("text", { x: left - 8, y: top + row / 2 - 1, "text-anchor": "end", style: "fill:var(--ink)" }, svg, label.length > room ? label.slice(0, room - 1) + "…" : label);
      figure.series.forEach((one, part) => {
        const size = x.place(from + one.y[i]) - x.place(from);
        if (size > 0.3) element("rect", { x: x.place(from), y: top + 4, width: Math.max(0.5, size - 1), height: row - 14, rx: 2, style: `fill:var(--p${part})` }, svg);
        from += one.y[i];
      });
    });
    hover(plot, svg, width, 0, width, (at, down) => {
      const place = Math.floor((down - 6) / row);
      if (at === null || !kept[place]) return null;
      const { label, i } = kept[place];
      const rows = figure.series.map((one, part) => [
        { block: part }, [one.label, say(one.y[i], "seconds", x.unit), say(one.y[i] / (totals[place] || 1), "share")],
      ]);
      return { at: x.place(totals[place] / 2), title: `${label}: ${say(totals[place], "seconds", x.unit)} a round`, rows };
    });
  }

  // --- hover, legend, saving --------------------------------------------------------------------------
  function hover(plot, svg, width, left, right, show) {
    const leave = () => { plot.querySelector(".tip")?.remove(); show(null, 0); };
    svg.addEventListener("pointermove", event => {
      const box = svg.getBoundingClientRect(), factor = width / box.width;
      const at = Math.min(right, Math.max(left, (event.clientX - box.left) * factor));
      plot.querySelector(".tip")?.remove();
      const found = show(at, (event.clientY - box.top) * factor);
      if (found) tip(plot, found, width / factor, found.at / factor);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointercancel", leave);
  }
  function tip(plot, { title, rows }, width, at) {
    const box = document.createElement("div");
    box.className = "tip";
    if (title) box.append(Object.assign(document.createElement("b"), { textContent: title }));
    const table = document.createElement("table");
    for (const [one, cells] of rows) {
      const line = table.insertRow();
      cells.filter(cell => cell !== "").forEach((text, i) => {
        const cell = line.insertCell();
        if (i === 0) {
          const chip = Object.assign(document.createElement("i"), { className: "chip" });
          chip.style.setProperty("--c", one.block === undefined ? colour(one.label) : `var(--p${one.block})`);
          cell.append(chip);
        }
        cell.append(text);
        if (i > 1) cell.className = text.includes(" to ") ? "soft range" : "soft";
      });
    }
    box.append(table);
    plot.append(box);
    // Below the figure, where it covers no line.
    box.style.transform = `translateX(${Math.round(Math.min(Math.max(0, at - box.offsetWidth / 2), Math.max(0, width - box.offsetWidth)))}px)`;
  }
  // A line as it is in the figure.
  function stroke(kind, dashes = "") {
    const key = element("svg", { class: "key", width: 22, height: 4 });
    element("line", { class: kind, x1: 0, x2: 22, y1: 2, y2: 2, style: dashes && `stroke-dasharray:${dashes}` }, key);
    return key;
  }
  function legend(figure, box) {
    box.replaceChildren();
    const labels = figure.bars.length ? [] : [...new Set(figure.series.map(one => one.label))];
    figure.series.forEach((one, part) => {
      if (!figure.bars.length) return;
      const item = document.createElement("span"), block = Object.assign(document.createElement("i"), { className: "block" });
      block.style.setProperty("--c", `var(--p${part})`);
      item.append(block, one.label);
      box.append(item);
    });
    for (const label of labels) {
      const item = document.createElement("button"), key = figure.points ? Object.assign(document.createElement("i"), { className: "chip" }) : stroke("mean", dash(label));
      item.type = "button";
      item.setAttribute("aria-pressed", String(!hidden.has(label)));
      key.style.setProperty("--c", colour(label));
      item.append(key, label);
      item.addEventListener("click", () => { hidden.delete(label) || hidden.add(label); draw(); });
      box.append(item);
    }
    // Here and not in the field, where it would lie on lines.
    if (figure.target) {
      const item = document.createElement("span");
      item.append(stroke("target"), "target " + say(figure.target, figure.y.unit));
      box.append(item);
    }
  }
  function save(figure) {
    const quote = text => `"${String(text ?? "").replaceAll('"', '""')}"`;
    const names = ["label", "kind", "seed", figure.bars.length ? "bar" : figure.x.title, figure.y.title || "value", figure.z].filter(Boolean);
    const rows = figure.series.flatMap(one => one.x.map((value, i) =>
      [one.label, one.kind, one.seed, figure.bars.length ? figure.bars[i] : value, one.y[i], one.z?.[i]].slice(0, names.length)));
    const url = URL.createObjectURL(new Blob([[names, ...rows].map(row => row.map(quote).join(",")).join("\n")], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: url, download: figure.file + ".csv" }).click();
    URL.revokeObjectURL(url);
  }

  function draw() {
    for (const box of document.querySelectorAll("[data-figure]")) {
      const figure = figures[box.dataset.figure];
      legend(figure, box.querySelector(".legend"));
      figure.id = box.dataset.figure;
      (figure.bars.length ? bars : figure.points ? points : lines)(figure, box.querySelector(".plot"));
    }
    for (const box of document.querySelectorAll(".scroll")) scrolled(box);
  }
  // A table that is wider than its place shows that there is more.
  function scrolled(box) {
    const more = box.scrollWidth - box.clientWidth - box.scrollLeft > 2;
    box.parentElement.classList.toggle("more", more);
    box.parentElement.classList.toggle("wide", box.scrollWidth - box.clientWidth > 2);
  }
  for (const box of document.querySelectorAll(".scroll")) box.addEventListener("scroll", () => scrolled(box), { passive: true });
  for (const box of document.querySelectorAll("details")) box.addEventListener("toggle", () => box.querySelectorAll(".scroll").forEach(scrolled));
  for (const box of document.querySelectorAll("[data-figure]")) {
    box.querySelector(".csv").addEventListener("click", () => save(figures[box.dataset.figure]));
  }
  let width = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); } }).observe(document.body);
  window.glueflHidden = () => [...hidden];
  window.glueflHide = labels => { labels.forEach(label => hidden.add(label)); draw(); };
  draw();
})();
