// The fleet as a picture: a box for each worker, filled by its KV blocks, and a moving line for each pair of workers
// between which requests are handed over. Boxes are buttons; arrow keys move among them.

import { SortedTable, byId, count, el, percent, setText } from "./dom.js";
import { filledShare, ownedShare } from "./live.js";

const GROUPS = [["prefill", "Prefill"], ["decode", "Decode"], ["both", "Prefill and decode"]];
const MAX_LARGE = 12;
const MAX_MEDIUM = 60;
const MAX_LINES = 300;
const FRAME_MS = 33;

function states(worker) {
  const said = [worker.state];
  if (worker.breaker !== "closed") said.push(`breaker ${worker.breaker}`);
  if (worker.problem) said.push(worker.problem);
  return said;
}

function roleWords(worker) {
  return worker.pinned ? `${worker.role}, pinned` : worker.role;
}

function classes(worker) {
  const found = ["w", worker.role, worker.state];
  if (worker.breaker !== "closed") found.push("suspended");
  if (worker.is_excluded) found.push("excluded");
  return found.join(" ");
}

class Box {
  constructor(address, choose) {
    this.name = el("span", { class: "name" }, address);
    this.mark = el("span", { class: "mark" });
    this.load = el("span", { class: "said" });
    this.kv = el("span", { class: "said more" });
    this.node = el("button", { type: "button", tabindex: "-1", "data-address": address, onclick: () => choose(address) },
      el("i", { class: "busy" }), this.name, this.mark, this.load,
      el("span", { class: "bar" }, el("i", { class: "cached" }), el("i", { class: "owned" })), this.kv);
  }

  show(worker, isChosen) {
    const { node } = this;
    const shown = classes(worker) + (isChosen ? " selected" : "");
    if (node.className !== shown) node.className = shown;
    const owned = ownedShare(worker);
    node.style.setProperty("--owned", owned.toFixed(3));
    node.style.setProperty("--kv", filledShare(worker).toFixed(3));
    node.style.setProperty("--busy", Math.min(1, (worker.running + worker.waiting) / 16).toFixed(2));
    const bad = worker.state !== "ready" ? worker.state : worker.breaker !== "closed" ? `breaker ${worker.breaker}` : worker.is_excluded ? "not used" : "";
    setText(this.mark, bad);
    setText(this.load, `${worker.running} running, ${worker.waiting} waiting`);
    setText(this.kv, `KV ${percent(owned)} in use, ${percent(filledShare(worker) - owned)} cached`);
    const said = `${worker.role} worker ${worker.address}, ${states(worker).join(", ")}, ${worker.running} running, ${worker.waiting} waiting, KV ${percent(owned)} in use`;
    if (node.getAttribute("aria-label") !== said) {
      node.setAttribute("aria-label", said);
      node.title = said;
    }
    node.setAttribute("aria-pressed", String(isChosen));
  }
}

export class Fleet {
  constructor(live) {
    this.live = live;
    this.boxes = new Map();
    this.places = new Map(); // centres of boxes, measured when the layout changed
    this.chosen = null;
    this.place = byId("picture");
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.groups = Object.fromEntries(GROUPS.map(([role, title]) => {
      const number = el("span", { class: "quiet" });
      const node = el("div", { class: `group ${role}`, role: "group", "aria-label": `${title} workers` }, el("h3", {}, title, number));
      return [role, { node, number }];
    }));
    this.numbers = Object.fromEntries(["running", "queued", "handoffs", "rate"].map((name) => [name, el("b")]));
    const shown = [["running", "running"], ["queued", "queued here"], ["handoffs", "handoffs in the last second"], ["rate", "tokens/s"]];
    const router = el("div", { class: "router card", role: "group", "aria-label": "Router" }, el("h3", {}, "Router"),
      el("dl", {}, shown.map(([name, title]) => el("div", {}, el("dt", {}, title), el("dd", {}, this.numbers[name])))));
    this.place.append(this.canvas, router, this.groups.prefill.node, this.groups.decode.node, this.groups.both.node);
    this.place.addEventListener("keydown", (event) => this.move(event));
    this.table = new SortedTable(COLUMNS, { caption: "Workers", key: (one) => one.address, picked: (one) => this.choose(one.address) });
    byId("workers").querySelector("div").append(this.table.node);
    byId("workers").addEventListener("toggle", () => this.update());
    byId("legend").append(...LEGEND.map(([name, text]) => el("span", {}, el("i", { class: `w ${name}` }), text)));
    live.addEventListener("change", () => this.update());
    new ResizeObserver(() => this.measure()).observe(this.place);
    this.drawnAt = 0;
    requestAnimationFrame((now) => this.frame(now));
  }

