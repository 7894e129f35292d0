// Loss or reward over steps: each step's, its running mean, the held-out one, and marks for what happened.

import { $, el, put } from "./dom.js";
import { clean, count, decimal } from "./words.js";
import uPlot from "./uPlot.esm.js";

const GLYPHS = { join: "▲", leave: "▼", back: "↻", pace: "◆", save: "●" };
const WORDS = { join: "joined", leave: "left", back: "this peer is back", pace: "pace", save: "checkpoint" };
const HEIGHT = 250, MARK_HEIGHT = 18, GLYPH_WIDTH = 11, SMOOTH_SHARE = 1 / 80, SMOOTH_MOST = 50;

let plot = null, curve = "loss", marks = [], shownKey = "";

function smoothed(values) {
  const over = Math.max(1, Math.min(SMOOTH_MOST, values.length * SMOOTH_SHARE));
  let mean = null, weight = 0;
  return values.map((value) => {
    if (value == null) return null;
    weight = Math.min(over, weight + 1);
    return (mean = mean == null ? value : mean + (value - mean) / weight);
  });
}

function drawMarks({ ctx, bbox, valToPos, scales }) {
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.font = `${10 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = "center";
  ctx.fillStyle = ctx.strokeStyle = getComputedStyle(document.body).getPropertyValue("--quiet");
  let before = -Infinity; // where the last glyph is: one at the same step goes beside it
  for (const { kind, step } of marks) {
    if (step < scales.x.min || step > scales.x.max) continue;
    const x = valToPos(step, "x", true);
    if (kind === "save") {
      ctx.fillText(GLYPHS.save, x, bbox.top + bbox.height - 3 * ratio);
      continue;
    }
    ctx.globalAlpha = 0.35;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    const free = Math.abs(x - before) < GLYPH_WIDTH * ratio ? before + GLYPH_WIDTH * ratio : x;
    ctx.fillText(GLYPHS[kind], (before = free), bbox.top - 5 * ratio);
  }
  ctx.restore();
}

function made(data, width) {
  const color = (name) => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();
  const grid = { stroke: color("line"), width: 1 }, font = "12px system-ui, sans-serif";
  const axis = { stroke: color("quiet"), grid, font, ticks: { show: false } };
  const line = { points: { show: false }, spanGaps: true }, dots = { show: true, size: 6 };
  return new uPlot({
    width, height: HEIGHT, legend: { show: false }, padding: [MARK_HEIGHT, 16, 0, 0],
    cursor: { drag: { x: false, y: false }, y: false, points: { size: 7 } },
    scales: { x: { time: false } },
    axes: [
      { ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? count(tick) : "")) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => String(+tick.toPrecision(6))) },
    ],
    series: [
      {},
      { ...line, stroke: color("faint"), width: 1 },
      { ...line, stroke: color("accent"), width: 2 },
      { ...line, stroke: color("text"), width: 1.5, dash: [5, 4], points: { ...dots, fill: color("back") } },
    ],
    hooks: { draw: [drawMarks], setCursor: [tell] },
  }, data, $("chart"));
}

// The legend says what the marks are, or what is under the pointer.
function tell(u) {
  const index = u.cursor.idx;
  if (index == null) {
    const kinds = Object.keys(GLYPHS).filter((kind) => marks.some((one) => one.kind === kind));
    const held = u.data[3].some((one) => one != null) ? ["┄\u00a0held-out"] : [];
    put($("legend"), [...held, ...kinds.map((kind) => `${GLYPHS[kind]}\u00a0${WORDS[kind]}`)].join("   "));
    return;
  }
  const [step, value, , held] = u.data.map((list) => list[index]);
  const width = (u.scales.x.max - u.scales.x.min) / 100;
  const near = marks.filter((one) => Math.abs(one.step - step) <= width && one.kind !== "save").at(-1);
  const parts = [`step ${count(step)}`, `${curve} ${decimal(value, 3)}`, held != null && `held-out ${decimal(held, 3)}`];
  put($("legend"), [...parts, near && `${GLYPHS[near.kind]} ${clean(near.text, 90)}`].filter(Boolean).join(", "));
}

export function showChart(state) {
  const { step, value, held } = state.points;
  curve = state.curve;
  const title = curve === "reward" ? "Reward" : "Loss";
  put($("h-curve"), title);
  $("chart").hidden = !step.length;
  $("no-points").hidden = step.length > 0;
  const range = Number($("range").value);
  const from = range ? step.findIndex((one) => one > step.at(-1) - range) : 0;
  const newest = [step.at(-1), value.at(-1), state.marks.at(-1)?.step, state.heldOut?.t];
  const key = [step.length, from, state.marks.length, ...newest].join();
  const width = $("chart").clientWidth;
  if (plot && plot.width !== width && width) plot.setSize({ width, height: HEIGHT });
  if (key === shownKey || !width) return;
  shownKey = key;
  marks = state.marks;
  const data = [step, value, smoothed(value), held].map((list) => list.slice(from));
  if (plot) plot.setData(data);
  else plot = made(data, width);
  tell(plot);
  const known = value.filter((one) => one != null), last = known.at(-1);
  const [pick, end] = curve === "reward" ? [Math.max, "highest"] : [Math.min, "lowest"];
  const best = known.reduce((found, one) => pick(found, one), last);
  const figures = `${decimal(last, 3)} now, ${decimal(best, 3)} at its ${end}`;
  const text = known.length ? `${title} over ${count(step.at(-1))} steps: ${figures}` : `No ${curve} yet`;
  if ($("chart").ariaLabel !== text) $("chart").ariaLabel = text;
}

export function redraw() {
  plot?.destroy();
  plot = null;
  shownKey = "";
}
