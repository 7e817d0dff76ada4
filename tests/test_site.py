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
    from route_transport.attention import CONTROLS
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
