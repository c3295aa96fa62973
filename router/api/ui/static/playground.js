// A chat with the model: streamed, with tools or a form for the answer, and each answer's timeline.

import { byId, el } from "./dom.js";
import { ask, askJson, events } from "./server.js";
import { stagesOf, timeline } from "./timeline.js";

const TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
  },
}];
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, population: { type: "integer" } },
  required: ["name", "population"],
  additionalProperties: false,
};
const pretty = (value) => JSON.stringify(value, null, 2);

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
}

class Message {
  constructor(who) {
    this.who = who;
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.content = el("span");
    this.thought = el("span");
    this.thoughts = el("details", { hidden: true }, el("summary", {}, "Reasoning"), this.thought);
    this.extra = el("div");
    this.node = el("div", { class: `said-by ${who}` }, el("span", { class: "who" }, who), this.thoughts, this.content, this.extra);
  }

  add(delta) {
    const reasoning = delta.reasoning_content ?? "";
    if (reasoning) {
      this.reasoning += reasoning;
      this.thoughts.hidden = false;
      this.thought.append(reasoning);
    }
    if (delta.content) {
      this.text += delta.content;
      this.content.append(delta.content);
    }
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" }, node: null });
      call.id ||= part.id ?? "";
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
      if (!call.node) this.extra.append((call.node = el("pre")));
      call.node.textContent = `${call.function.name}(${call.function.arguments})`;
    }
  }

  showJson() {
    try {
      this.content.replaceChildren(el("pre", {}, pretty(JSON.parse(this.text))));
    } catch {
      // Cut off, or text: it stays as it came.
    }
  }

  get message() {
    const calls = this.calls.filter(Boolean).map(({ id, type, function: one }) => ({ id, type, function: one }));
    return { role: this.who, content: this.text || null, ...(calls.length ? { tool_calls: calls } : {}) };
  }
}

