"""Does every link of the built site lead somewhere? `python docs/check_links.py [folder]`, by default `_docs`.

Internal links and anchors must exist. Nothing that a page loads (script, style, picture, font) may come from another server,
so that the site works without a network. Links to other sites are counted, not followed.
"""
import re, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src"), ("image", "href"), ("object", "data")}
NO_LOAD = {"canonical", "next", "prev", "index", "search", "edit", "author"}       # <link rel=…> that only names a page


class Page(HTMLParser):
    "Anchors of a page, and what it points to."
    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links = {"", "top"}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs[key] for key in ("id", "name") if attrs.get(key)}
        for key in ("href", "src", "data", "xlink:href"):
            if attrs.get(key) is not None: self.links.append((tag, key.removeprefix("xlink:"), attrs[key], set((attrs.get("rel") or "").split())))

    handle_startendtag = handle_starttag


def faults_of(site: Path):
    "All that is wrong with the links of a site, a line each; and how many links were looked at."
    pages = {p: Page(p) for p in sorted(site.rglob("*.html"))}
    if not pages: return [f"{site}: no page there"], 0, 0
    faults, inside, abroad = [], 0, 0
    for path, page in pages.items():
        for tag, key, url, rel in page.links:
            parts, where = urlsplit(url), f"{path.relative_to(site)}: <{tag} {key}={url!r}>"
            if parts.scheme == "data": continue
            if parts.scheme or parts.netloc:
                abroad += 1
                if (tag, key) in LOADS and not rel & NO_LOAD: faults.append(f"{where} is loaded from another server")
                continue
            inside += 1
            at = (path.parent/unquote(parts.path)).resolve() if parts.path else path
            if at.is_dir(): at /= "index.html"
            if not at.is_relative_to(site) or not at.exists(): faults.append(f"{where}: no such file")
            elif at in pages and unquote(parts.fragment) not in pages[at].ids: faults.append(f"{where}: no such anchor")
    for style in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import\s+)[\"']?(\w+:)?//[^)\"';]+", style.read_text(encoding="utf-8")): faults.append(f"{style.relative_to(site)}: loads from another server")
    return faults, inside, abroad


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent/"_docs").resolve()
    faults, inside, abroad = faults_of(site)
    print("\n".join(faults) or f"{inside} links inside the site all lead somewhere; {abroad} lead elsewhere")
    sys.exit(bool(faults))
