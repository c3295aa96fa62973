// Where the last requests went, and why.

import { SortedTable, byId, clock, el } from "./dom.js";
import { askJson } from "./server.js";

const EVERY_MS = 2000;

const first = (workers) => (workers.length > 1 ? el("span", { title: workers.join(", ") }, `${workers[0]} (+${workers.length - 1})`) : workers[0]);
const isInPlace = (one) => one.in_place || !one.prefill_workers.length;
const sameKey = (one) => `${one.request_id} ${one.time} ${one.cause}`; // retries decide again

export class Decisions {
  constructor() {
    this.timer = null;
    this.filter = el("input", { type: "search", id: "d-filter", placeholder: "request, worker, reason" });
    this.frozen = el("input", { type: "checkbox", id: "d-frozen" });
    this.table = new SortedTable(COLUMNS, { caption: "Routing decisions, newest first", key: sameKey });
    this.problem = el("p", { class: "bad", role: "status" });
    this.filter.addEventListener("input", () => this.draw());
    byId("decisions").append(
      el("div", { class: "row filters" }, el("label", { for: "d-filter" }, "Filter", this.filter), el("label", { class: "check", for: "d-frozen" }, this.frozen, "hold still")),
      this.problem,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of decisions" }, this.table.node));
    this.made = [];
  }

  show() {
    this.hide();
    this.timer = setInterval(() => this.load(), EVERY_MS);
    this.load();
  }

  hide() {
    clearInterval(this.timer);
  }

  async load() {
    if (document.hidden || this.frozen.checked) return;
    try {
      this.made = (await askJson("decisions?limit=100")).decisions;
      this.problem.textContent = "";
      this.draw();
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }

  draw() {
    const wanted = this.filter.value.toLowerCase();
    const found = this.made.filter((one) => JSON.stringify(one).toLowerCase().includes(wanted));
    this.table.show(found);
  }
}

const COLUMNS = [
  { title: "Time", value: (one) => one.time, show: (one) => clock(one.time) },
  { title: "Request", value: (one) => one.request_id, show: (one) => el("a", { href: `#requests/${encodeURIComponent(one.request_id)}` }, one.request_id.slice(0, 16)) },
  { title: "Cause", value: (one) => one.cause },
  { title: "Prompt", number: true, value: (one) => one.prompt_tokens },
  { title: "Cached", number: true, value: (one) => one.cached_tokens },
  { title: "Prefill", value: (one) => (isInPlace(one) ? "in place" : one.prefill_workers[0]), show: (one) => (isInPlace(one) ? "in place" : first(one.prefill_workers)) },
  { title: "Decode", value: (one) => one.decode_worker },
  { title: "Why", class: "why", value: (one) => one.reasons.join(), show: (one) => el("ol", {}, one.reasons.map((reason) => el("li", {}, reason))) },
];
