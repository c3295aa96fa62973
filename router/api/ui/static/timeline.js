// Where the time of one request went, drawn over the router and its workers: a lane for each of them.

import { el, millis, svg } from "./dom.js";

const WIDTH = 900;
const LEFT = 190;
const LANE = 28;
const KINDS = {
  prefill: "prefill", tail: "prefill", handoff: "handoff", "to the router": "handoff", "first decode": "first", decode: "decode", "failed attempt": "failed",
};
const kind = (stage) => KINDS[stage.name] ?? "queue";
const took = (stage) => stage.end_ms - stage.start_ms;

// The stages of an answer's own report, for a router that does not keep the request any more.
export function stagesOf(report) {
  const t = report.timings;
  const decode = report.decode_worker || "decode worker";
  const prefill = report.prefill_worker || decode;
  let at = 0;
  const next = (name, where, ms) => ({ name, where, start_ms: at, end_ms: (at += Math.max(0, ms)) });
  const found = [
    next("router queue", "router", t.router_queue_ms ?? 0), next("queue", decode, t.queue_ms - t.prefill_queue_ms), next("prefill queue", prefill, t.prefill_queue_ms),
    next("prefill", prefill, t.prefill_ms), next("handoff", decode, t.handoff_ms), next("tail", decode, t.tail_ms ?? 0), next("first decode", decode, t.first_decode_ms),
  ];
  found.push(next("decode", decode, t.total_ms - at));
  return found.filter((stage) => took(stage) > 0);
}

export function timeline(record) {
  const { stages } = record;
  const span = Math.max(record.total_ms ?? 0, ...stages.map((stage) => stage.end_ms), 0.001);
  const known = ["router", record.prefill_worker, record.decode_worker].filter((one) => stages.some((stage) => stage.where === one));
  const lanes = [...new Set([...known, ...stages.map((stage) => stage.where)])];
  const bottom = LANE * lanes.length;
  const x = (ms) => LEFT + (ms / span) * (WIDTH - LEFT - 10);
  const role = (lane) => (lane === "router" ? "" : lane === record.prefill_worker ? "prefill " : lane === record.decode_worker ? "decode " : "");
  const rows = lanes.map((lane, index) => [
    svg("rect", { class: "lane", x: LEFT, y: index * LANE + 3, width: WIDTH - LEFT - 10, height: LANE - 6, rx: 3 }),
    svg("text", { x: 0, y: index * LANE + 19 }, role(lane) + lane),
  ]);
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => [
    svg("line", { class: "axis", x1: x(span * share), x2: x(span * share), y1: 0, y2: bottom }),
    svg("text", { class: "tick", x: x(span * share), y: bottom + 16, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle" }, millis(span * share)),
  ]);
  const bars = stages.map((stage) => {
    const y = lanes.indexOf(stage.where) * LANE + 6;
    const width = Math.max(1.5, x(stage.end_ms) - x(stage.start_ms));
    const name = width > 7 * stage.name.length + 8 ? svg("text", { class: "on", x: x(stage.start_ms) + 5, y: y + 12 }, stage.name) : "";
    return svg("g", {}, svg("title", {}, `${stage.name} at ${stage.where}: ${millis(took(stage))}, from ${millis(stage.start_ms)}`),
      svg("rect", { class: `s-${kind(stage)}`, x: x(stage.start_ms), y, width, height: LANE - 12, rx: 2 }), name);
  });
  const ttft = record.ttft_ms;
  const first = ttft > 0 ? svg("line", { class: "first", x1: x(ttft), x2: x(ttft), y1: 0, y2: bottom }, svg("title", {}, `first token after ${millis(ttft)}`)) : "";
  const said = stages.map((stage) => `${stage.name} ${millis(took(stage))}`);
  const label = `Timeline of ${millis(span)}: ${said.join(", ")}${ttft > 0 ? `, first token after ${millis(ttft)}` : ""}`;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${bottom + 22}`, role: "img", "aria-label": label }, rows, ticks, bars, first);
  const items = stages.map((stage) => el("li", { class: `s-${kind(stage)}` }, `${stage.name} ${millis(took(stage))}`));
  return el("div", { class: "timeline" }, picture, el("ul", { class: "facts" }, items, el("li", {}, `total ${millis(record.total_ms ?? span)}`)));
}

// The stages as one short bar, for a table; widths are by the square root of the time, so that short ones are seen.
export function miniature(record, mostMs) {
  const width = 96;
  const span = Math.max(...record.stages.map((stage) => stage.end_ms), 0.001);
  const scale = (width * Math.sqrt(span / Math.max(mostMs, span))) / span;
  return svg("svg", { class: "mini", width, height: 10, "aria-hidden": "true" },
    record.stages.map((stage) => svg("rect", { class: `s-${kind(stage)}`, x: stage.start_ms * scale, y: 0, width: Math.max(0.8, took(stage) * scale), height: 10 })));
}
