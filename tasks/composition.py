"""One job's overrides -> one composed configuration, with every mistake as one clear line.

Hydra composes; around it stand the checks that it lacks. A value override works for any key,
with or without plus signs, because the typed conversion that follows refuses unknown keys
wherever they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.utils import JobRuntime, setup_globals
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accel.errors import ConfigError
from accel.near_match import suggestion
from tasks.yaml_source import COMMAND_LINE, Written, scan

# Hydra instantiates these by name; nothing else in a configuration may name code.
_TRUSTED_TARGETS = ("hydra._internal.", "hydra_plugins.", "optuna.samplers.")
# Options that come with a package of their own.
_PACKAGES = {
    "hydra/launcher": {
        "joblib": "hydra-joblib-launcher",
        "submitit_local": "hydra-submitit-launcher",
        "submitit_slurm": "hydra-submitit-launcher",
        "ray": "hydra-ray-launcher",
    },
    "hydra/sweeper": {"optuna": "hydra-optuna-sweeper"},
}


@dataclass(frozen=True)
class Composed:
    """tree: resolved plain configuration without the `hydra` node. source: how it was written.

    overrides: what Hydra accepts for the same configuration. cfg: as Hydra composed it.
    """

    tree: dict[str, Any]
    source: dict[str, Written]
    overrides: tuple[str, ...]
    cfg: DictConfig


class Composer:
    """Composes configurations from a folder of YAML files.

    extra_dir: a user's folder, searched before `config_dir` (`--config-dir`).
    """

    def __init__(
        self, config_dir: Path, *, config_name: str = "config", extra_dir: Path | None = None
    ) -> None:
        version.setbase("1.3")
        setup_globals()
        JobRuntime.instance().set("name", "run")
        search = create_config_search_path(str(config_dir.resolve()))
        if extra_dir is not None:
            if not extra_dir.is_dir():
                raise ConfigError(f"--config-dir: '{extra_dir}' is not a folder.")
            path = f"file://{extra_dir.resolve()}"
            search.prepend(provider="command-line", path=path, anchor=SearchPathQuery(provider="schema"))
        self._loader = ConfigLoaderImpl(search)
        self._config_name = config_name
        self._default_choices = self._choices()
        self._scanned: dict[tuple[str, ...], dict[str, Written]] = {}

    def parse(self, texts: Sequence[str]) -> list[Override]:
        """Overrides as Hydra understands them. Raises: ConfigError quoting the one it can't read."""
        parser = OverridesParser.create(config_loader=self._loader)
        return [self._parse_one(parser, text) for text in texts]

    def compose(self, texts: Sequence[str]) -> Composed:
        """Compose one job. Raises: ConfigError."""
        overrides = self.parse(texts)
        for override in overrides:
            if override.is_sweep_override():
                key, _, value = str(override.input_line).partition("=")
                raise ConfigError(
                    f"'{key}={value}' lists several values. Add -m for a sweep, or quote one value: "
                    f"{_as_typed(key, value)}"
                )
        try:
            return self._compose(overrides)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
            raise ConfigError(self._one_line(error)) from error

    def unreached(self, overrides: Sequence[Override]) -> list[str]:
        """Keys of overrides that only options of swept groups have.

        Before the first job Hydra composes a sweep with the default option of each swept group.
        """
        groups = [override for override in overrides if self._is_group(override)]
        source = self._scan(tuple(self._choice(group) for group in groups if not group.is_sweep_override()))
        keys = [override.key_or_group for override in overrides if override not in groups]
        return [key for key in keys if not key.startswith("hydra.") and key not in source]

    def _compose(self, overrides: list[Override]) -> Composed:
        choices = {id(o): self._choice(o) for o in overrides if self._is_group(o)}
        source = dict(self._scan(tuple(choices.values())))
        texts = [choices.get(id(o)) or _reachable(o, source) for o in overrides]
        cfg = self._loader.load_configuration(self._config_name, texts, RunMode.RUN)
        _refuse_foreign_targets(OmegaConf.to_container(cfg.hydra, resolve=False), "hydra")
        for override in overrides:
            if id(override) not in choices and not override.is_delete():
                source |= _written(override)
        return Composed(plain_tree(cfg), source, tuple(texts), cfg)

    def _parse_one(self, parser: OverridesParser, text: str) -> Override:
        key, equals, value = text.partition("=")
        if equals and not key.strip("+~ "):
            raise ConfigError(f"'{text}' names nothing. Write key=value or group=option.")
        if "+" in key.lstrip("+"):
            raise ConfigError(
                f"'{text}': no key or group name with '+' inside can be given on the command line. "
                "If a folder of yours has such a name, rename it, e.g. with '_'."
            )
        if value.startswith("~/") and "," not in value:
            text = f"{key}={quoted(value)}"  # a path in the home folder, which Hydra can't read bare
        try:
            override = parser.parse_override(text)
            override.config_loader = self._loader  # which knows the options that glob(...) chooses from
            return override
        except HydraException as error:
            if not equals:
                raise ConfigError(f"'{text}' is not an override. Write key=value or group=option.") from error
            raise ConfigError(f"can't read '{text}'. Quote the value: {_as_typed(key, value)}") from error

    def _is_group(self, override: Override) -> bool:
        group = override.key_or_group
        if self._options(group):
            return True
        if "/" in group:
            raise ConfigError(f"no config group '{group}'{suggestion(group, sorted(self._default_choices))}")
        return False

    def _choice(self, override: Override) -> str:
        """The text of a group override, sure to name an option that exists."""
        group, text, value = override.key_or_group, str(override.input_line), override.value()
        if override.is_delete() or isinstance(value, list):
            return text
        options = self._options(group)
        plus = override.is_add() or override.is_force_add()
        if plus and group in self._default_choices:
            raise ConfigError(
                f"'{text}': the group '{group}' is already chosen from. Drop the plus: {text.lstrip('+')}"
            )
        if value is None:
            if self._default_choices.get(group) not in (None, "null"):
                raise ConfigError(f"{group}: one option is needed. Options: {', '.join(options)}.")
            return f"~{group}"
        if not isinstance(value, str) and str(value) in options:
            raise ConfigError(
                f"'{text}': an option that looks like a number is quoted: \"{group}='{value}'\""
            )
        if str(value) not in options:
            if package := _PACKAGES.get(group, {}).get(str(value)):
                raise ConfigError(f"{group}={value} needs a package that is missing: pip install {package}")
            raise ConfigError(f"{group}: no option '{value}'{suggestion(str(value), options)}")
        return text

    def _scan(self, groups: tuple[str, ...]) -> dict[str, Written]:
        """How the files of this composition are written, later files over earlier ones."""
        if groups in self._scanned:
            return self._scanned[groups]
        source: dict[str, Written] = {}
        found = self._loader.compute_defaults_list(self._config_name, list(groups), RunMode.RUN)
        for default in found.defaults:
            _refuse_plus_in_group(default)
            path = self._file(str(default.config_path))
            if path is not None:
                source |= scan(path, package=default.package or "")
        return self._scanned.setdefault(groups, source)

    def _file(self, config_path: str) -> Path | None:
        """The file of a config, None for those that Hydra brings itself."""
        for root in self._loader.get_sources():
            path = Path(root.path) / f"{config_path.removesuffix('.yaml')}.yaml"
            if root.scheme() == "file" and path.is_file():
                return path
        return None

    def _choices(self) -> dict[str, Any]:
        try:
            chosen = self._loader.compute_defaults_list(self._config_name, [], RunMode.RUN)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
            raise ConfigError(self._one_line(error)) from error
        return dict(chosen.overrides.known_choices)

    def _options(self, group: str) -> list[str]:
        return sorted(self._loader.get_group_options(group, ObjectType.CONFIG))

    def _one_line(self, error: BaseException) -> str:
        """The message of a library's exception; broken YAML is read again for a better one."""
        chain = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        for link in chain:
            if isinstance(link, yaml.MarkedYAMLError) and link.problem_mark is not None:
                scan(Path(link.problem_mark.name))
            if isinstance(link, MissingConfigException) and link.options:
                wanted = str(link.missing_cfg_file)
                return f"no file for '{wanted}'{suggestion(wanted.rpartition('/')[2], sorted(link.options))}"
        lines = [str(link).strip().partition("\n")[0].rstrip(" :.") for link in chain if str(link).strip()]
        return ": ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else type(error).__name__


