"use strict";
// Asks for a snapshot every few seconds (?every=SECONDS), and draws what came of the last ones.

const KEPT = 900; // seconds
const EVERY = Math.max(Number(new URLSearchParams(location.search).get("every")) || 2, 0.1);
const HEIGHT = 170;
const element = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let snapshots = [];
let points = CHARTS.map((chart) => [[], ...chart.series.map(() => [])]);
let plots = [];

function options(chart, width) {
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false } };
  const show = (_, value) => chart.show(value);
  return {
    width,
    height: HEIGHT,
    scales: { y: { range: chart.range || ((_, low, high) => [0, Math.max(high * 1.1, 1e-3)]) } },
    axes: [
      { ...axis, size: 28, space: 90, values: [[1, "{HH}:{mm}:{ss}", ...Array(6).fill(null), 1]] },
      { ...axis, size: 64, values: (_, splits) => splits.map(chart.show) },
    ],
    series: [
      { value: "{HH}:{mm}:{ss}" },
      ...chart.series.map((one) => ({
        label: one.label,
        stroke: colour(one.color),
        width: 2,
        points: { show: false },
        value: show,
        paths: one.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
  };
}

/** Anew: a width or the colours have changed. */
function draw() {
  plots.forEach((plot) => plot.destroy());
  element("charts").replaceChildren();
  plots = CHARTS.map((chart, i) => {
    const section = document.createElement("section");
    const title = document.createElement("h2");
    title.textContent = chart.title;
    section.append(title);
    element("charts").append(section);
    return new uPlot(options(chart, section.clientWidth - 24), points[i], section);
  });
}

function resize() {
  plots.forEach((plot) =>
    plot.setSize({ width: plot.root.parentElement.clientWidth - 24, height: HEIGHT }));
}

function take(now) {
  const last = snapshots[snapshots.length - 1];
  if (last && now.values.generation_tokens < last.values.generation_tokens) {
    snapshots = []; // the server has started anew
    points = points.map((columns) => columns.map(() => []));
  }
  snapshots.push(now);
  while (snapshots.length > 2 && now.time - snapshots[0].time > WINDOW) snapshots.shift();
  const before = snapshots[Math.max(snapshots.length - 2, 0)];
  const long = snapshots[0];
  CHARTS.forEach((chart, i) => {
    points[i][0].push(now.time);
    chart.series.forEach((one, k) => {
      points[i][k + 1].push(one.of(now, chart.slow ? long : before) ?? null);
    });
    const old = points[i][0].findIndex((time) => now.time - time <= KEPT);
    points[i].forEach((column) => column.splice(0, old));
    plots[i].setData(points[i]);
    if (plots[i].cursor.idx == null) plots[i].setLegend({ idx: points[i][0].length - 1 }, false);
  });
  tell(now, before, long);
}

function tell(now, before, long) {
  element("model").textContent = now.model || "specengine";
  document.title = `${now.model || "specengine"} – specengine`;
  element("algorithm").textContent = now.algorithm || "";
  element("version").textContent = `specengine ${now.version}.`;
  element("reason").textContent = now.choice || "No depth has been chosen.";
  element("tiles").replaceChildren(...TILES.map(([name, of]) => {
    const [tile, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    term.textContent = name;
    value.textContent = of(now, before, long);
    tile.append(term, value);
    return tile;
  }));
  const hasEngine = now.values.num_requests_running != null;
  state(hasEngine ? "serving" : "no engine: it is loading, or has failed", hasEngine);
}

function state(text, isGood) {
  element("state").textContent = text;
  element("state").className = isGood ? "good" : "bad";
}

async function poll() {
  try {
    // Of the origin: an address with a password in it may not be fetched.
    const answer = await fetch(`${location.origin}/dashboard/data`, {
      signal: AbortSignal.timeout(10000),
    });
    if (answer.ok) take(await answer.json());
    else state(`the server answers ${answer.status}`, false);
  } catch {
    state("the server does not answer", false);
  }
  setTimeout(poll, EVERY * 1000);
}

draw();
addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
poll();
