// Line charts of the last minutes, drawn on canvas. Each says its values as text, too.

import { count, el, millis, percent, setText } from "./dom.js";

const SPAN_S = 300;
const rate = (name) => (sample, before) => (before && sample.time > before.time ? Math.max(0, (sample[name] - before[name]) / (sample.time - before.time)) : null);
const level = (name) => (sample) => sample[name];

const CHARTS = [
  { title: "Requests per second", show: count, lines: [["arrived", "--decode", rate("requests")], ["failed", "--bad", rate("failed")]] },
  { title: "Tokens per second", show: count, lines: [["output", "--decode", rate("output_tokens")], ["prompt", "--prefill", rate("prompt_tokens")]] },
  { title: "Time to first token", show: millis, lines: [["median", "--decode", level("ttft_p50_ms")], ["p95", "--both", level("ttft_p95_ms")]] },
  { title: "Time per output token", show: millis, lines: [["median", "--decode", level("tpot_p50_ms")], ["p95", "--both", level("tpot_p95_ms")]] },
  { title: "Requests in flight", show: count, lines: [["running", "--decode", level("running")], ["waiting", "--prefill", level("waiting")], ["queued", "--bad", level("queued")]] },
  { title: "KV blocks in use", show: percent, most: 1, lines: [["prefill", "--prefill", level("prefill_kv")], ["decode", "--decode", level("decode_kv")]] },
];

function niceTop(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= value) * unit;
}

class Chart {
  constructor(about) {
    this.about = about;
    this.at = null; // index of the sample that is pointed at; the latest if null
    this.keys = about.lines.map(([name, colour]) => el("span", { class: "key", vars: { "--colour": `var(${colour})` } }, name));
    this.canvas = el("canvas", { role: "img", tabindex: "0" });
    this.node = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, about.title), this.keys), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX / this.canvas.clientWidth));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("blur", () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.times?.length) return;
      event.preventDefault();
      this.at = Math.min(Math.max((this.at ?? this.times.length - 1) + step, 0), this.times.length - 1);
      this.draw();
    });
  }

  point(share) {
    if (share === null || !this.times?.length) this.at = null;
    else {
      const wanted = this.end - SPAN_S * (1 - share);
      this.at = this.times.reduce((best, time, index) => (Math.abs(time - wanted) < Math.abs(this.times[best] - wanted) ? index : best), 0);
    }
    this.draw();
  }

  take(samples) {
    this.end = samples.at(-1)?.time ?? 0;
    const seen = samples.filter((one) => one.time > this.end - SPAN_S - 2);
    this.times = seen.map((one) => one.time);
    this.values = this.about.lines.map(([, , value]) => seen.map((one, index) => value(one, seen[index - 1])));
    if (this.at !== null) this.at = Math.min(this.at, this.times.length - 1);
    this.draw();
  }

  draw() {
    const { canvas, about } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !this.times) return;
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
    if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const values = this.values.flat().filter((one) => one !== null && one !== undefined);
    const top = about.most ?? niceTop(Math.max(0, ...values));
    const floor = height - 14;
    const x = (time) => width - ((this.end - time) / SPAN_S) * width;
    const y = (value) => floor - (value / top) * (floor - 12);
    pen.strokeStyle = colour("--line");
    pen.fillStyle = colour("--quiet");
    pen.lineWidth = 1;
    pen.font = "10px system-ui, sans-serif";
    for (const share of [0, 0.5, 1]) {
      pen.beginPath();
      pen.moveTo(0, Math.round(y(top * share)) + 0.5);
      pen.lineTo(width, Math.round(y(top * share)) + 0.5);
      pen.stroke();
    }
    pen.fillText(about.show(top), 1, 10);
    for (let minutes = 4; minutes >= 1; minutes -= 1) pen.fillText(`−${minutes} min`, x(this.end - 60 * minutes) - 14, height - 2);
    this.values.forEach((line, number) => {
      pen.strokeStyle = colour(about.lines[number][1]);
      pen.lineWidth = 1.6;
      pen.lineJoin = "round";
      pen.beginPath();
      let drawing = false;
      line.forEach((value, index) => {
        if (value === null || value === undefined) drawing = false;
        else if (drawing) pen.lineTo(x(this.times[index]), y(value));
        else {
          pen.moveTo(x(this.times[index]), y(value));
          drawing = true;
        }
      });
      pen.stroke();
    });
    if (this.at !== null) {
      pen.strokeStyle = colour("--quiet");
      pen.beginPath();
      pen.moveTo(x(this.times[this.at]), 0);
      pen.lineTo(x(this.times[this.at]), floor);
      pen.stroke();
    }
    this.tell();
  }

  tell() {
    const index = this.at ?? this.times.length - 1;
    const ago = this.at === null ? "now" : `${Math.round(this.end - this.times[index])} s ago`;
    const said = this.about.lines.map(([name], number) => `${name} ${this.about.show(this.values[number][index])}`);
    this.keys.forEach((key, number) => setText(key, said[number]));
    this.canvas.setAttribute("aria-label", `${this.about.title}, ${ago}: ${said.join(", ")}. Arrow keys move in time.`);
  }
}

export function makeCharts(place, live) {
  const charts = CHARTS.map((about) => new Chart(about));
  place.append(...charts.map((chart) => chart.node));
  const draw = () => place.offsetParent && charts.forEach((chart) => chart.take(live.samples));
  live.addEventListener("change", draw);
  addEventListener("baton-theme", draw);
  new ResizeObserver(draw).observe(place);
}
