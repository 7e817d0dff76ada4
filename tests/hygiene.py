"""Does the package equal its notebooks? Run by `make check`, on a committed tree.

Exports into an emptied package folder and cleans the notebooks, then asks git what changed. Also refuses two
notebooks that export the same module: nbdev would lose the first without a word.
"""
import json, re, shutil, subprocess, sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
run = lambda *cmd: subprocess.run(cmd, cwd=root, check=True, capture_output=True, text=True).stdout


def default_exps(nb: Path):
    cells = json.loads(nb.read_text(encoding="utf-8"))["cells"]
    return re.findall(r"^#\|\s*default_exp\s+(\S+)", "\n".join("".join(c["source"]) for c in cells), re.M)


def duplicates():
    seen = {}
    for nb in sorted((root / "nbs").rglob("*.ipynb")):
        for module in default_exps(nb): seen.setdefault(module, []).append(nb.name)
    return [f"module {m} is exported by {' and '.join(nbs)}" for m, nbs in seen.items() if len(nbs) > 1]


def stale_readme():
    done = subprocess.run([sys.executable, "docs/readme.py", "--check"], cwd=root, capture_output=True, text=True)
    return [done.stderr.strip()] if done.returncode else []


def drift():
    before = run("git", "status", "--porcelain")
    if before: return ["commit first, then check; not committed:\n" + before]
    shutil.rmtree(root / "route_transport")
    run(sys.executable, "-c", "from nbdev.doclinks import nbdev_export; nbdev_export()")
    run(sys.executable, "-c", "from nbdev.clean import nbdev_clean; nbdev_clean()")
    changed = run("git", "status", "--porcelain")
    return [f"the package or the notebooks are not what nbdev makes of the notebooks:\n{changed}{run('git', 'diff', '--stat')}"] if changed else []


if __name__ == "__main__":
    faults = duplicates() + stale_readme() + drift()
    print("\n".join(faults) or "the package and the README equal the notebooks")
    sys.exit(bool(faults))
