// The last requests: those that run, and those that ended; filters, and the timeline of one.

import { SortedTable, byId, clock, count, el, millis } from "./dom.js";
import { askJson } from "./server.js";
import { miniature, timeline } from "./timeline.js";

const EVERY_MS = 2000;
const LIMIT = 300;
const NEXT_LIMIT = 50; // once those that ended before are known
const COUNTS = {
  num_blocks_moved: "KV blocks moved", num_blocks_lent: "KV blocks lent", num_retries: "retries", num_migrations: "migrations", num_handovers: "handovers",
  num_hedges: "hedges", num_hedges_won: "hedges won", num_preemptions: "preemptions", num_drafted_tokens: "drafted tokens", num_accepted_tokens: "accepted tokens",
};
const soFar = (one) => (one.output_tokens > 1 && one.ttft_ms !== null ? (one.total_ms - one.ttft_ms) / (one.output_tokens - 1) : null);
const perToken = (one) => (one.tpot_ms === undefined ? soFar(one) : one.tpot_ms); // those that run have no figure of their own

const sameKey = (one) => `${one.request_id} ${one.time} ${one.total_ms}`; // an id may come twice

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // an address that somebody typed
  }
}

const MET = new Map([[true, "met"], [false, "missed"], [null, "not known"]]);
const target = (one, name) => one[`${name}_target_ms`] != null && MET.get(one[`${name}_met`] ?? null);
const timed = (one, name, ms) => (target(one, name) === "missed" ? el("span", { class: "bad", title: `latency target: ${millis(one[`${name}_target_ms`])}` }, millis(ms)) : millis(ms));

