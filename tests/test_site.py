"""The front door: what the Markdown files say works, links lead somewhere, and the built site does in a real browser what it should."""
import functools, http.server, importlib.util, re, shutil, subprocess, sys, threading
from pathlib import Path
import pytest

root = Path(__file__).resolve().parent.parent
SITE = root/"_docs"


def links_of(text):
    return re.findall(r"(?<!`)\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_between_files_lead_somewhere(name):
    inside = [url.partition("#")[0] for url in links_of((root/name).read_text(encoding="utf-8")) if not re.match(r"\w+:", url)]
    assert not [url for url in inside if not (root/url).exists()]


def test_the_cells_of_contributing_run():
    from route_transport.controls import CONTROLS
    from route_transport.transport import TRANSPORTS
    cells = re.findall(r"^```python\n(.*?)^```", (root/"CONTRIBUTING.md").read_text(encoding="utf-8"), re.S | re.M)
    before = dict(TRANSPORTS), dict(CONTROLS)
    try: exec("\n".join(cells), {})
    finally:
        for registry, names in zip((TRANSPORTS, CONTROLS), before): registry.clear(); registry.update(names)
    assert len(cells) == 4


def test_the_link_check_finds_what_is_broken(tmp_path):
    (tmp_path/"index.html").write_text('<h1 id="top-of-it">A</h1><a href="other.html#there">x</a><a href="#top-of-it">y</a><a href="https://example.org/">z</a>')
    (tmp_path/"other.html").write_text('<p id="there">B</p><img src="pic.png">')
    (tmp_path/"pic.png").write_bytes(b"")
    check = lambda: subprocess.run([sys.executable, root/"docs"/"check_links.py", tmp_path], capture_output=True, text=True)
    whole = check()
    assert whole.returncode == 0 and "3 links inside" in whole.stdout, whole.stdout
    for broken, words in [('<a href="gone.html">', "no such file"), ('<a href="other.html#nowhere">', "no such anchor"), ('<img src="gone.png">', "no such file"),
                          ('<script src="https://cdn.example.org/m.js"></script>', "another server")]:
        (tmp_path/"third.html").write_text(broken)
        out = check()
        assert out.returncode == 1 and words in out.stdout and "third.html" in out.stdout


# In a browser: `make docs` first, and a chromium with its driver on the PATH (Debian: chromium chromium-driver)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MISSING = ("no chromium with its chromedriver on the PATH" if not (CHROMIUM and shutil.which("chromedriver")) else
           "selenium is not installed (extra docs)" if not importlib.util.find_spec("selenium") else
           "the site is not built (make docs)" if not (SITE/"index.html").exists() else
           "the site is older than the notebooks (make docs)" if max(p.stat().st_mtime for p in (root/"nbs").rglob("*.ipynb")) > (SITE/"index.html").stat().st_mtime else None)
in_browser = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

LOOK = """
const text = document.querySelector('article').cloneNode(true);
text.querySelectorAll('pre, code, mjx-container, script').forEach(e => e.remove());
const lum = c => { const [r, g, b] = c.map(v => (v /= 255) <= .03928 ? v/12.92 : ((v + .055)/1.055)**2.4); return .2126*r + .7152*g + .0722*b; };
const rgba = s => s.match(/[\\d.]+/g).map(Number);
const behind = e => { for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > .5) return c.slice(0, 3); } return [255, 255, 255]; };
const contrast = e => { const a = lum(rgba(getComputedStyle(e).color).slice(0, 3)), b = lum(behind(e)); return (Math.max(a, b) + .05)/(Math.min(a, b) + .05); };
const faint = [...document.querySelectorAll('article :is(p, li, td, th, h1, h2, h3, h4, a, code, summary), .highlight span[class], .cell_output pre, .sidebar-tree a, mjx-container')]
    .filter(e => e.innerText?.trim() || e.tagName == 'MJX-CONTAINER').map(e => [contrast(e), e.tagName + '.' + e.className, e.innerText?.slice(0, 30)]).filter(c => c[0] < arguments[0]);
return {raw: text.innerText.match(/\\$[^$\\n]+\\$|\\\\[(\\[]|\\\\(frac|sum|le|lambda)\\b/g),
        formulas: [document.querySelectorAll('.math.notranslate').length, document.querySelectorAll('.math.notranslate mjx-container').length],
        errors: document.querySelectorAll('[data-mjx-error], mjx-merror').length,
        pictures: [...document.images].filter(i => i.complete ? !i.naturalWidth : i.loading != 'lazy').map(i => i.src),
        abroad: performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith(location.origin) && !n.startsWith('data:')),
        faint: faint.slice(0, 5), ground: lum(behind(document.querySelector('article')))};
"""


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"): options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def site():
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=SITE))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def until(browser, script, seconds=20):
    from selenium.webdriver.support.ui import WebDriverWait
    return WebDriverWait(browser, seconds, 0.1).until(lambda b: b.execute_script(script))


