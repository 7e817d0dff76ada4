"""Every notebook is a test: it is executed from top to bottom, and what it asserts must hold."""
import os
from pathlib import Path
import pytest
from nbdev.doclinks import nbglob
from nbdev.test import test_nb as run_notebook   # under another name, or pytest would collect it

NOTEBOOKS = sorted(map(Path, nbglob()))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(notebook):
    here = os.getcwd()
    try: ok, _ = run_notebook(notebook, basepath=notebook.parent)
    finally: os.chdir(here)
    assert ok, f"{notebook.name} failed: its traceback is above"


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2
