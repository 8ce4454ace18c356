"""Keys of trackers: missing packages are refused, and so are addresses with secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import TRACKERS
from megatron_rl.rank.metrics.trackers import mirror
from megatron_rl.rank.metrics.trackers.mirror import check_installed
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.extras import requirements
from megatron_rl.recipe.logs import LoggingConfig
from megatron_rl.recipe.trackers import PACKAGES

SECTIONS = {"wandb": {"project": "p"}, "mlflow": {"experiment": "e"}, "trackio": {"project": "p"}}


@pytest.mark.parametrize("name", TRACKERS)
def test_recipe_with_a_tracker_is_refused_if_its_package_is_not_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoggingConfig.model_validate({name: SECTIONS[name]})
    monkeypatch.setattr(mirror, "is_installed", lambda package: package != PACKAGES[name])
    check_installed(LoggingConfig())
    with pytest.raises(
        ConfigurationError, match=rf"logging.{name}: .*pip install .*{name}.*set logging.{name} to null"
    ):
        check_installed(config)
    monkeypatch.setattr(mirror, "is_installed", lambda package: package == PACKAGES[name])
    check_installed(config)


@pytest.mark.parametrize(
    "section",
    [
        "mlflow: {experiment: e, uri: 'https://me:hunter2@mlflow'}",
        "trackio: {project: p, server: 'http://a:7860/?write_token=hunter2'}",
    ],
)
def test_address_with_a_secret_is_refused_without_showing_it(section: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: demo\nlogging:\n  {section}\n")
    with pytest.raises(BadInput, match="holds a password or token") as refused:
        load_recipe(str(path))
    assert "hunter2" not in str(refused.value)


def test_each_tracker_has_its_package_in_the_extra_of_its_name() -> None:
    if not requirements("mlflow"):
        pytest.skip("this environment was installed from an older pyproject.toml: pip install --no-deps -e .")
    for name, package in PACKAGES.items():
        assert any(one.startswith(f"{package}>=") for one in requirements(name))
