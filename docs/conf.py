"""Sphinx's configuration; `docs/site.py` calls it."""
import importlib.util, os, sys
from pathlib import Path
from html import escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx.util.fileutil import copy_asset_file
from nbdev.config import get_config

root = Path(__file__).resolve().parent.parent
cfg = get_config(path=root)
project, author, release = cfg.title, cfg.author, cfg.version
project_copyright = f"2026 onwards, {author}"
extensions = ["myst_nb", "sphinx.ext.mathjax", "sphinx.ext.githubpages"]
exclude_patterns = ["html", "doctrees"]

nb_execution_mode = "off"                      # the committed outputs are shown
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline", "attrs_block", "colon_fence"]
myst_heading_anchors = 5
sys.path.insert(0, str(root/"docs"))

MATHJAX = Path(importlib.util.find_spec("sphinx-mathjax-offline").origin).parent/"static"/"mathjax"/"tex-svg.js"   # MathJax 3.2.2 in one file
mathjax_path = "mathjax/tex-svg.js"
mathjax3_config = {"svg": {"fontCache": "global"}, "options": {"enableMenu": False}}

html_theme = "furo"
html_title = cfg.title
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_js_files = ["search.js"]
html_use_index = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fa8", "color-brand-content": "#1f5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7db4ee", "color-brand-content": "#7db4ee"},
}


def source_pages(app):
    "One page of highlighted source a module, a line an anchor."
    formatter = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    for path in sorted(cfg.lib_path.glob("[!_]*.py")):
        body = highlight(path.read_text(encoding="utf-8"), PythonLexer(), formatter)
        where = f'<p class="tools">Exported from the notebooks; <a href="{cfg.git_url}/blob/{cfg.branch}/{cfg.lib_path.name}/{path.name}">at the repository</a></p>'
        yield f"source/{path.stem}", {"title": f"Source of {path.stem}", "body": f"<h1>{cfg.lib_path.name}/{escape(path.name)}</h1>{where}{body}", "parents": []}, "page.html"


def copy_mathjax(app, exception):
    if exception is None:
        (Path(app.outdir)/"_static"/"mathjax").mkdir(parents=True, exist_ok=True)
        copy_asset_file(MATHJAX, Path(app.outdir)/"_static"/"mathjax")


def setup(app):
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", copy_mathjax)