export class Playground {
  constructor() {
    this.messages = [];
    this.abort = null;
    const field = (name, title, node) => {
      node.id = `p-${name}`;
      node.name = name;
      this[name] = node;
      return el("label", { for: node.id }, title, node);
    };
    const number = (value, attributes) => el("input", { type: "number", value, ...attributes });
    this.send = el("button", { class: "primary", type: "submit" }, "Send");
    this.stop = el("button", { type: "button", disabled: true, onclick: () => this.abort?.abort() }, "Stop");
    this.clear = el("button", { type: "button", onclick: () => this.forget() }, "New conversation");
    this.form = el("form", { class: "card" },
      field("model", "Model", el("select")),
      field("system", "System message", el("textarea", { rows: 2 })),
      field("prompt", "Message", el("textarea", { rows: 4, placeholder: "Ctrl+Enter sends", required: true })),
      el("div", { class: "pair" },
        field("max_tokens", "Most tokens", number(200, { min: 1 })),
        field("temperature", "Temperature", number(0.7, { min: 0, max: 2, step: "any" })),
        field("top_p", "Top p", number(1, { min: 0, max: 1, step: "any" })),
        field("seed", "Seed", number("", {}))),
      field("effort", "Reasoning", el("select", {},
        el("option", { value: "" }, "as the model does"), ["none", "low", "medium", "high"].map((one) => el("option", { value: one }, one)))),
      field("form_kind", "Form of the answer", el("select", {},
        el("option", { value: "text" }, "text"), el("option", { value: "json_object" }, "any JSON"), el("option", { value: "json_schema" }, "JSON by a schema"))),
      field("schema", "JSON schema", el("textarea", { rows: 6, spellcheck: "false" }, pretty(SCHEMA))),
      field("tools", "Tools (JSON, as OpenAI has them)", el("textarea", { rows: 3, spellcheck: "false" })),
      field("tool_choice", "Calls of tools", el("select", {}, ["auto", "required", "none"].map((one) => el("option", { value: one }, one)))),
      el("div", { class: "row" }, el("button", { type: "button", onclick: () => this.exampleTool() }, "Example tool")),
      el("div", { class: "row" }, this.send, this.stop, this.clear));
    this.talk = el("div", { class: "talk", role: "log", "aria-label": "Conversation", "aria-live": "polite" });
    this.picture = el("div", { class: "card", hidden: true });
    byId("playground").append(this.form, el("div", {}, this.talk, this.picture));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.prompt.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.form.requestSubmit());
    this.form_kind.addEventListener("change", () => this.showSchema());
    this.tools.addEventListener("input", () => this.showToolChoice());
    this.showSchema();
    this.showToolChoice();
  }

  showSchema() {
    this.schema.parentNode.hidden = this.form_kind.value !== "json_schema";
  }

  showToolChoice() {
    this.tool_choice.parentNode.hidden = !this.tools.value.trim();
  }

  exampleTool() {
    this.tools.value = pretty(TOOLS);
    this.showToolChoice();
  }

  async show() {
    if (this.model.options.length) return;
    try {
      const { data } = await askJson("v1/models");
      this.model.replaceChildren(...data.map((one) => el("option", { value: one.id }, one.id)));
    } catch (error) {
      this.fail(error);
    }
  }

  forget() {
    this.abort?.abort();
    this.messages = [];
    this.talk.replaceChildren();
    this.picture.hidden = true;
    this.prompt.focus();
  }

  fail(error) {
    this.talk.append(el("p", { class: "bad", role: "alert" }, error.message));
  }

  body(messages) {
    const kind = this.form_kind.value;
    const body = {
      model: this.model.value || undefined,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: this.max_tokens.valueAsNumber || undefined,
      temperature: Number.isNaN(this.temperature.valueAsNumber) ? undefined : this.temperature.valueAsNumber,
      top_p: Number.isNaN(this.top_p.valueAsNumber) ? undefined : this.top_p.valueAsNumber,
      reasoning_effort: this.effort.value || undefined,
      seed: Number.isNaN(this.seed.valueAsNumber) ? undefined : this.seed.valueAsNumber,
    };
    if (kind === "json_object") body.response_format = { type: kind };
    if (kind === "json_schema") {
      body.response_format = { type: kind, json_schema: { name: "answer", strict: true, schema: parsed(this.schema.value, "JSON schema") } };
    }
    if (this.tools.value.trim()) {
      body.tools = parsed(this.tools.value, "Tools");
      body.tool_choice = this.tool_choice.value;
    }
    return body;
  }

  async ask() {
    if (this.abort) return;
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    const question = new Message("user");
    question.add({ content: this.prompt.value });
    const said = [...this.messages, question.message];
    const answer = new Message("assistant");
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.disabled = false;
    try {
      const body = this.body([...system, ...said]);
      this.talk.append(question.node, answer.node);
      answer.node.classList.add("running");
      const begun = performance.now();
      let first = null;
      let report = null;
      let reason = null;
      let usage = null;
      for await (const { data } of events(await ask("v1/chat/completions", { body, signal: this.abort.signal }))) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const choice = chunk.choices?.[0];
        if (choice?.delta) {
          answer.add(choice.delta);
          if (first === null && (choice.delta.content || choice.delta.reasoning_content || choice.delta.tool_calls)) first = performance.now() - begun;
        }
        reason = choice?.finish_reason ?? reason;
        report = chunk.baton ?? report;
        usage = chunk.usage ?? usage;
      }
      if (this.form_kind.value !== "text") answer.showJson();
      this.messages = [...said, answer.message];
      this.prompt.value = "";
      await this.showReport(report, reason, usage, first, performance.now() - begun);
    } catch (error) {
      if (error.name === "AbortError") answer.add({ content: " (stopped)" });
      else this.fail(error);
      if (!answer.node.isConnected) question.node.remove();
    } finally {
      answer.node.classList.remove("running");
      this.abort = null;
      this.send.disabled = false;
      this.stop.disabled = true;
      this.prompt.focus();
    }
  }

  async showReport(report, reason, usage, firstMs, totalMs) {
    if (!report) return;
    const tokens = usage ? `${usage.prompt_tokens} prompt tokens (${usage.prompt_tokens_details?.cached_tokens ?? 0} cached), ${usage.completion_tokens} tokens, ` : "";
    const here = `in this browser: first text after ${Math.round(firstMs ?? totalMs)} ms, end after ${Math.round(totalMs)} ms`;
    let record = { ...report, ...report.timings, stages: stagesOf(report) };
    try {
      record = await askJson(`requests/${encodeURIComponent(report.request_id)}`);
    } catch {
      // Forgotten by now, or another tenant's: the answer's own report has to do.
    }
    this.picture.hidden = false;
    this.picture.replaceChildren(el("h2", {}, `Request ${report.request_id}`), el("p", { class: "quiet" }, `${tokens}ended by ${reason ?? "?"}; ${here}`), timeline(record));
  }
}