def look_at(browser, width=1400, theme="light"):
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", dict(width=width, height=900, deviceScaleFactor=1, mobile=False))
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dict(features=[dict(name="prefers-color-scheme", value=theme)]))


def show(browser, url, width=1400):
    look_at(browser, width)
    browser.get(url)
    until(browser, "return document.readyState == 'complete' && (!document.querySelector('.math.notranslate') || (window.MathJax?.startup?.promise && (window.settled ??= !MathJax.startup.promise.then(() => window.settled = true))))")


def pages(): return sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html") if p.parent.name != "source")


@in_browser
def test_every_page_is_whole_and_legible(browser, site):
    for page in pages():
        show(browser, site + page)
        for theme in ("light", "dark"):
            look_at(browser, theme=theme)
            seen = browser.execute_script(LOOK, 4.5 if page != "search.html" else 3)
            assert not seen["raw"] and not seen["errors"] and seen["formulas"][0] == seen["formulas"][1], (page, theme, seen)
            assert seen["ground"] > .8 if theme == "light" else seen["ground"] < .1, (page, theme)
            assert not seen["pictures"] and not seen["abroad"] and not seen["faint"], (page, theme, seen)
        for width in (1400, 1100, 1000, 700, 390):
            look_at(browser, width)
            wide = browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{page} is {wide} pixels wider than a screen of {width}"
        assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"], page


@in_browser
def test_navigation_is_in_reading_order_and_leads_everywhere(browser, site):
    show(browser, site + "index.html")
    links = browser.execute_script("return [...document.querySelectorAll('.sidebar-tree a.reference')].map(a => [a.innerText, a.href])")
    numbers = [m[0] for text, _ in links if (m := re.match(r"\d+[a-z]?", text))]
    stems = sorted(p.stem for p in (root/"nbs").glob("[0-9]*.ipynb"))
    assert numbers == [re.match(r"\d+[a-z]?", stem)[0] for stem in stems]
    assert len(links) == len(stems) + len(list((root/"nbs").glob("*/*.ipynb"))) + 3        # and the glossary, the index of names, contributing
    for text, url in links:
        show(browser, url)
        assert browser.execute_script("return document.querySelector('article h1').innerText").rstrip("¶#\n ").replace("’", "'") in text


@in_browser
@pytest.mark.parametrize("words, page", [("mixing window", "score_decoherence"), ("critical_length", "far_mass"), ("Householder", "reflections"), ("parquet", "data")])
def test_search_finds_the_page(browser, site, words, page):
    show(browser, site + "index.html")
    box = browser.find_element("css selector", ".sidebar-search")
    box.send_keys(words)
    box.submit()
    until(browser, "return document.querySelectorAll('#search-results ul.search li a').length > 0")
    until(browser, "return !document.querySelector('#search-progress')?.innerText || /found|matching/i.test(document.querySelector('#search-results').innerText)")
    found = browser.execute_script("return [...document.querySelectorAll('#search-results ul.search > li > a')].slice(0, 4).map(a => a.getAttribute('href'))")
    assert any(page in url for url in found), found
    assert not re.search(r"\\[(\[]", browser.execute_script("return document.querySelector('#search-results').innerText"))      # no raw formula


@in_browser
def test_on_a_narrow_screen_the_menu_opens_and_answers_unfold(browser, site):
    show(browser, site + "far_mass.html", 390)
    left = "return document.querySelector('.sidebar-drawer').getBoundingClientRect().left"
    assert browser.execute_script(left) < 0
    browser.find_element("css selector", ".mobile-header label[for='__navigation']").click()
    until(browser, left + " >= 0")
    show(browser, site + "far_mass.html", 390)
    answer = browser.find_element("css selector", "details p")
    assert not answer.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", browser.find_element("css selector", "details"))
    browser.find_element("css selector", "details summary").click()
    assert answer.is_displayed() and answer.find_elements("css selector", "mjx-container")