export class Requests {
  constructor(live) {
    this.live = live;
    this.timer = null;
    this.known = []; // that ended, the latest first
    this.isBegun = false; // whether `known` goes back as far as the page shows
    this.chosen = null;
    const field = (name, title, node) => {
      node.id = `r-${name}`;
      this[name] = node;
      node.addEventListener("input", () => this.draw());
      return el("label", { for: node.id, class: node.type === "checkbox" && "check" }, title, node);
    };
    const options = (...values) => values.map(([value, text]) => el("option", { value }, text));
    this.problem = el("p", { class: "bad", role: "status" });
    this.number = el("p", { class: "quiet", role: "status" });
    this.detail = el("div", { class: "card", tabindex: "-1", hidden: true });
    this.table = new SortedTable(COLUMNS(() => this.most), { caption: "Requests, newest first", key: (one) => one.request_id, picked: (one) => this.choose(one.request_id) });
    byId("requests").append(
      el("div", { class: "row filters" },
        field("text", "Filter", el("input", { type: "search", placeholder: "id, client, worker, reason" })),
        field("status", "Ended", el("select", {}, options(["", "any way"], ["ok", "well"], ["bad", "badly"], ["running", "still running"]))),
        field("place", "Prefill", el("select", {}, options(["", "anywhere"], ["remote", "at a prefill worker"], ["in place", "in place"]))),
        field("least", "Took at least (ms)", el("input", { type: "number", min: 0, step: "any" })),
        field("events", "With", el("select", {}, options(["", "anything"], ["num_retries", "retries"], ["num_migrations", "migrations"], ["num_hedges", "hedges"], ["num_preemptions", "preemptions"], ["fallback_reason", "a fallback"]))),
        field("frozen", "hold still", el("input", { type: "checkbox" }))),
      this.problem, this.detail, this.number,
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of requests" }, this.table.node));
    live.addEventListener("change", () => byId("requests").offsetParent && !this.frozen.checked && this.draw());
  }

  show(chosen) {
    this.hide();
    this.isBegun = false; // the key may be another one
    this.timer = setInterval(() => this.load(), EVERY_MS);
    this.choose(decoded(chosen), { isGiven: true });
    this.load();
  }

  hide() {
    clearInterval(this.timer);
  }

  async load() {
    if (document.hidden || this.frozen.checked) return;
    try {
      await this.learn();
      this.problem.textContent = "";
      this.draw();
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }

  async learn() {
    const ask = async (limit) => (await askJson(`requests?limit=${limit}`)).requests;
    if (this.isBegun) {
      const latest = await ask(NEXT_LIMIT);
      const before = new Set(this.known.map(sameKey));
      if (latest.length === NEXT_LIMIT && before.has(sameKey(latest.at(-1)))) {
        const again = new Set(latest.map(sameKey));
        this.known = [...latest, ...this.known.filter((one) => !again.has(sameKey(one)))].slice(0, LIMIT);
        return;
      }
      if (latest.length < NEXT_LIMIT) {
        this.known = latest; // there are no others
        return;
      }
    }
    this.known = await ask(LIMIT);
    this.isBegun = true;
  }

  draw() {
    const running = this.live.running.map((one) => ({ ...one, status: "running", stages: [], ttft_ms: one.ttft_ms ?? null }));
    const all = [...running, ...this.known];
    const shown = all.filter((one) => this.wants(one));
    this.most = Math.max(1, ...shown.map((one) => one.total_ms));
    this.table.show(shown, this.chosen);
    this.number.textContent = `${shown.length} of the last ${all.length} requests`;
  }

  wants(one) {
    const status = this.status.value;
    if (status === "bad" ? one.status === "ok" || one.status === "running" : status && one.status !== status) return false;
    if (this.place.value && (this.place.value === "remote") !== Boolean(one.prefill_worker)) return false;
    if (one.total_ms < (this.least.valueAsNumber || 0)) return false;
    if (this.events.value && !one[this.events.value]) return false;
    const words = this.text.value.toLowerCase();
    return !words || [one.request_id, one.client, one.model, one.prefill_worker, one.decode_worker, one.reason, one.finish_reason, one.status].some((text) => text?.toLowerCase().includes(words));
  }

  async choose(requestId, { isGiven = false } = {}) {
    this.chosen = requestId && (isGiven || requestId !== this.chosen) ? requestId : null;
    if (!isGiven) history.replaceState(null, "", this.chosen ? `#requests/${encodeURIComponent(this.chosen)}` : "#requests");
    this.draw();
    this.detail.hidden = !this.chosen;
    if (!this.chosen) return;
    try {
      const record = this.known.find((one) => one.request_id === requestId) ?? (await askJson(`requests/${encodeURIComponent(requestId)}`));
      if (this.chosen !== requestId) return; // another was chosen meanwhile
      this.showDetail(record);
    } catch (error) {
      if (this.chosen !== requestId) return;
      this.detail.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }

  showDetail(record) {
    const facts = [
      `${record.prompt_tokens} prompt tokens, ${record.cached_tokens} cached`, `${record.output_tokens} tokens of answer`,
      record.tokens_per_second > 0 && `${count(record.tokens_per_second)} tokens/s`, record.client && `client ${record.client}`, record.model,
      record.num_bytes_moved > 0 && `${(record.num_bytes_moved / 1e6).toFixed(1)} MB moved`,
      ...Object.entries(COUNTS).map(([name, text]) => record[name] > 0 && `${text}: ${record[name]}`),
      record.slo_class && `latency class ${record.slo_class}`, target(record, "ttft") && `first token within ${millis(record.ttft_target_ms)}: ${target(record, "ttft")}`,
      target(record, "tpot") && `${millis(record.tpot_target_ms)} a token: ${target(record, "tpot")}`, record.fallback_reason && `computed in place: ${record.fallback_reason}`, record.reason && `reason: ${record.reason}`, record.trace_id && `trace ${record.trace_id}`,
    ].filter(Boolean);
    const attempts = record.attempts.length > 1 ? el("ol", {}, record.attempts.map((one) => el("li", {}, `${one.cause} on ${one.decode_worker}, ${millis(one.start_ms)} to ${millis(one.end_ms)}${one.failure ? `: ${one.failure}` : ""}`))) : "";
    this.detail.replaceChildren(
      el("h2", {}, `Request ${record.request_id}`, " ", el("span", { class: `chip ${record.status === "ok" ? "good" : "bad"}` }, record.status === "ok" ? record.finish_reason : record.status),
        " ", el("button", { type: "button", onclick: () => this.choose(record.request_id) }, "Close")),
      timeline(record), el("ul", { class: "facts" }, facts.map((fact) => el("li", {}, fact))), attempts);
    this.detail.focus({ preventScroll: true });
  }
}

const COLUMNS = (most) => [
  { title: "Came", value: (one) => one.time, show: (one) => clock(one.time) },
  { title: "Request", value: (one) => one.request_id, show: (one) => el("button", { type: "button", class: "id", title: one.request_id }, one.request_id.slice(0, 12)) },
  { title: "Client", value: (one) => one.client },
  { title: "Ended", value: (one) => one.status, show: (one) => el("span", { class: one.status === "ok" ? "good" : one.status === "running" ? "quiet" : "bad" }, one.status === "ok" ? one.finish_reason : one.status) },
  { title: "Prompt", number: true, value: (one) => one.prompt_tokens },
  { title: "Cached", number: true, value: (one) => one.cached_tokens },
  { title: "Tokens", number: true, value: (one) => one.output_tokens },
  { title: "First token", number: true, value: (one) => one.ttft_ms ?? Infinity, show: (one) => timed(one, "ttft", one.ttft_ms) },
  { title: "Per token", number: true, value: (one) => perToken(one) ?? Infinity, show: (one) => timed(one, "tpot", perToken(one)) },
  { title: "Total", number: true, value: (one) => one.total_ms, show: (one) => millis(one.total_ms) },
  { title: "Prefill", value: (one) => one.prefill_worker || "in place" },
  { title: "Decode", value: (one) => one.decode_worker },
  { title: "Time", value: (one) => one.total_ms, number: true, show: (one) => miniature(one, most()) },
];
