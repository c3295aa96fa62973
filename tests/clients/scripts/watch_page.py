"""The live page in Chromium: its picture, keyboard, themes, playground, requests, decisions, keys, a large fleet."""

import json
import sys
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, Request, Route, expect, sync_playwright

URL, CHROMIUM, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
QUESTION = "What is the capital of Japan?"
LEAST_CONTRAST = 4.5  # of text, by WCAG 2 (AA)
CONTRASTS = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((one) => { const c = one / 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const card = getComputedStyle(document.querySelector("header")).backgroundColor;
  const seen = {};
  for (const name of ["", "quiet", "good", "warn", "bad"]) {
    const one = document.createElement("span");
    one.className = name;
    document.querySelector("header").append(one);
    const [a, b] = [light(getComputedStyle(one).color), light(card)].sort((x, y) => y - x);
    seen[name] = (a + 0.05) / (b + 0.05);
    one.remove();
  }
  return seen;
}"""
UNNAMED = """() => [...document.querySelectorAll("button, input, select, textarea, canvas[role=img], svg[role=img], [role=region]")]
  .filter((one) => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 100))"""


def opened(browser: Browser, scheme: str = "light") -> tuple[Page, list[str]]:
    """A page, and what went wrong in it."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    problems: list[str] = []

    def asked(request: Request) -> None:
        if not request.url.startswith((URL, "data:")):
            problems.append(f"asked {request.url}")

    page.on("request", asked)
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    return page, problems


def look_at_the_fleet(page: Page) -> None:
    page.goto(f"{URL}/")
    assert page.url == f"{URL}/ui/", page.url
    page.wait_for_selector(".w.prefill.ready")
    page.wait_for_selector(".w.decode.ready")
    label = page.locator(".w.decode").first.get_attribute("aria-label") or ""
    assert label.startswith("decode worker 127.0.0.1:"), label
    assert "ready" in label, label
    page.locator(".w").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.classList.contains('decode')")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail:not([hidden])")
    assert "float32" in page.locator("#detail").inner_text()
    page.click("#workers summary")
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    page.locator("#tab-fleet").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#requests:not([hidden])")
    assert page.evaluate("document.activeElement.id") == "tab-requests"


def ask(page: Page, question: str) -> str:
    """The answer, once it is complete."""
    page.click("#tab-playground")
    before = page.locator(".said-by.assistant").count()
    page.fill("#p-prompt", question)
    page.keyboard.press("Control+Enter")
    page.locator(".said-by.assistant:not(.running)").nth(before).wait_for(timeout=120_000)
    page.wait_for_selector("#playground .timeline svg")
    return page.locator(".said-by.assistant").last.inner_text()


def play(page: Page) -> str:
    """Returns the id of the last request."""
    page.click("#tab-playground")
    page.wait_for_selector("#p-model option", state="attached")
    page.fill("#p-temperature", "0")
    page.select_option("#p-effort", "none")  # the template lets models think, and this one would for too long
    page.fill("#p-max_tokens", "24")
    assert "Tokyo" in ask(page, QUESTION)
    drawn = page.locator("#playground .timeline svg").get_attribute("aria-label") or ""
    assert all(name in drawn for name in ("prefill", "decode", "first token after")), drawn
    page.screenshot(path=FOLDER / "playground.png")

    page.click("text=New conversation")
    page.fill("#p-max_tokens", "60")
    page.select_option("#p-form_kind", "json_schema")
    said = ask(page, "Tell me about Tokyo.")
    formed = page.locator(".said-by.assistant pre").inner_text()
    assert set(json.loads(formed)) == {"name", "population"}, said
    page.select_option("#p-form_kind", "text")

    page.click("text=New conversation")
    page.click("text=Example tool")
    page.select_option("#p-tool_choice", "required")
    assert "get_weather(" in ask(page, "What is the weather in Tokyo?")
    page.fill("#p-tools", "")

    page.fill("#p-max_tokens", "2000")
    page.fill("#p-prompt", "Count to a thousand.")
    page.click("text=Send")
    page.wait_for_selector(".said-by.running")
    page.get_by_role("button", name="Stop", exact=True).click()
    page.locator(".said-by.running").wait_for(state="detached")
    return (page.locator("#playground h2").inner_text()).removeprefix("Request ")


def look_at_requests(page: Page, request_id: str) -> None:
    page.click("#tab-requests")
    page.fill("#r-text", request_id)
    page.wait_for_selector(f"tr[data-key='{request_id}'] button.id")
    expect(page.locator("#requests tbody tr")).to_have_count(1)
    page.click(f"tr[data-key='{request_id}'] button.id")
    page.wait_for_selector("#requests .timeline svg")
    assert page.url.endswith(f"#requests/{request_id}"), page.url
    page.screenshot(path=FOLDER / "request.png")
    page.fill("#r-text", "")
    page.select_option("#r-status", "bad")
    page.wait_for_selector("#requests tbody tr:has-text('cancelled')")
    page.click("#tab-decisions")
    page.wait_for_selector("#decisions tbody li")
    assert "decode by" in page.locator("#decisions tbody").inner_text()
    look_while_decisions_come(page)