  update() {
    if (!this.place.offsetParent) return;
    const { workers } = this.live;
    const size = workers.size <= MAX_LARGE ? "large" : workers.size <= MAX_MEDIUM ? "medium" : "small";
    let isMoved = this.place.className !== size;
    this.place.className = size;
    for (const [address, box] of this.boxes) {
      if (workers.has(address)) continue;
      box.node.remove();
      this.boxes.delete(address);
      isMoved = true;
    }
    const numbers = { prefill: 0, decode: 0, both: 0 };
    for (const worker of workers.values()) {
      numbers[worker.role] += 1;
      let box = this.boxes.get(worker.address);
      if (!box) {
        box = new Box(worker.address, (address) => this.choose(address));
        this.boxes.set(worker.address, box);
      }
      const group = this.groups[worker.role].node;
      if (box.node.parentNode !== group) {
        group.append(box.node);
        isMoved = true;
      }
      box.show(worker, worker.address === this.chosen);
    }
    for (const [role] of GROUPS) {
      setText(this.groups[role].number, String(numbers[role]));
      this.groups[role].node.hidden = !numbers[role];
    }
    if (!this.place.querySelector('.w[tabindex="0"]')) this.place.querySelector(".w")?.setAttribute("tabindex", "0");
    const latest = this.live.samples.at(-1);
    const before = this.live.samples.at(-4) ?? this.live.samples[0];
    const seconds = latest ? latest.time - before.time : 0;
    setText(this.numbers.running, count(latest?.running));
    setText(this.numbers.queued, count(latest?.queued));
    setText(this.numbers.handoffs, count(this.live.handoffs.reduce((sum, [, , number]) => sum + number, 0)));
    setText(this.numbers.rate, count(seconds ? (latest.output_tokens - before.output_tokens) / seconds : 0));
    if (isMoved) this.measure();
    this.detail();
    if (byId("workers").open) this.table.show([...workers.values()], this.chosen);
  }

  choose(address) {
    this.chosen = this.chosen === address ? null : address;
    this.update();
  }

  detail() {
    const worker = this.live.workers.get(this.chosen);
    const place = byId("detail");
    place.hidden = !worker;
    if (!worker) return;
    const info = worker.info ?? {};
    const facts = [
      ["State", states(worker).join(", ")],
      ["Running, waiting", `${worker.running}, ${worker.waiting}`],
      ["Sent by this router", String(worker.sent)],
      ["Prompt tokens to compute", count(worker.queued_tokens)],
      ["KV blocks in use", `${worker.blocks - worker.free_blocks - worker.cached_blocks} of ${worker.blocks}, ${worker.cached_blocks} cached`],
      ["Leases", String(worker.leases)],
      ["Prefix hits", percent(worker.hit_rate)],
      ["Answers", `${count(worker.tokens_per_s)} tokens/s`],
      ...Object.entries(info).filter(([, value]) => value).map(([name, value]) => [name.replaceAll("_", " "), String(value)]),
    ];
    if (!this.factNodes || this.factsOf !== `${this.chosen} ${roleWords(worker)}` || this.factNodes.length !== facts.length) {
      this.factsOf = `${this.chosen} ${roleWords(worker)}`;
      this.factNodes = facts.map(() => el("dd"));
      place.className = `card ${worker.role}`;
      place.replaceChildren(
        el("h3", {}, worker.address, el("span", { class: "chip" }, roleWords(worker)), el("span", { class: "space" }),
          el("button", { type: "button", onclick: () => this.choose(this.chosen) }, "Close")),
        el("dl", {}, facts.map(([name], index) => el("div", {}, el("dt", {}, name), this.factNodes[index]))));
    }
    facts.forEach(([, value], index) => setText(this.factNodes[index], value));
  }

