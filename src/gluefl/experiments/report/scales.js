// Numbers as people read them, axes, and the places of labels at the ends of lines.
"use strict";
const scales = (() => {
  const UNITS = {
    bytes: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
    seconds: [[3600, "h"], [60, "min"], [1, "s"]],
    share: [[0.01, "%"]],
    count: [[1, ""]],
    number: [[1, ""]],
  };
  const unitFor = (unit, size) => UNITS[unit].find(([factor]) => size >= factor) || UNITS[unit].at(-1);
  const digits = (value, places) => value.toLocaleString("en", { maximumFractionDigits: places });
  // With a unit, all numbers of a figure are said in it.
  const say = (value, unit, [factor, name] = unitFor(unit, Math.abs(value))) => {
    const scaled = value / factor;
    const places = unit === "number" ? Math.max(0, 3 - Math.floor(Math.log10(Math.abs(scaled) || 1))) : unit === "share" ? 1 : Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
    return digits(scaled, places) + (name === "%" ? "%" : name ? " " + name : "");
  };

  const niceStep = (span, count) => {
    const raw = span / count, power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 2.5, 5, 10].find(step => step * power >= raw * 0.999);
  };

  // `ends` are the last values of the lines: the unit is the largest in which none of them is below 1.
  function scale(axis, values, ends, from, to, count) {
    const high = Math.max(...values), low = Math.min(...values);
    const unit = axis.unit === "seconds" ? unitFor("seconds", Math.min(...ends.filter(end => end > 0), high || 1)) : unitFor(axis.unit, high || 1);
    return (axis.log && low > 0 ? logarithmic : linear)(axis, low, high, unit, from, to, count);
  }
  function linear(axis, low, high, unit, from, to, count) {
    const [factor, name] = unit;
    const first = axis.zero ? Math.min(0, low) : axis.unit === "share" ? Math.max(0, low) : low, span = (high - first) || high || 1;
    const step = niceStep(span / factor, count) * factor;
    const whole = axis.unit === "count" ? Math.max(1, Math.ceil(step)) : step;
    const bottom = Math.floor(first / whole + 1e-9) * whole;
    const full = axis.unit === "share" && high <= 1.01; // no axis of shares ends at 125%
    let top = axis.tight ? high || 1 : Math.ceil((high || 1) / whole - 1e-9) * whole;
    if (full) top = Math.min(top, Math.max(1, high));
    const ticks = [];
    for (let i = 0; bottom + i * whole <= top * 1.0001; i++) ticks.push(bottom + i * whole);
    const places = [0, 1, 2, 3, 4].find(p => Math.abs(((whole / factor) * 10 ** p) % 1) < 1e-6 || p === 4);
    return {
      place: value => from + ((value - bottom) / (top - bottom)) * (to - from),
      ticks: ticks.map(t => [t, digits(t / factor, places) + (name === "%" ? "%" : "")]),
      note: [name === "%" ? "" : name, !axis.zero && bottom > 0 ? `from ${say(bottom, axis.unit, unit)}` : ""].filter(Boolean).join(", "), unit,
    };
  }
  function logarithmic(axis, low, high, unit, from, to) {
    const plain = axis.unit === "count", room = axis.tight ? 1 : 1.5;
    const most = Math.max(2, Math.floor(Math.abs(to - from) / (to < from ? 26 : plain ? 36 : 62))); // labels that fit
    const [bottom, top] = [low / room, high * room * (low === high ? 2 : 1)];
    const place = value => from + (Math.log(value / bottom) / Math.log(top / bottom)) * (to - from);
    const base = axis.unit === "seconds" ? unit[0] : 1; // round numbers of minutes, not of seconds
    const multiples = steps => {
      const found = [];
      for (let p = Math.floor(Math.log10(bottom / base)); p <= Math.log10(top / base); p++) for (const step of steps) found.push(step * 10 ** p * base);
      return found.filter(t => t >= bottom * 0.999 && t <= top * 1.001);
    };
    const choices = [[1, 2, 5], [1, 3], [1]].map(multiples);
    const ticks = choices.find(found => found.length <= most) || choices.at(-1).filter((_, i) => i % 2 === 0);
    const sayTick = axis.unit === "seconds" ? t => digits(t / unit[0], 2) : t => (plain ? digits(t, 0) : say(t, axis.unit));
    const name = axis.unit === "seconds" ? unit[1] : "";
    return { place, ticks: ticks.map(t => [t, sayTick(t)]), note: [name, plain ? "" : "log scale"].filter(Boolean).join(", "), unit };
  }

  // The width of a text of a figure, in the font that the page has found.
  const pen = document.createElement("canvas").getContext("2d");
  const measured = (text, weight = 400) => {
    pen.font = `${weight} 12px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  };

  // Where to write each label near its point: the place that covers the least of the other labels and of the lines.
  // A label is { text, x, y, radius }, the last of its dot; `lines` and `marks` are lists of points, and only lines must not
  // pass between a label and its point; the box is [left, top, right, bottom].
  // Both from the top and from the bottom: labels of ends that lie close together run out of room on one of the sides.
  const APART = 1e6;
  function labelled(labels, lines, marks, box) {
    const [strokes, others] = [lines, marks].map(lists => lists.flatMap(dense)), cost = placed => placed.reduce((sum, { cost }) => sum + cost, (labels.length - placed.length) * APART);
    const [down, up] = [1, -1].map(sign => placedIn([...labels].sort((a, b) => sign * (a.y - b.y)), strokes, others, box));
    return cost(up) < cost(down) ? up : down;
  }
  function placedIn(labels, strokes, others, [left, top, right, bottom]) {
    const points = [...strokes, ...others], placed = [];
    const covers = (box, [x, y]) => x > box[0] - 2 && x < box[2] + 2 && y > box[1] && y < box[3];
    const cross = (a, b) => a[0] < b[2] + 4 && b[0] < a[2] + 4 && a[1] < b[3] && b[1] < a[3];
    // How much of the way from a label to its point a line covers.
    const between = ({ x, y }, [from, , to], at) => [0.6, 0.9].filter(part => {
      const [across, down] = [x + part * (Math.min(to, Math.max(from, x)) - x), y + part * (at - y)];
      return strokes.some(([a, b]) => Math.hypot(a - across, b - down) < 4);
    });
    for (const label of labels) {
      const wide = measured(label.text, 600), gap = label.radius + 4;
      let best = null;
      for (const [shift, away] of [[gap, 0], [-gap - wide, 8], [-wide / 2, 10]]) {
        for (let step = 0; step <= 16; step++) {
          for (const sign of step ? [1, -1] : [1]) {
            const x = label.x + shift, y = label.y + sign * step * 7;
            if (shift === -wide / 2 && step < 2) continue; // on its own point
            const box = [x, y - 7, x + wide, y + 7];
            if (box[0] < left || box[2] > right || box[1] < top || box[3] > bottom) continue;
            const swapped = placed.filter(other => Math.abs(other.x - label.x) < 40 && (y - other.at[1]) * (label.y - other.y) < 0);
            // A free place is better than any that covers something, however far away it is.
            const covered = 60 * points.filter(point => covers(box, point)).length + APART * placed.filter(other => cross(box, other.box)).length;
            const cost = away + step * 3 + 15 * swapped.length + (step > 1 ? 15 * between(label, box, y - sign * 6).length : 0) + covered;
            if (!best || cost < best.cost) best = { ...label, cost, box, at: [x, y] };
          }
        }
      }
      if (best && best.cost < APART) placed.push(best);
    }
    return placed;
  }
  // A line as points at most six pixels apart.
  const dense = line => line.flatMap(([x, y], i) => {
    if (!i) return [[x, y]];
    const [a, b] = line[i - 1], parts = Math.max(1, Math.ceil(Math.hypot(x - a, y - b) / 6));
    return Array.from({ length: parts }, (_, k) => [a + ((x - a) * (k + 1)) / parts, b + ((y - b) * (k + 1)) / parts]);
  });

  return { digits, say, scale, measured, labelled };
})();