def look_while_decisions_come(page: Page) -> None:
    """A link that has the focus keeps it, and a text stays selected, when there is a further row above. There may be as
    many rows as the page keeps already, so their number says nothing."""
    page.evaluate("""() => {
      document.querySelector("#decisions tbody tr").id = "newest-before";
      window.link = document.querySelector("#decisions tbody a");
      window.link.focus();
      getSelection().selectAllChildren(document.querySelector("#decisions tbody li"));
      window.selected = getSelection().toString();
      const body = JSON.stringify({ prompt: "Hello", max_tokens: 1 });
      fetch("../v1/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    }""")
    page.locator("#decisions tbody tr:not(#newest-before) ~ #newest-before").wait_for()
    assert page.evaluate("document.activeElement === window.link && window.link.isConnected")
    assert page.evaluate("window.selected && getSelection().toString() === window.selected")
    page.click("#decisions thead button:has-text('Prompt')")
    expect(page.locator("#decisions th[aria-sort=descending]")).to_have_count(1)


def ask_for_a_key(browser: Browser) -> None:
    """A router that asks for keys, as the page sees it."""
    page, _ = opened(browser)

    def answer(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            body = json.dumps({"error": {"message": "an API key is needed"}})
            route.fulfill(status=401, content_type="application/json", body=body)

    page.route("**/ui/events", answer)
    page.goto(f"{URL}/ui/")
    page.wait_for_selector("#key-dialog[open]")
    assert "an API key is needed" in page.locator("#notice").inner_text()
    page.fill("#key-input", "secret")
    page.keyboard.press("Enter")
    page.wait_for_selector(".w.ready")
    assert page.locator("#notice").is_hidden()
    page.close()


def watch_a_large_fleet(browser: Browser, number: int, scheme: str) -> None:
    page, problems = opened(browser, scheme)
    columns = [
        "address", "role", "state", "problem", "is_excluded", "breaker", "running", "waiting", "queued_tokens",
        "blocks", "free_blocks", "cached_blocks", "leases", "sent", "tokens_per_s", "hit_rate",
    ]  # fmt: skip
    rows = []
    for one in range(number):
        role = "prefill" if one < number * 0.6 else "decode"
        state = "draining" if one % 31 == 7 else "unreachable" if one % 47 == 11 else "ready"
        breaker = "open" if one % 37 == 5 else "closed"
        free, cached = (one * 37) % 600, (one * 53) % 300
        rows.append(
            [
                f"10.0.0.{one}:50052",
                role,
                state,
                "",
                False,
                breaker,
                one % 17,
                one % 3,
                one,
                1000,
                free,
                cached,
                0,
                1,
                12.5,
                0.4,
            ]
        )
    handoffs = [[rows[one][0], rows[number - 1 - one][0], 1 + one % 3] for one in range(0, number // 3, 4)]
    told = {
        "columns": {"workers": columns, "samples": ["time"]}, "about": {"model": "m", "version": "1", "processes": 1, "not_ready": ""},
        "workers": rows, "info": {}, "samples": [], "handoffs": handoffs, "running": [],
    }  # fmt: skip
    body = f"event: full\ndata: {json.dumps(told)}\n\n"
    page.route("**/ui/events", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.goto(f"{URL}/ui/")
    page.wait_for_selector(".w")
    expect(page.locator("#picture .w")).to_have_count(number)
    page.screenshot(path=FOLDER / f"fleet-{number}-{scheme}.png")
    assert not problems, problems
    page.close()


def main() -> None:
    begin = time.monotonic()
    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page, problems = opened(browser)
        look_at_the_fleet(page)
        request_id = play(page)
        look_at_requests(page, request_id)
        page.click("#tab-fleet")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_selector(f"html[data-theme={scheme}]", state="attached")
            contrasts = page.evaluate(CONTRASTS)
            assert min(contrasts.values()) >= LEAST_CONTRAST, (scheme, contrasts)
            page.screenshot(path=FOLDER / f"fleet-{scheme}.png")
        page.click("#theme-button")  # auto, light
        page.wait_for_selector("html[data-theme=light]", state="attached")
        assert page.evaluate(UNNAMED) == []
        assert not problems, problems
        page.close()
        ask_for_a_key(browser)
        watch_a_large_fleet(browser, 100, "light")
        watch_a_large_fleet(browser, 500, "dark")
        browser.close()
    print(f"{time.monotonic() - begin:.0f} s")


main()