  move(event) {
    const boxes = [...this.place.querySelectorAll(".w")];
    const now = boxes.indexOf(document.activeElement);
    if (now < 0) return;
    const here = boxes[now].getBoundingClientRect();
    const steps = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
    let next = null;
    if (event.key in steps) next = boxes[Math.min(Math.max(now + steps[event.key], 0), boxes.length - 1)];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      const sign = event.key === "ArrowDown" ? 1 : -1;
      let best = Infinity;
      for (const box of boxes) {
        const there = box.getBoundingClientRect();
        const down = sign * (there.top - here.top);
        const far = down + 3 * Math.abs(there.left - here.left);
        if (down > 2 && far < best) [best, next] = [far, box];
      }
    } else return;
    event.preventDefault();
    if (!next) return;
    boxes[now].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  measure() {
    const frame = this.place.getBoundingClientRect();
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(frame.width * scale);
    this.canvas.height = Math.round(frame.height * scale);
    this.places = new Map([...this.boxes].map(([address, box]) => {
      const one = box.node.getBoundingClientRect();
      return [address, { left: one.left - frame.left, right: one.right - frame.left, y: (one.top + one.bottom) / 2 - frame.top }];
    }));
    this.drawnAt = 0;
  }

  frame(now) {
    requestAnimationFrame((later) => this.frame(later));
    const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (!this.place.offsetParent || now - this.drawnAt < (isStill ? 500 : FRAME_MS)) return;
    if (!this.live.handoffs.length && !this.hasLines) return;
    this.drawnAt = now;
    const { canvas } = this;
    const pen = canvas.getContext("2d");
    const scale = devicePixelRatio || 1;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    const style = getComputedStyle(this.place);
    const [from, to] = [style.getPropertyValue("--prefill"), style.getPropertyValue("--decode")];
    this.hasLines = this.live.handoffs.length > 0;
    for (const [prefill, decode, number] of this.live.handoffs.slice(0, MAX_LINES)) {
      const a = this.places.get(prefill);
      const b = this.places.get(decode);
      if (!a || !b) continue;
      const isForward = a.right <= b.left;
      const [x0, x1] = isForward ? [a.right, b.left] : [(a.left + a.right) / 2, (b.left + b.right) / 2];
      const bend = Math.max(30, Math.abs(x1 - x0) / 2);
      pen.beginPath();
      pen.moveTo(x0, a.y);
      pen.bezierCurveTo(x0 + bend, a.y, x1 - bend, b.y, x1, b.y);
      const colour = pen.createLinearGradient(x0, 0, x1, 0.001);
      colour.addColorStop(0, from);
      colour.addColorStop(1, to);
      pen.strokeStyle = colour;
      pen.globalAlpha = 0.25;
      pen.lineWidth = Math.min(1 + number, 6);
      pen.setLineDash([]);
      pen.stroke();
      pen.globalAlpha = 0.95;
      pen.setLineDash([6, 18]);
      pen.lineCap = "round";
      pen.lineDashOffset = isStill ? 0 : -(now / 12) % 24;
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }
}

const LEGEND = [
  ["prefill", "prefills: KV blocks in use, cached, free"], ["decode", "decodes"], ["both", "does both"], ["draining", "drains"], ["paused", "paused by an operator"], ["unreachable", "unreachable"],
  ["suspended", "breaker open, half open or slow"], ["excluded", "not used"], ["crowd", "small boxes: bar at the top, requests"],
];

const COLUMNS = [
  { title: "Address", value: (one) => one.address, show: (one) => el("button", { type: "button", class: "id" }, one.address) },
  { title: "Role", value: roleWords },
  { title: "State", value: (one) => states(one).join(", ") },
  { title: "Running", number: true, value: (one) => one.running },
  { title: "Waiting", number: true, value: (one) => one.waiting },
  { title: "Tokens to compute", number: true, value: (one) => one.queued_tokens },
  { title: "KV in use", number: true, value: ownedShare, show: (one) => percent(ownedShare(one)) },
  { title: "Cached", number: true, value: (one) => one.cached_blocks },
  { title: "Blocks", number: true, value: (one) => one.blocks },
  { title: "Leases", number: true, value: (one) => one.leases },
  { title: "Tokens/s", number: true, value: (one) => one.tokens_per_s, show: (one) => count(one.tokens_per_s) },
  { title: "Hits", number: true, value: (one) => one.hit_rate, show: (one) => percent(one.hit_rate) },
];
