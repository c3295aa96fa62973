// Sets the theme before anything is drawn: the visitor's choice, or else the system's.
"use strict";
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem("baton-theme") || "auto";
  const apply = () => {
    const theme = chosen() === "auto" ? (system.matches ? "dark" : "light") : chosen();
    document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("baton-theme"));
  };
  system.addEventListener("change", apply);
  globalThis.batonTheme = {
    chosen,
    next() {
      const order = ["auto", "light", "dark"];
      localStorage.setItem("baton-theme", order[(order.indexOf(chosen()) + 1) % 3]);
      apply();
      return chosen();
    },
  };
  apply();
})();
