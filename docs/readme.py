"""Make README.md from nbs/index.ipynb: `python docs/readme.py`, or `--check` to fail where they differ."""
import json, re, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent


def cell_text(cell) -> str:
    source = "".join(cell["source"])
    directives = re.findall(r"^#\|\s*(.+?)\s*$", source, re.M)
    if "hide" in directives: return ""
    if cell["cell_type"] == "markdown": return source
    code = re.sub(r"^#\|.*\n?", "", source, flags=re.M).strip()
    parts = [] if "echo: false" in directives else [f"```python\n{code}\n```"]
    for out in cell["outputs"]:
        data = out.get("data", {})
        if "text/markdown" in data: parts.append("".join(data["text/markdown"]).strip())
        elif text := "".join(data.get("text/plain", out.get("text", []))).strip(): parts.append(f"```\n{text}\n```")
    return "\n\n".join(parts)


def readme() -> str:
    cells = json.loads((root / "nbs" / "index.ipynb").read_text(encoding="utf-8"))["cells"]
    text = "<!-- Made from nbs/index.ipynb by docs/readme.py: edit the notebook. -->\n\n" + "\n\n".join(filter(None, map(cell_text, cells))) + "\n"
    text = re.sub(r"\]\((?!https?:|\.\./)([\w./-]+\.ipynb)", r"](nbs/\1", text)   # links beside the notebook
    return text.replace("](../", "](")                                           # links to the rest of the project


if __name__ == "__main__":
    path = root / "README.md"
    if "--check" in sys.argv:
        if path.read_text(encoding="utf-8") != readme(): sys.exit("README.md is not what docs/readme.py makes of nbs/index.ipynb")
    else: path.write_text(readme(), encoding="utf-8")
