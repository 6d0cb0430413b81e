// Draws every figure of the page from the data in it: lines and stacked bars as SVG, values on hover or touch.
"use strict";
(() => {
  const { figures, colours } = JSON.parse(document.getElementById("data").textContent);
  const hidden = new Set();
  const colour = label => `var(--c${(colours[label] ?? 0) % 8})`;
  const dash = label => ((colours[label] ?? 0) >= 8 ? "7 4" : "");

  // --- numbers as people read them --------------------------------------------------------------------
  const UNITS = {
    bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
    seconds: [[3600, "h"], [60, "min"], [1, "s"]],
    share: [[0.01, "%"]],
    count: [[1, ""]],
    number: [[1, ""]],
  };
  const unitFor = (unit, size) => UNITS[unit].find(([factor]) => size >= factor) || UNITS[unit].at(-1);
  const digits = (value, places) => value.toLocaleString("en", { maximumFractionDigits: places });
  const say = (value, unit) => {
    const [factor, name] = unitFor(unit, Math.abs(value));
    const scaled = value / factor;
    const places = unit === "number" ? Math.max(0, 3 - Math.floor(Math.log10(Math.abs(scaled) || 1))) : unit === "share" ? 1 : Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
    return digits(scaled, places) + (name === "%" ? "%" : name ? " " + name : "");
  };

  // --- axes -------------------------------------------------------------------------------------------
  const niceStep = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 2.5, 5, 10].find(step => step * power >= raw * 0.999);
  };
  function scale(axis, values, from, to, count) {
    const high = Math.max(...values, 0), low = axis.log ? Math.min(...values) : 0;
    const [factor, name] = unitFor(axis.unit, high || 1);
    if (axis.log) {
      const place = value => from + (Math.log(value / low) / Math.log(high / low || Math.E)) * (to - from);
      const all = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].filter(t => t >= low && t <= high);
      const ticks = all.filter((t, i) => all.length <= count + 2 || i % 3 === 0);
      return { place, ticks: ticks.map(t => [t, digits(t, 0)]), unit: "" };
    }
    const step = niceStep((high || 1) / factor, count) * factor;
    const whole = axis.unit === "count" ? Math.max(1, Math.ceil(step)) : step;
    const top = axis.tight ? high || 1 : Math.ceil((high || 1) / whole - 1e-9) * whole;
    const ticks = [];
    for (let i = 0; i * whole <= top * 1.0001; i++) ticks.push(i * whole);
    const places = [0, 1, 2, 3, 4].find(p => Math.abs(((whole / factor) * 10 ** p) % 1) < 1e-6 || p === 4);
    return {
      place: value => from + (value / top) * (to - from),
      ticks: ticks.map(t => [t, digits(t / factor, places) + (name === "%" ? "%" : "")]),
      unit: name === "%" ? "" : name,
    };
  }

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
  const heading = axis => (unit => axis.title + (unit ? ` (${unit})` : ""));

  // --- lines ------------------------------------------------------------------------------------------
  function lines(figure, plot) {
    const width = Math.max(240, plot.clientWidth), height = Math.round(Math.min(340, Math.max(230, width * 0.52)));
    const shown = figure.series.filter(one => !hidden.has(one.label));
    const svg = canvas(plot, width, height, figure.title);
    const ys = shown.flatMap(one => one.y).concat(figure.target ?? []), xs = shown.flatMap(one => one.x);
    if (!xs.length) { element("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "all lines are hidden"); return; }
    const y = scale(figure.y, ys, height - 44, 26, 5);
    const left = 12 + 7 * Math.max(...y.ticks.map(([, text]) => text.length)), right = width - 14;
    const x = scale({ ...figure.x, tight: true }, xs, left, right, width < 420 ? 4 : 7);
    for (const [value, text] of y.ticks) {
      element("line", { class: "grid", x1: left, x2: right, y1: y.place(value), y2: y.place(value) }, svg);
      element("text", { x: left - 7, y: y.place(value) + 4, "text-anchor": "end" }, svg, text);
    }
    element("line", { class: "axis", x1: left, x2: right, y1: height - 44, y2: height - 44 }, svg);
    for (const [value, text] of x.ticks) {
      element("text", { x: x.place(value), y: height - 26, "text-anchor": x.place(value) > right - 8 ? "end" : "middle" }, svg, text);
    }
    element("text", { class: "title", x: 0, y: 12 }, svg, heading(figure.y)(y.unit));
    element("text", { class: "title", x: right, y: height - 6, "text-anchor": "end" }, svg, heading(figure.x)(x.unit));
    if (figure.target) {
      const at = y.place(figure.target);
      element("line", { class: "target", x1: left, x2: right, y1: at, y2: at }, svg);
      element("text", { x: left + 6, y: at < 40 ? at + 14 : at - 5 }, svg, "target " + say(figure.target, figure.y.unit));
    }
    const order = { seed: 0, mean: 1, theory: 2 };
    for (const one of [...shown].sort((a, b) => order[a.kind] - order[b.kind])) {
      const path = one.x.map((value, i) => `${x.place(value).toFixed(1)} ${y.place(one.y[i]).toFixed(1)}`);
      const style = `stroke:${one.kind === "theory" ? "var(--ink)" : colour(one.label)}` + (one.kind === "mean" && dash(one.label) ? `;stroke-dasharray:${dash(one.label)}` : "");
      if (path.length > 1) element("path", { class: one.kind, d: "M" + path.join("L"), style }, svg);
      else element("circle", { cx: x.place(one.x[0]), cy: y.place(one.y[0]), r: 4, style: `fill:${colour(one.label)}` }, svg);
    }
    for (const one of shown) {
      if (one.reached === undefined) continue;
      const [cx, cy] = [x.place(one.x[one.reached]), y.place(one.y[one.reached])];
      element("circle", { cx, cy, r: 5, style: `fill:${colour(one.label)}` }, svg);
    }
    const cursor = element("g", {}, svg);
    hover(plot, svg, width, left, right, at => {
      cursor.replaceChildren();
      if (at === null) return null;
      const found = nearest(shown, x.place, at);
      if (!found.length) return null;
      const middle = x.place(found[0].one.x[found[0].i]);
      element("line", { class: "cursor", x1: middle, x2: middle, y1: 20, y2: height - 44 }, cursor);
      for (const { one, i } of found) {
        element("circle", { cx: x.place(one.x[i]), cy: y.place(one.y[i]), r: 4.5, style: `fill:${colour(one.label)}` }, cursor);
      }
      const sameX = found.every(({ one, i }) => one.x[i] === found[0].one.x[found[0].i]);
      const rows = found.map(({ one, i }) => [
        one, [
          one.label + (one.kind === "theory" ? " (expected)" : one.kind === "seed" ? ` (seed ${one.seed})` : ""),
          say(one.y[i], figure.y.unit),
          sameX ? "" : say(one.x[i], figure.x.unit),
          one.z && figure.z ? (figure.z === "round" ? `round ${digits(one.z[i], 0)}` : `${digits(one.z[i], 0)} ${figure.z}`) : "",
        ],
      ]);
      return { at: middle, title: sameX ? `${figure.x.title}: ${say(found[0].one.x[found[0].i], figure.x.unit)}` : "", rows };
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
    const left = Math.min(width * 0.35, 14 + 7 * Math.max(4, ...kept.map(({ label }) => label.length))), right = width - 14;
    const x = scale({ ...figure.x, tight: false }, totals, left, right, width < 420 ? 4 : 7);
    for (const [value, text] of x.ticks) {
      element("line", { class: "grid", x1: x.place(value), x2: x.place(value), y1: 4, y2: height - 34 }, svg);
      const anchor = x.place(value) > right - 8 ? "end" : "middle";
      element("text", { x: x.place(value), y: height - 20, "text-anchor": anchor }, svg, text);
    }
    element("text", { class: "title", x: right, y: height - 3, "text-anchor": "end" }, svg, figure.x.title.replace("seconds", { s: "seconds", min: "minutes", h: "hours" }[x.unit]));
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
        { block: part }, [one.label, say(one.y[i], "seconds"), say(one.y[i] / (totals[place] || 1), "share")],
      ]);
      return { at: x.place(totals[place] / 2), title: `${label}: ${say(totals[place], "seconds")} a round`, rows };
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
        if (i > 1) cell.className = "soft";
      });
    }
    box.append(table);
    plot.append(box);
    const side = at + 16 + box.offsetWidth <= width ? at + 16 : Math.max(0, at - 16 - box.offsetWidth);
    box.style.transform = `translate(${Math.round(Math.min(side, Math.max(0, width - box.offsetWidth)))}px, 18px)`;
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
      const item = document.createElement("button"), key = Object.assign(document.createElement("i"), { className: "key" });
      item.type = "button";
      item.setAttribute("aria-pressed", String(!hidden.has(label)));
      key.style.setProperty("--c", colour(label));
      if (dash(label)) key.style.borderTopStyle = "dashed";
      item.append(key, label);
      item.addEventListener("click", () => { hidden.delete(label) || hidden.add(label); draw(); });
      box.append(item);
    }
  }
  function save(figure) {
    const quote = text => `"${String(text ?? "").replaceAll('"', '""')}"`;
    const names = ["label", "kind", "seed", figure.x.title, figure.y.title || "value", figure.z].filter(Boolean);
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
      (figure.bars.length ? bars : lines)(figure, box.querySelector(".plot"));
    }
  }
  for (const box of document.querySelectorAll("[data-figure]")) {
    box.querySelector(".csv").addEventListener("click", () => save(figures[box.dataset.figure]));
  }
  let width = 0;
  new ResizeObserver(() => { if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); } }).observe(document.body);
  window.glueflHidden = () => [...hidden];
  window.glueflHide = labels => { labels.forEach(label => hidden.add(label)); draw(); };
  draw();
})();
