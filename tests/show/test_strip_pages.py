"""Pages of strips in a real browser: two explanations side by side, and the texts of a corpus."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.cli.commands import main_app
from attnflow.corpus.stored_texts import DOMINANT, compare_even, list_texts

HOSTILE = '<img src=x onerror="window.attacked=1">'
TEXTS = ["the keys to the old house", "the man with the dogs", f"the {HOSTILE} authors"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = "".join(f'{{"text": "{text.replace(chr(34), chr(39))}"}}\n' for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    af.explain_corpus(folder / "texts.jsonl", folder / "out", importance=["blank_out"])
    return folder / "out"


def test_strips_are_the_stored_shares_compared_with_even(corpus: Path) -> None:
    texts = list(list_texts(corpus))
    assert len(texts) == 3
    found = af.explain(TEXTS[0], methods=["rollout"], importance=["blank_out"])
    strip = next(each for each in texts[0].strips if (each.name, each.layer) == ("rollout", 6))
    compared = found.rollout.compared_with("even", exclude=[0]).select(0, 6)
    np.testing.assert_allclose(strip.tones[1:], compared.scaled[0, 0, 1:], atol=1e-5)
    assert np.isnan(strip.tones[0])
    assert strip.top == "keys"
    assert strip.share == pytest.approx(float(found.rollout.at(0)[2]), abs=1e-6)
    blanked = next(each for each in texts[0].strips if each.name == "blank_out")
    assert blanked.layer is None
    assert blanked.tones[2] == pytest.approx(1.0)


def test_what_holds_more_than_half_is_left_out() -> None:
    shares = np.array([0.9, 0.06, 0.04])
    assert shares[0] > DOMINANT
    tones = compare_even(shares, np.zeros(3, bool))
    assert np.isnan(tones).tolist() == [True, False, False]
    np.testing.assert_allclose(tones[1:], np.log2([1.2, 0.8]) / 3)
    assert np.isnan(compare_even(np.array([1.0, 0.0]), np.array([False, True]))).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rolout"], "holds no method 'rolout'; it has .*, raw, rollout, flow"),
        (["--layer", "9"], "layer 9 of rollout is not stored in .*; choose from 1, 2"),
    ],
)
def test_a_page_of_what_is_not_stored_is_one_line(
    corpus: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    from typer.testing import CliRunner

    command = ["corpus", "page", str(corpus), "--out", str(tmp_path / "pages"), *arguments]
    with pytest.raises(af.AttnFlowError, match=message):
        CliRunner().invoke(main_app, command, catch_exceptions=False)
    with pytest.raises(af.FileError, match="is not a corpus folder"):
        list(list_texts(tmp_path))


def test_pages_of_a_corpus_overwrite_their_own_alone(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    (tmp_path / "texts.csv").write_text('id,text\n1,the keys\n2,""\n3,the man\n4,the dogs\n')
    af.explain_corpus(tmp_path / "texts.csv", tmp_path / "out", methods=["rollout"])

    def write(folder: str, *options: str) -> str:
        command = ["corpus", "page", str(tmp_path / "out"), "--out", str(tmp_path / folder)]
        return CliRunner().invoke(main_app, [*command, *options], catch_exceptions=False).output

    told = write("pages")
    assert "1 of 4 texts without a result (1 " in told
    assert "1 of 4 texts without a result (1 " in (tmp_path / "pages" / "index.html").read_text()
    assert len(list((tmp_path / "pages" / "texts").iterdir())) == 3
    write("pages", "--limit", "1")
    assert len(list((tmp_path / "pages" / "texts").iterdir())) == 1
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("mine")
    with pytest.raises(af.OptionError, match=r"index\.html was not written by corpus page"):
        write("mine")
    assert (tmp_path / "mine" / "index.html").read_text() == "mine"
    with pytest.raises(af.OptionError, match=r"manifest\.json was not written by corpus page"):
        write("out")
    with pytest.raises(af.OptionError, match="--out must be a folder; got"):
        write("texts.csv")


# ---- in the browser -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        options = ["--no-sandbox", "--disable-background-networking"]
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        opened = running.chromium.launch(executable_path=chromium, args=options)
        yield opened
        opened.close()


def check_page(browser: Any, path: Path, width: int, scheme: str) -> Any:
    """Open a page: no error, nothing run, no overflow, nothing that axe objects to."""
    from axe_playwright_python.sync_playwright import Axe

    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.goto(path.as_uri())
    assert errors == []
    assert page.evaluate("window.attacked") is None
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert Axe().run(page).response["violations"] == []
    return page


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1000])
def test_two_explanations_stand_side_by_side(
    browser: Any, tmp_path: Path, width: int, scheme: str
) -> None:
    left = af.explain("the keys to the house", importance=())
    right = af.explain(f"the {HOSTILE} key to the old house", importance=())
    pair = af.compare(left, right, methods="rollout")
    page = check_page(browser, pair.save(tmp_path / "two.html"), width, scheme)
    assert page.inner_text("h1") == pair.summary()
    items = page.query_selector_all("#pairs li")
    assert len(items) == len(pair.pairs)
    shown = [cell.inner_text() for cell in page.query_selector_all("#table tbody td:nth-child(4)")]
    told = [float(cell.replace("−", "-")) for cell in shown if cell != "–"]
    expected = pair.difference[~np.isnan(pair.difference)]
    np.testing.assert_allclose(told, expected, atol=1e-3)
    page.click("#table th:nth-child(4) button")
    shown = [cell.inner_text() for cell in page.query_selector_all("#table tbody td:nth-child(4)")]
    told = [float(cell.replace("−", "-")) for cell in shown if cell != "–"]
    assert told == sorted(told)
    page.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_corpus_is_a_sortable_list_whose_texts_open(
    browser: Any, corpus: Path, tmp_path: Path, scheme: str
) -> None:
    from typer.testing import CliRunner

    command = ["corpus", "page", str(corpus), "--out", str(tmp_path / "pages")]
    assert CliRunner().invoke(main_app, command, catch_exceptions=False).exit_code == 0
    page = check_page(browser, tmp_path / "pages" / "index.html", 1000, scheme)
    rows = page.query_selector_all("#table tbody tr")
    assert len(rows) == 3
    assert "keys" in rows[0].inner_text()
    page.fill("#find", "dogs")
    assert len(page.query_selector_all("#table tbody tr")) == 1
    page.fill("#find", "")
    page.click("#table th:nth-child(5) button")
    chances = [
        float(cell.inner_text()) for cell in page.query_selector_all("#table td:nth-child(5)")
    ]
    assert chances == sorted(chances)
    page.click("#table tbody tr:last-child a")
    page.wait_for_load_state()
    assert "texts/" in page.url
    assert page.inner_text("#table tbody tr:first-child td").startswith("relevance flow, layer 6")
    page.click("#kicker a")
    page.wait_for_load_state()
    assert page.url.endswith("index.html")
    page.close()
