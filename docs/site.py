"""Build the site from the notebooks: `python docs/site.py` (`make docs`). No Quarto and no network.

nbdev's processors read the directives, this script writes what they leave as MyST notebooks into `_proc/`, and Sphinx makes
`_docs/` of them; its warnings are errors. Outputs are the committed ones. As in nbdev, a page is named after its notebook
without the number, and a new notebook takes its place in the navigation by its number.
"""
import functools, importlib, inspect, itertools, os, posixpath, re, shutil, subprocess, sys
from dataclasses import dataclass
from pathlib import Path
os.environ["IN_TEST"] = "1"                                     # nbdev: import modules, export nothing
import nbformat
from execnb.nbio import read_nb
from fastcore.docments import DocmentTbl
from nbdev.config import get_config
from nbdev.doclinks import _nbpath2html, nbglob
from nbdev.processors import FilterDefaults, add_show_docs, filter_stream_, hide_line, populate_language, rm_header_dash, strip_ansi, strip_hidden_metadata

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))                                   # this tree's package, wherever another is installed
PROC, SITE, CONTRIBUTING = root/"_proc", root/"_docs", root/"CONTRIBUTING.md"
cfg = get_config(path=root)
COLAB = "https://colab.research.google.com/github"


class Kept(FilterDefaults):
    "nbdev's processors without those that run cells or take exported source away: here the source is what one reads."
    def base_procs(self): return [populate_language, add_show_docs, strip_ansi, hide_line, filter_stream_, rm_header_dash, strip_hidden_metadata]

@dataclass
class Chapter:
    "A notebook, the page it becomes, and the module it exports."
    path: Path

    def __post_init__(self):
        self.nb = read_nb(self.path)
        self.source = "\n".join(c.source for c in self.nb.cells)
        self.page = _nbpath2html(self.path.relative_to(root/"nbs")).with_suffix("").as_posix()
        exports = re.search(r"^#\|\s*default_exp\s+(\S+)", self.source, re.M)
        self.module = importlib.import_module(f"{cfg.lib_path.name}.{exports[1]}") if exports else None
        Kept()(self.nb)
        self.nb.cells = in_order(self.nb.cells)
        self.names = [shown[1] for c in self.nb.cells if (shown := documented(c))]
        self.names = [name for name in self.names if self.find(name).__doc__]                  # helpers without a word of their own are source only
        self.title = (re.search(r"^# (.+)$", "\n".join(c.source for c in self.nb.cells if c.cell_type == "markdown"), re.M) or sys.exit(f"{self.path.name} has no H1"))[1]

    def find(self, name):
        "The object called `name` in the chapter's module."
        return functools.reduce(getattr, name.split("."), self.module)

    @property
    def number(self):
        "`00a` of `00a_utils.ipynb`: chapters are spoken of by number."
        found = re.match(r"\d+[a-z]?(?=_)", self.path.name)
        return found[0] + " " if found and self.path.parent.name == "nbs" else ""

    @property
    def part(self):
        "What the chapter stands under in the navigation."
        if self.path.parent.name != "nbs": return self.path.parent.name.capitalize()
        return "Reference" if not self.number else "Transports and theory" if int(self.number[:2]) <= 3 else "Model and experiment"

def documented(cell):
    "The match of a `show_doc` cell, its name as group 1."
    return re.match(r"(?:#\|.*\n)*show_doc\(([\w.]+)", cell.source or "") if cell.cell_type == "code" else None

def in_order(cells):
    "nbdev documents the names of a cell from the last to the first; from the first to the last reads better."
    runs = [list(run) for _, run in itertools.groupby(cells, key=lambda c: bool(documented(c)))]
    return [c for run in runs for c in (reversed(run) if documented(run[0]) else run)]

def between(page, target): return posixpath.relpath(target, posixpath.dirname(page) or ".")


# Links

BADGE = r"^\[!\[[^\]]*\]\(\S*colab-badge\S*\)\]\(\S*\).*$"   # a picture on another server; each page has a link of its own
FENCED, LINK = r"^```.*?^```", r"!?\[(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*\]\([^)\s]+\)"

def outside(kept, pattern, change, text):
    "`re.sub`, but not inside what matches `kept`."
    parts = re.split(f"({kept})", text, flags=re.S | re.M)
    return "".join(p if k % 2 else re.sub(pattern, change, p) for k, p in enumerate(parts))

def relinked(text, path, page, pages):
    "Links beside the file become links between pages, pictures are copied, other files of the project are at the repository."
    def target(m):
        label, (url, _, anchor) = m[1], m[2].partition("#")
        if not url or re.match(r"[a-z]+:", url): return m[0]
        at = (path.parent/url).resolve()
        if not at.exists() or not at.is_relative_to(root): sys.exit(f"{path.name}: there is no {m[2]}")
        rel = at.relative_to(root).as_posix()
        if at in pages: new = between(page, pages[at])
        elif label.startswith("!"):
            copy = "images/" + rel.replace("/", "-")
            (PROC/"images").mkdir(parents=True, exist_ok=True)
            shutil.copy(at, PROC/copy)
            new = between(page, copy)
        else: new = f"{cfg.git_url}/{'tree' if at.is_dir() else 'blob'}/{cfg.branch}/{rel}"
        return f"{label}({new}{'#' + anchor if anchor else ''})"
    return outside(FENCED, r"(!?\[(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*\])\(([^)\s]+)\)", target, text)

