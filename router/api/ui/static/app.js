// The page: its tabs, theme and key, and what the router says of itself at the top.

import { makeCharts } from "./charts.js";
import { Decisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { Fleet } from "./fleet.js";
import { Live } from "./live.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { key, setKey } from "./server.js";

const TABS = ["fleet", "requests", "decisions", "playground"];
const live = new Live();
makeCharts(byId("charts"), live);
const views = { fleet: new Fleet(live), requests: new Requests(live), decisions: new Decisions(), playground: new Playground() };

// ---- tabs; the address names one, so that it can be linked to

function shownTab() {
  const [name] = location.hash.slice(1).split("/");
  return TABS.includes(name) ? name : "fleet";
}

function showTab() {
  const name = shownTab();
  for (const one of TABS) {
    byId(one).hidden = one !== name;
    const tab = byId(`tab-${one}`);
    tab.setAttribute("aria-selected", String(one === name));
    tab.tabIndex = one === name ? 0 : -1;
  }
  for (const [one, view] of Object.entries(views)) {
    if (one === name) (view.show ?? view.update)?.call(view, location.hash.split("/")[1] ?? "");
    else view.hide?.();
  }
  live.dispatchEvent(new Event("change"));
}

byId("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) location.hash = tab.id.slice(4);
});
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowLeft: TABS.length - 1, ArrowRight: 1 }[event.key];
  if (!step) return;
  event.preventDefault();
  location.hash = TABS[(TABS.indexOf(shownTab()) + step) % TABS.length];
  byId(`tab-${shownTab()}`).focus();
});
addEventListener("hashchange", showTab);

// ---- theme

const themeButton = byId("theme-button");
const nameTheme = () => setText(themeButton, `Theme: ${batonTheme.chosen()}`);
themeButton.addEventListener("click", () => {
  batonTheme.next();
  nameTheme();
});
nameTheme();

// ---- key

const dialog = byId("key-dialog");

function askForKey(reason) {
  setText(byId("key-reason"), reason || "The fleet is shown to an operator's key; the playground takes any.");
  byId("key-input").value = key();
  if (!dialog.open) dialog.showModal();
}

byId("key-button").addEventListener("click", () => askForKey(""));
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "ok") return;
  setKey(byId("key-input").value.trim());
  byId("key-input").value = "";
  live.restart();
  showTab();
});
dialog.querySelector("form").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.target.tagName === "BUTTON") return;
  event.preventDefault();
  dialog.close("ok");
});

// ---- the top

live.addEventListener("change", () => {
  const { about, workers } = live;
  setText(byId("model"), about.model ?? "");
  setText(byId("about"), `${about.processes > 1 ? `${about.processes} processes, ` : ""}version ${about.version ?? ""}`);
  showHealth(about, [...workers.values()]);
});

function showHealth(about, workers) {
  if (live.state !== "live") return;
  const ready = workers.filter((one) => one.state === "ready" && !one.is_excluded).length;
  const health = byId("health");
  health.className = `chip ${about.not_ready ? "bad" : ready < workers.length ? "warn" : "good"}`;
  setText(health, about.not_ready ? "takes no requests" : `${ready} of ${workers.length} workers ready`);
  health.title = about.not_ready;
}

live.addEventListener("state", () => {
  const health = byId("health");
  const notice = byId("notice");
  notice.hidden = live.state === "live" || live.state === "paused";
  if (live.state === "live") {
    showHealth(live.about, [...live.workers.values()]);
    return;
  }
  health.className = "chip warn";
  setText(health, live.state === "paused" ? "paused" : "no news");
  setText(notice, live.state === "refused" ? `The router shows its fleet to operators alone: ${live.problem}` : `No news from the router: ${live.problem}. Trying again.`);
  if (live.state === "refused" && shownTab() !== "playground") askForKey(live.problem);
});

live.start();
showTab();