def plain_tree(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain dicts, lists and scalars, interpolations resolved, `hydra` left out."""
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    try:
        tree = OmegaConf.to_container(own, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}") from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def quoted(text: str) -> str:
    """Text in Hydra's single quotes."""
    return QuotedString(text, Quote.single).with_quotes()


def _as_typed(key: str, value: str) -> str:
    """The override that gives `value` as text, as one types it in a POSIX shell."""
    if not set(value) & set('"$`!'):  # what a shell reads inside of double quotes
        return f'"{key}={quoted(value)}"'
    in_double_quotes = value.replace('"', '\\"')
    return "'" + f'{key}="{in_double_quotes}"'.replace("'", "'\\''") + "'"


def _reachable(override: Override, source: dict[str, Written]) -> str:
    """Let an override reach keys that no file holds, such as those of one stage's policy."""
    key, text, value = override.key_or_group, str(override.input_line), override.value()
    if isinstance(value, list) and any(known.startswith(f"{key}.") for known in source):
        entries = ", ".join(f"{item}: true" for item in value)
        raise ConfigError(f"{key} is a mapping, not a list. Write '{key}={{{entries}}}' in quotes.")
    if override.is_delete() and not key.startswith("hydra."):
        raise ConfigError(f"'{text}': keys are not deleted. Leave it out for its default, or set {key}=...")
    known = key in source and not isinstance(value, dict)
    if override.is_delete() or key.startswith("hydra.") or (known and not text.startswith("+")):
        return text
    return "++" + text.lstrip("+")


def _written(override: Override) -> dict[str, Written]:
    key, value = override.key_or_group, override.value()
    text = str(override.input_line).partition("=")[2]
    found = {key: Written(text, COMMAND_LINE)}
    if isinstance(value, dict):
        found |= {f"{key}.{name}": Written(str(item), COMMAND_LINE) for name, item in value.items()}
    return found


def _refuse_plus_in_group(default: ResultDefault) -> None:
    group = str(default.config_path).rpartition("/")[0]
    if "+" in group:
        raise ConfigError(
            f"config group '{group}' (used by '{default.parent}'): a group name with '+' can't be reached "
            "by any override. Rename the folder, e.g. with '_'."
        )


def _refuse_foreign_targets(node: Any, key: str) -> None:
    if isinstance(node, list):
        for item in node:
            _refuse_foreign_targets(item, key)
    elif isinstance(node, dict):
        target = node.get("_target_")
        if isinstance(target, str) and not target.startswith(_TRUSTED_TARGETS):
            raise ConfigError(f"{key}._target_: '{target}' is not allowed; only Hydra's own plugins are.")
        for name, item in node.items():
            _refuse_foreign_targets(item, f"{key}.{name}")
