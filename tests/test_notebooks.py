"""Every notebook is a test: it is executed from top to bottom, and what it asserts must hold.

One that is too slow for that says `skip_exec: true` in its front matter, and is skipped by name.
"""
import os
from pathlib import Path
import pytest
from fastcore.utils import str2bool
from nbdev.doclinks import nbglob
from nbdev.frontmatter import FrontmatterProc
from nbdev.process import NBProcessor
from nbdev.test import test_nb as run_notebook   # under another name, or pytest would collect it

NOTEBOOKS = sorted(map(Path, nbglob()))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(notebook):
    front_matter = NBProcessor(notebook, procs=FrontmatterProc, process=True).nb.frontmatter_
    if str2bool(front_matter.get("skip_exec", False)): pytest.skip("skip_exec in its front matter")
    here = os.getcwd()
    try: ok, _ = run_notebook(notebook, basepath=notebook.parent)
    finally: os.chdir(here)
    assert ok, f"{notebook.name} failed: its traceback is above"


def test_there_are_notebooks():
    assert {"nbs", "tutorials"} <= {path.parent.name for path in NOTEBOOKS}
