"use strict";
// What is drawn: each chart's title, unit and series, and how a point follows from two snapshots.

const WINDOW = 30; // seconds that percentiles are taken over
const POSITIONS = 6;

const number = (value, digits = 1) =>
  value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const seconds = (value) => {
  if (value == null) return "–";
  return value < 1 ? `${number(value * 1000, value < 0.1 ? 1 : 0)} ms` : `${number(value, 2)} s`;
};
const percent = (value) => (value == null ? "–" : `${number(value * 100, 1)} %`);

/** The increase of a counter, or null where it is not known. */
function gained(now, before, name) {
  const [a, b] = [now.values[name], before.values[name]];
  return a == null || b == null ? null : a - b;
}

function rate(now, before, name) {
  const elapsed = now.time - before.time, gain = gained(now, before, name);
  return gain == null || elapsed <= 0 ? null : gain / elapsed;
}

/** Share q of what a histogram gained lies below this; linear within a bucket. */
function quantile(now, before, name, q) {
  const { bounds = [], counts = [] } = now.histograms[name] || {};
  const earlier = (before.histograms[name] || {}).counts || [];
  const gains = counts.map((count, i) => count - (earlier[i] || 0));
  const total = gains[gains.length - 1];
  if (!total) return null;
  const wanted = q * total;
  const i = gains.findIndex((count) => count >= wanted);
  if (i >= bounds.length) return bounds[bounds.length - 1];
  const [low, below] = i ? [bounds[i - 1], gains[i - 1]] : [0, 0];
  return low + ((bounds[i] - low) * (wanted - below)) / (gains[i] - below);
}

/** Tokens a round, bonus token included. */
function acceptedLength(now, before) {
  const rounds = gained(now, before, "spec_decode_num_rounds");
  return rounds ? 1 + gained(now, before, "spec_decode_num_accepted_tokens") / rounds : null;
}

/** Share of the drafts whose token at this place was accepted. */
function acceptedAt(now, before, place) {
  const drafts = gained(now, before, "spec_decode_num_drafts");
  if (!drafts || place >= now.accepted_per_pos.length) return null;
  return (now.accepted_per_pos[place] - (before.accepted_per_pos[place] || 0)) / drafts;
}

const percentiles = (title, name) => ({
  title,
  show: seconds,
  slow: true,
  series: [0.5, 0.9, 0.99].map((q, i) => ({
    label: `p${q * 100}`,
    color: `--r${[1, 3, 5][i]}`,
    of: (now, before) => quantile(now, before, name, q),
  })),
});
const single = (title, show, of, more = {}) => ({
  title, show, series: [{ label: more.label || "now", color: "--s1", of, ...more }],
});

// slow: `before` is WINDOW seconds ago, else the snapshot before.
const CHARTS = [
  single("Generated tokens a second", number, (a, b) => rate(a, b, "generation_tokens")),
  { ...single("Accepted length, tokens a round", (v) => number(v, 2), acceptedLength), slow: true },
  {
    title: "Accepted by position, share of the drafts",
    show: percent,
    slow: true,
    range: [0, 1],
    series: Array.from({ length: POSITIONS }, (_, place) => ({
      label: `${place}`,
      color: `--r${place + 1}`,
      of: (a, b) => acceptedAt(a, b, place),
    })),
  },
  single("Depth chosen", number, (a) => a.values.speculative_num_steps, { stepped: true }),
  percentiles("Time to the first token", "time_to_first_token_seconds"),
  percentiles("Time a token", "inter_token_latency_seconds"),
  percentiles("Whole request", "e2e_request_latency_seconds"),
  percentiles("Time in the queue", "queue_time_seconds"),
  {
    title: "Requests",
    show: number,
    series: [
      { label: "running", color: "--s1", of: (a) => a.values.num_requests_running },
      { label: "waiting", color: "--s2", of: (a) => a.values.num_requests_waiting },
    ],
  },
  { ...single("KV slots held", percent, (a) => a.values.kv_usage_ratio), range: [0, 1] },
  single("Prompt tokens a second", number, (a, b) => rate(a, b, "prompt_tokens")),
];

const TILES = [
  ["Tokens/s", (a, b) => number(rate(a, b, "generation_tokens"), 0)],
  ["Accepted length", (a, b, c) =>
    number(acceptedLength(a, c) ?? a.values.spec_decode_mean_acceptance_length, 2)],
  ["Expected gain", (a) =>
    a.values.speculative_gain == null ? "–" : `${number(a.values.speculative_gain, 2)}×`],
  ["First token, p50", (a, b, c) => seconds(quantile(a, c, "time_to_first_token_seconds", 0.5))],
  ["First token, p99", (a, b, c) => seconds(quantile(a, c, "time_to_first_token_seconds", 0.99))],
  ["Running", (a) => number(a.values.num_requests_running)],
  ["Waiting", (a) => number(a.values.num_requests_waiting)],
  ["KV held", (a) => percent(a.values.kv_usage_ratio)],
  ["Prefix found", (a) => percent(a.values.prefix_cache_hit_ratio)],
  ["Aborted", (a) => number(a.values.request_aborts)],
];
