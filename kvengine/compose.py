"""Where the configuration lies, and its composition into plain containers."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from kvengine.core.errors import ConfigError
from kvengine.overrides import expand, key_of

CONFIG_NAME = "config"
CONF_ENTRY_POINT_GROUP = "kvengine.conf"


def checkout() -> Path | None:
    """The root of the checkout that kvengine runs from, None when it is installed from a wheel."""
    root = Path(__file__).resolve().parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "conf").is_dir() else None


def conf_dir() -> Path:
    """The folder of YAML files: conf/ in a checkout, kvengine/conf in an installed wheel."""
    root = checkout()
    return root / "conf" if root else Path(__file__).resolve().parent / "conf"


def settings_file(kind: str, name: str) -> str:
    """The YAML of one choice, comments included, wherever Hydra finds it; ConfigError when there is none."""
    folders = [conf_dir()]
    for point in importlib.metadata.entry_points(group=CONF_ENTRY_POINT_GROUP):
        spec = importlib.util.find_spec(point.value)
        folders += [Path(where) for where in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        file = folder / kind / f"{name}.yaml"
        if file.is_file():
            return file.read_text(encoding="utf-8").rstrip()
    raise ConfigError(kind, name, "its package brings no YAML of its settings (entry point kvengine.conf)")


class ThirdPartyConf(SearchPathPlugin):
    """Adds the config packages that other distributions name in the entry point group `kvengine.conf`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for point in importlib.metadata.entry_points(group=CONF_ENTRY_POINT_GROUP):
            search_path.append(provider=point.name, path=f"pkg://{point.value}")


def register_third_party_conf() -> None:
    """Make Hydra find other packages' choices; safe to call again."""
    Plugins.instance().register(ThirdPartyConf)


@contextmanager
def composer() -> Iterator[Any]:
    """A function from a list of overrides to the composed configuration as plain containers."""
    register_third_party_conf()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield lambda overrides: plain(compose(CONFIG_NAME, list(overrides)))


def plain(config: DictConfig) -> dict[str, Any]:
    """OmegaConf ends here: resolved, with missing values an error."""
    content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def sweep_axes(overrides: list[str]) -> list[str]:
    """What the composed configuration sweeps over by itself (hydra.sweeper.params, as experiments set it), less
    what `overrides` set. Needs an open composer."""
    if not any(key_of(word) == "experiment" for word in overrides):
        return []  # composing once more would cost every run of another kind its start-up
    first = variants(overrides)[0]
    params = compose(CONFIG_NAME, first, return_hydra_config=True).hydra.sweeper.params or {}
    set_already = {key_of(word) for word in overrides}
    return expand(f"{key}={value}" for key, value in params.items() if key not in set_already)


def variants(overrides: list[str]) -> list[list[str]]:
    """The runs that a sweep over `overrides` consists of (only for the basic sweeper's a,b and choice, range)."""
    loader = GlobalHydra.instance().config_loader()  # of the composer that is open; glob(*) needs it
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
    axes = []
    for word, override in zip(overrides, parsed, strict=True):
        if override.is_sweep_override() and override.is_discrete_sweep():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        elif override.is_sweep_override():
            problem = (
                "is no list of values, which is what the basic sweeper needs: a,b or choice() or range()"
            )
            raise ConfigError(str(override.key_or_group), word.partition("=")[2], problem)
        else:
            axes.append([word])
    return [list(combination) for combination in itertools.product(*axes)]
