"""Installs the package from settings.ini, the one place for its metadata (nbdev 2's layout)."""
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]
scripts = [line.strip() for line in cfg.get("console_scripts", "").splitlines() if line.strip()]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    license="Apache-2.0",
    keywords=cfg["keywords"],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=[cfg["lib_path"], cfg["lib_path"] + ".*"]),
    install_requires=cfg["requirements"].split(),
    extras_require={key.removesuffix("_requirements"): cfg[key].split() for key in cfg if key.endswith("_requirements")},
    entry_points={"console_scripts": scripts, "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    classifiers=["Development Status :: 3 - Alpha", "Intended Audience :: Science/Research",
                 "Programming Language :: Python :: 3", "Topic :: Scientific/Engineering :: Artificial Intelligence"],
    zip_safe=False,
)