def names_linked(text, page, symbols):
    "Names in backticks become links to where they are told, as nbdev does; not in fences, headings, mathematics and links."
    def link(m):
        at = symbols.get(m[1].removesuffix("()"))
        return f"[`{m[1]}`]({between(page, at[0] + '.ipynb')}#{at[1]})" if at else m[0]
    return outside(rf"{FENCED}|^#[^\n]*$|{LINK}|\$\$.*?\$\$", r"(?<!`)`([^`\s]+)`(?!`)", link, text)

def all_symbols(chapters):
    "Name → page and anchor, for every name that a page documents; a method is with its class."
    where = {}
    for chapter in chapters:
        for name in chapter.names:
            at = where.setdefault(name, (chapter.page, name.lower()))
            if inspect.isclass(obj := getattr(chapter.module, name, None)): where.update({f"{name}.{n}": at for n in vars(obj) if n[0] != "_"})
    return where


# The reference: what fastcore's docments know of a symbol

def plain(text):
    "A docstring or comment as Markdown that shows what it says: code stays code, nothing else is markup."
    return outside("`[^`]+`", r"([*_<$\[\]|~^])", r"\\\1", " ".join(str(text).split()))

def code(text): return "`" + str(text).replace("|", "\\|") + "`"

def default_of(value): return getattr(value, "__name__", None) or ("…" if "<" in repr(value) else repr(value))

def signature_of(f):
    "Names and defaults; types and meanings have the table."
    try: params = [p for p in inspect.signature(f).parameters.values() if p.name not in ("self", *("args", "kwargs")*inspect.isclass(f))]
    except (TypeError, ValueError): params = []
    default = lambda p: "" if p.default is p.empty else "=" + default_of(p.default)
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return "(" + ", ".join(star.get(p.kind, "") + p.name + default(p) for p in params) + ")"

class Table(DocmentTbl):
    "fastcore's table of parameters, with code as code."
    _map = {"anno": "type", "default": "default", "docment": "meaning"}
    @property
    def _hdr_list(self): return ["parameter", *self._columns.values()]

    def _row(self, nm, props):
        def cell(column):
            value = props[column]
            if value is inspect._empty or column == "anno" and value is type(None): return ""
            if column == "docment": return plain(value)
            if column == "default": return code(default_of(value))
            return code(value if isinstance(value, str) else re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(value)))
        return [code(nm)] + [cell(c) for c in self._columns]

    @property
    def return_str(self): return "| *returns* | " + " | ".join(self._row("", self.dm["return"])[1:]) + " |"

def table_of(obj):
    "Its table; a module that only an annotation names is imported first."
    try: return str(Table(obj))
    except NameError as e:
        sys.modules[obj.__module__].__dict__[e.name] = importlib.import_module(e.name)
        return table_of(obj)

def methods_of(cls):
    "Public methods of the class itself that say what they do."
    return [(n, m) for n, m in ((n, getattr(m, "__func__", m)) for n, m in vars(cls).items()) if inspect.isfunction(m) and n[0] != "_" and m.__doc__]

def reference(name, chapter, level):
    "Heading, signature with a link to its source, docstring, parameters, methods: one symbol as MyST."
    obj, module = chapter.find(name), chapter.module.__name__.rpartition(".")[2]
    inner = inspect.unwrap(obj)
    line = inspect.getsourcelines(inner)[1]
    body = [f'`{name}{signature_of(inner)}` <a class="source" href="{between(chapter.page, f"source/{module}.html")}#L-{line}">source</a>',
            plain(obj.__doc__), table_of(inner)]
    if inspect.isclass(obj) and (methods := methods_of(obj)):
        body.append("| method | what it does |\n| --- | --- |\n" + "\n".join(f"| {code(n + signature_of(m))} | {plain(m.__doc__)} |" for n, m in methods))
    return f"{'#'*level} {name}\n\n:::{{container}} api\n" + "\n\n".join(filter(None, body)) + "\n:::"


# Pages

def opening(chapter, text):
    "The H1, the `>` line under it, where to read or run the notebook, and what follows."
    subtitle = re.search(r"^> .+(?:\n> .+)*", text, re.M)
    rest = text.replace(f"# {chapter.title}", "", 1).replace(subtitle[0] if subtitle else "", "", 1)
    rest = re.sub(r"\A(\s*^- \w+: .*$)+", "", rest, flags=re.M)                     # front matter as nbdev also takes it: a list under the title
    at = f"{cfg.user}/{cfg.repo}/blob/{cfg.branch}/{chapter.path.relative_to(root).as_posix()}"
    tools = f'<p class="tools"><a href="https://github.com/{at}">Notebook</a> · <a href="{COLAB}/{at}">Open in Colab</a></p>'
    return "\n\n".join(filter(None, [f"# {chapter.title}", "{.subtitle}\n" + re.sub(r"^> ", "", subtitle[0], flags=re.M) if subtitle else "", tools, rest.strip()]))

