"""docs/licences.md has the licence of each locked package, as its metadata states it, and names all copyleft."""

from __future__ import annotations

import re
import runpy
import sysconfig
from pathlib import Path
from typing import Any

CONTAINERS = Path(__file__).parents[2] / "containers"
SCRIPT: dict[str, Any] = runpy.run_path(str(CONTAINERS / "licences.py"))
FOR_TESTS = {"browser", "clients", "docs", "verifiers"}
"""Locks of environments that run nothing but tests and the site of the documentation."""


def test_the_page_has_every_locked_package_with_the_licence_that_its_metadata_states():
    installed = SCRIPT["licences"]([sysconfig.get_path("purelib")])
    assert SCRIPT["PAGE"].read_text() == SCRIPT["page"](installed), "make licences"


def test_no_package_that_a_run_installs_has_a_licence_that_binds_whole_programs():
    page = SCRIPT["on_the_page"]()
    bound = {name for name, licence in page.items() if SCRIPT["STRONG"].search(licence)}
    assert {name for name in bound if not set(SCRIPT["locked"]()[name]) <= FOR_TESTS} == set()


def test_licences_that_bind_a_program_differ_from_those_that_bind_files():
    for licence in ("GPL-3.0-only", "GPL-3.0+", "AGPL-3.0-or-later", "GNU GPL", "SSPL-1.0", "MIT AND GPL-2.0-only"):
        assert SCRIPT["STRONG"].search(licence) and SCRIPT["COPYLEFT"].search(licence), licence
    for licence in ("LGPL-2.1-only", "MPL-2.0", "MPL-2.0 AND MIT"):
        assert not SCRIPT["STRONG"].search(licence) and SCRIPT["COPYLEFT"].search(licence), licence
    assert not [one for one in ("MIT", "Apache-2.0", "BSD", "PSF-2.0") if SCRIPT["COPYLEFT"].search(one)]


def test_every_library_in_a_page_of_a_run_has_its_licence_beside_it_and_in_the_metadata():
    folder = CONTAINERS.parent / "launcher" / "report" / "page" / "vendor"
    named = re.findall(r"vendor/(\w+)\.LICENSE", (CONTAINERS.parent / "pyproject.toml").read_text())
    assert {file.name.partition(".")[0] for file in folder.iterdir()} == set(named)
