"""Tokens of attack in pages, opened in Chromium without network: they are text, and run nothing."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import attnflow as af
from tests.browser import Visitor, launch
from tests.families import build, word_tokenizer
from tests.hostile.tries import CORES, FORK, Result, complain, draw_from
from tests.pages import explanation_page, generation_page

PAGES: dict[str, Callable[[Any], str]] = {
    "explanation": explanation_page,
    "generation": generation_page,
}
RUN = "window.attacked=1"
# each token; in those with signs that cannot be seen they are escaped
ATTACKS: list[str | tuple[str, str]] = [
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"</ScRiPt ><svg onload={RUN}>",
    f"<!--<script>{RUN}//",
    f"--><script>{RUN}</script>",
    f"]]><script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f'"><img src=x onerror={RUN}>',
    f"'><img src=x onerror={RUN}>",
    f'" onmouseover="{RUN}" autofocus onfocus="{RUN}',
    f"' onclick='{RUN}' x='",
    f"` onload=`{RUN}",
    f"<svg><script>{RUN}</script></svg>",
    f"<svg><animate onbegin={RUN} attributeName=x dur=1s>",
    f"<math><mtext><script>{RUN}</script>",
    f'<iframe srcdoc="<script>parent.{RUN}</script>">',
    f"<iframe src=javascript:{RUN}>",
    f"javascript:{RUN}",
    f"<a href=javascript:{RUN}>key</a>",
    f"<body onload={RUN}>",
    f"<details open ontoggle={RUN}>",
    f"<video><source onerror={RUN}>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<style>*{display:none}@import 'http://127.0.0.1:9/x'</style>",
    "</style><style>body{background:url(http://127.0.0.1:9/x)}",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<base href=http://127.0.0.1:9/>",
    "<form action=http://127.0.0.1:9/><input name=x>",
    "{{data}}",
    "{{js}}{{css}}",
    "${window.attacked=1}",
    f"';{RUN};//",
    f'";{RUN};//\\',
    f"\\u003cscript\\u003e{RUN}\\u003c/script\\u003e",
    f"&lt;script&gt;{RUN}&lt;/script&gt;",
    "__proto__",
    (f"a\u2028{RUN}\u2029b", rf"a\u2028{RUN}\u2029b"),
    ("\u202e\u2066evil\u2069", r"\u202e\u2066evil\u2069"),
    ("\0\x1b[31m<b>\x7f\ud800", r"\x00\x1b[31m<b>\x7f\ud800"),
    f"<b>{'x' * 20_000}</b>",
]
# read from a page: the first strip's tokens; elements with handlers; the elements' names
STRIP = (
    "[...document.querySelector('#text .text').querySelectorAll('.token')]"
    ".map(e => [e.textContent, e.title])"
)
HANDLERS = (
    "[...document.querySelectorAll('*')].filter("
    "e => [...e.attributes].some(a => /^on|^srcdoc$/.test(a.name)"
    " || /^\\s*javascript:/i.test(a.value) && a.name !== 'title')"
    ").length"
)
# of these there are as many as a text has words and a view in sight has edges
VARYING = {"SPAN", "BR", "CANVAS", "LI", "OPTION", "TR", "TH", "TD"}
NAMES = "[...document.querySelectorAll('*')].map(e => e.tagName)"


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these tokens, each in two pages, of an explanation and of a generation."""
    results = make_results()
    shares = [numbers[start::CORES] for start in range(min(CORES, len(numbers)))]
    with ProcessPoolExecutor(CORES, mp_context=FORK) as pool:
        places = [folder / str(number) for number in range(len(shares))]
        found = list(pool.map(open_pages, shares, repeat(seed), places, repeat(results)))
    return Result(len(numbers), tuple(line for lines in found for line in lines))


def open_pages(
    numbers: Sequence[int], seed: int, folder: Path, results: dict[str, Any]
) -> list[str]:
    """Open the pages of some tries in a browser; a line for each bad try."""
    folder.mkdir(parents=True)
    bad = []
    with launch() as browser:
        visitor = Visitor(browser, folder)
        plain = {kind: walk(visitor.visit(PAGES[kind](results[kind]))) for kind in results}
        for number in numbers:
            found = None
            for kind, result in results.items():
                found = found or attempt(visitor, kind, plain[kind], number, seed, result)
                visitor.close()
            if found:
                bad.append(f"tokens --number {number}: {attack(number)[0][:60]!a}: {found}")
    return bad


def make_results() -> dict[str, Any]:
    """An explanation by the model that ships with attnflow, and a generation by a tiny decoder."""
    model = af.Model(build("llama"), word_tokenizer())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "explanation": af.explain("the key to the cabinets of the old house"),
            "generation": af.generate(
                model, "the key to the cabinets is", max_new_tokens=6, eos_token_id=None
            ),
        }


def attack(number: int) -> tuple[str, str]:
    """A token, and how a page shows it; from the list once, then two of it in one token."""
    first = ATTACKS[number % len(ATTACKS)]
    token, shown = first if isinstance(first, tuple) else (first, first)
    if number >= len(ATTACKS):
        return f"{token}{number}", f"{shown}{number}"
    return token, shown


def attempt(
    visitor: Visitor,
    kind: str,
    plain: Counter[str],
    number: int,
    seed: int,
    result: Any,
) -> str | None:
    """Open one page whose tokens, text and names attack it; what happened, if anything."""
    token, shown = attack(number)
    draw = draw_from("tokens", seed, number)
    tokens = list(result.tokens if kind == "explanation" else result.prompt)
    place = draw.randrange(len(tokens))
    tokens[place] = token
    if kind == "explanation":
        changes = {"tokens": tuple(tokens), "model": token, "prediction": (token, 0.5)}
    else:
        changes = {"prompt": tuple(tokens), "tokens": (token, *result.tokens[1:])}

    def check() -> str | None:
        html = PAGES[kind](replace(result, text=token, **changes))
        tab = visitor.visit(html, width=draw.choice([1100, 360]))
        return look(tab, place, shown, token, plain)

    found = complain(check)
    if visitor.complaints:
        found = found or f"the page did something: {visitor.complaints[0][:200]!r}"
    return found and f"{kind}: {found}"


def look(tab: Any, place: int, shown: str, token: str, plain: Counter[str]) -> str | None:
    """What a token did to a page, after a reader has looked at all of it."""
    found = walk(tab)
    strip = tab.evaluate(STRIP)
    if strip[place] != [shown, token]:
        return f"the token is shown as {ascii(strip[place])[:200]}"
    if tab.evaluate("window.attacked") is not None:
        return "a script of the token's ran"
    changed = {
        name: count
        for name, count in found.items()
        if plain[name] != count and (name not in VARYING or not plain[name])
    }
    if changed or tab.evaluate(HANDLERS):
        return f"elements or handlers were injected: {changed}"
    return None


def walk(tab: Any) -> Counter[str]:
    """Open all that a page can show; how many elements of each name it has then."""
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for method in ("raw", "flow", "rollout"):
        tab.locator("#method").select_option(method)
        tab.evaluate("document.querySelector('#text .token').click()")
    for kind in ("csv", "latex", "html"):
        tab.evaluate("id => document.getElementById(id).click()", f"copy-{kind}")
    tab.wait_for_selector("#table tbody tr", state="attached")
    return Counter(tab.evaluate(NAMES))