def converted(chapter, pages, symbols):
    "The chapter as a MyST notebook."
    cells, level, opened = [], 1, False
    for cell in chapter.nb.cells:
        directives, text = getattr(cell, "directives_", None) or {}, cell.source or ""
        if cell.cell_type == "markdown": text = re.sub(BADGE, "", text, flags=re.M)
        if cell.cell_type == "markdown" and text.strip():
            if not opened: text, opened = opening(chapter, text), True
            for hashes in re.findall(r"^(#+) ", re.sub(FENCED, "", text, flags=re.S | re.M), re.M): level = len(hashes)
            cells.append(nbformat.v4.new_markdown_cell(names_linked(relinked(text, chapter.path, chapter.page, pages), chapter.page, symbols)))
        elif shown := documented(cell):
            if shown[1] in chapter.names: cells.append(nbformat.v4.new_markdown_cell(reference(shown[1], chapter, level + 1)))
        elif cell.cell_type == "code" and not {"hide", "default_exp", "exporti"} & set(directives) and directives.get("include:") != ["false"]:
            tags = [tag for key, tag in (("echo:", "remove-input"), ("output:", "remove-output")) if directives.get(key) == ["false"]]
            text = re.sub(r"^#\|.*\n?", "", text, flags=re.M).strip()
            alt = "; ".join(re.findall(r'title=r?f?"([^"]+)"', text)) or "; ".join(re.findall(r"(\w+)_figure\(", text)) or "Figure"   # for those who cannot see it
            if text: cells.append(nbformat.v4.new_code_cell(text, outputs=[nbformat.from_dict(o) for o in cell.get("outputs", [])],
                                                            metadata=dict(tags=tags, mystnb=dict(image=dict(alt=alt)))))
    return nbformat.v4.new_notebook(cells=cells, metadata=dict(kernelspec=dict(name="python3", display_name="Python 3", language="python"), language_info=dict(name="python")))

def toctree(chapters):
    "The navigation: parts in reading order, as hidden cells at the end of the front page."
    parts = {"Transports and theory": [], "Model and experiment": [], "Tutorials": [], "Reference": []}
    for c in chapters: parts.setdefault(c.part, []).append(f"{c.number}{c.title} <{c.page}>")
    parts["Reference"] += ["Index of names <names>", "Contributing <contributing>"]
    return [nbformat.v4.new_markdown_cell(f"```{{toctree}}\n:hidden:\n:caption: {part}\n\n" + "\n".join(entries) + "\n```") for part, entries in parts.items() if entries]

def names_page(chapters):
    "Every documented name with its first line, by module."
    out = ["# Index of names", "{.subtitle}\nWhat each module of `route_transport` exports, and where it is told"]
    for c in chapters:
        rows = [f"| [`{n}`]({c.page}.ipynb#{n.lower()}) | {plain(c.find(n).__doc__)} |" for n in c.names if "." not in n]
        if rows: out.append(f"## {c.module.__name__}\n\n| name | what it is |\n| --- | --- |\n" + "\n".join(sorted(rows, key=str.lower)))
    return "\n\n".join(out) + "\n"

def main():
    shutil.rmtree(PROC, ignore_errors=True)
    chapters = [Chapter(p) for p in sorted(p.resolve() for p in nbglob(root/"nbs", as_path=True))]
    pages, symbols = {c.path: f"{c.page}.ipynb" for c in chapters} | {CONTRIBUTING: "contributing.md"}, all_symbols(chapters)
    if len(set(pages.values())) < len(pages): sys.exit(f"two notebooks make one page: {sorted(pages.values())}")
    for c in chapters:
        nb = converted(c, pages, symbols)
        if c.page == "index": nb.cells += toctree([c for c in chapters if c.page != "index"])
        (PROC/c.page).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, PROC/f"{c.page}.ipynb")
    (PROC/"contributing.md").write_text(names_linked(relinked(CONTRIBUTING.read_text(encoding="utf-8"), CONTRIBUTING, "contributing", pages), "contributing", symbols), encoding="utf-8")
    (PROC/"names.md").write_text(names_page(chapters), encoding="utf-8")
    building = PROC/"html"
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", root/"docs", "-d", PROC/"doctrees", PROC, building])
    if done.returncode: sys.exit(done.returncode)
    shutil.rmtree(SITE, ignore_errors=True)
    building.rename(SITE)
    print(f"{SITE.name}/index.html and {len(chapters)} more pages")


if __name__ == "__main__": main()
