// What the router tells of itself, kept up to date: workers, samples of the last minutes, handoffs in flight, requests.

import { RefusedError, ask, events } from "./server.js";

const MAX_SAMPLES = 700;
const MAX_ENDED = 1000;
const CALM_S = 20; // that a stream should last
const HIDDEN_S = 30; // in the background, after which the page stops listening

const named = (columns, row) => Object.fromEntries(columns.map((name, at) => [name, row[at]]));

export class Live extends EventTarget {
  workers = new Map(); // by address
  samples = [];
  handoffs = []; // [prefill address, decode address, number]
  running = [];
  ended = []; // newest first
  about = {};
  state = "connecting"; // "live", "waiting", "refused", "paused"
  problem = "";
  #abort = null;
  #columns = {};

  start() {
    let timer = null;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(timer);
      if (document.hidden) timer = setTimeout(() => this.#pause(), 1000 * HIDDEN_S);
      else if (this.state === "paused") this.restart();
    });
    this.restart();
  }

  restart() {
    this.#abort?.abort();
    this.#abort = new AbortController();
    this.#follow(this.#abort.signal);
  }

  #pause() {
    this.#abort?.abort();
    this.#say("paused", "");
  }

  #say(state, problem) {
    this.state = state;
    this.problem = problem;
    this.dispatchEvent(new Event("state"));
  }

  async #follow(signal) {
    let delay = 500;
    while (!signal.aborted) {
      const begun = performance.now();
      try {
        for await (const { event, data } of events(await ask("ui/events", { signal }))) {
          if (signal.aborted) return;
          delay = 500;
          const told = JSON.parse(data);
          if (event === "missed") {
            this.#say("waiting", told.reason);
            continue;
          }
          this.#take(event, told);
          if (this.state !== "live") this.#say("live", "");
        }
        if (signal.aborted) return;
        if (performance.now() - begun > 1000 * CALM_S) continue; // a stream has its time, then the page asks again
        this.#say("waiting", "the router ended the stream");
      } catch (error) {
        if (signal.aborted) return;
        const refused = error instanceof RefusedError && (error.status === 401 || error.status === 403);
        this.#say(refused ? "refused" : "waiting", error.message);
        if (refused) return;
      }
      await new Promise((done) => setTimeout(done, delay));
      delay = Math.min(2 * delay, 8000);
    }
  }

  #take(event, told) {
    if (event === "full") {
      this.#columns = told.columns;
      this.workers = new Map();
      this.samples = [];
      this.ended = [];
    }
    const { workers, samples } = this.#columns;
    this.about = told.about ?? this.about;
    for (const address of told.gone ?? []) this.workers.delete(address);
    for (const row of told.workers) {
      const known = this.workers.get(row[0]);
      this.workers.set(row[0], { ...known, ...named(workers, row) });
    }
    for (const [address, info] of Object.entries(told.info ?? {})) {
      const known = this.workers.get(address);
      if (known) known.info = info;
    }
    this.samples.push(...told.samples.map((row) => named(samples, row)));
    this.samples.splice(0, this.samples.length - MAX_SAMPLES);
    this.handoffs = told.handoffs;
    this.running = told.running ?? [];
    this.ended = [...(told.ended ?? []), ...this.ended].slice(0, MAX_ENDED);
    this.dispatchEvent(new Event("change"));
  }
}

export const ownedShare = (worker) =>
  worker.blocks ? (worker.blocks - worker.free_blocks - worker.cached_blocks) / worker.blocks : 0;
export const filledShare = (worker) => (worker.blocks ? (worker.blocks - worker.free_blocks) / worker.blocks : 0);
