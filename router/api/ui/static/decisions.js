// Where the last requests went, and why.

import { byId, clock, el } from "./dom.js";
import { askJson } from "./server.js";

const EVERY_MS = 2000;

const first = (workers) => (workers.length > 1 ? el("span", { title: workers.join(", ") }, `${workers[0]} (+${workers.length - 1})`) : workers[0]);

export class Decisions {
  constructor() {
    this.timer = null;
    this.filter = el("input", { type: "search", id: "d-filter", placeholder: "request, worker, reason" });
    this.frozen = el("input", { type: "checkbox", id: "d-frozen" });
    this.body = el("tbody");
    this.problem = el("p", { class: "bad", role: "status" });
    this.filter.addEventListener("input", () => this.draw());
    byId("decisions").append(
      el("div", { class: "row filters" }, el("label", { for: "d-filter" }, "Filter", this.filter), el("label", { class: "check", for: "d-frozen" }, this.frozen, "hold still")),
      this.problem,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of decisions" }, el("table", {},
        el("caption", { class: "unseen" }, "Routing decisions, newest first"),
        el("thead", {}, el("tr", {}, ["Time", "Request", "Cause", "Prompt", "Cached", "Prefill", "Decode", "Why"].map((title) => el("th", { scope: "col" }, title)))),
        this.body)));
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
    this.body.replaceChildren(...found.map((one) => el("tr", {},
      el("td", {}, clock(one.time)),
      el("td", {}, el("a", { href: `#requests/${encodeURIComponent(one.request_id)}` }, one.request_id.slice(0, 16))),
      el("td", {}, one.cause),
      el("td", { class: "number" }, String(one.prompt_tokens)),
      el("td", { class: "number" }, String(one.cached_tokens)),
      el("td", {}, one.in_place || !one.prefill_workers.length ? "in place" : first(one.prefill_workers)),
      el("td", {}, one.decode_worker),
      el("td", { class: "why" }, el("ol", {}, one.reasons.map((reason) => el("li", {}, reason)))))));
  }
}
